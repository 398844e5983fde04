"""Kernels to AMD code objects, for any architecture, with numba-hip; no GPU is asked anything."""

import functools
import types as python_types

from numba import hip, types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.target_extension import target_override
from numba.hip import dispatcher
from numba.hip.amdgcn import AMDGPUTargetMachine
from numba.hip.compiler import HIPCompiler, HIPFlags
from numba.hip.descriptor import hip_target
from numba.hip.typing_lowering import hipdevicelib
from numba.hip.util import comgrutils, llvmutils

from nbtrain.device.cpu import FASTMATH

ANY = "gfx90a"  # numba-hip wants an architecture while it types and lowers, and does not use it
MOST_THREADS = 1024


class Kernel:
    """A Python function to be compiled as a kernel, once for each signature and architecture."""

    def __init__(self, py_func, threads: int, fastmath: bool):
        self.py_func = py_func
        self.targetoptions = {"threads": threads, "fastmath": fastmath}

    def __repr__(self):
        return f"<kernel {self.py_func.__name__}>"


def kernel(*, launch_bounds=None, fastmath: bool = True, shared_bytes: int = 0):
    """Decorates a kernel. `launch_bounds` is threads a block, or (threads, blocks on a multiprocessor).
    `shared_bytes` of dynamic shared memory: numba-hip has none."""
    assert not shared_bytes, "numba-hip has no dynamic shared memory"
    threads = launch_bounds[0] if isinstance(launch_bounds, tuple) else launch_bounds
    return lambda py_func: Kernel(py_func, threads or MOST_THREADS, fastmath)


def device_function(py_func):
    return hip.jit(device=True, fastmath=True)(py_func)


def entry_name(kernel: Kernel) -> str:
    return f"nbtrain_{kernel.py_func.__name__}"


@global_compiler_lock
def compile_for(kernel: Kernel, signature, arch: str) -> bytes:
    """The code object of a kernel for `arch` (gfx90a, gfx942 …), as `entry_name(kernel)`."""
    library = _lowered(kernel, tuple(signature))
    functions = [function for module in library.modules for function in module.functions]
    # numba-hip adds a target to each function and never takes one away: one with two is not inlined, so its
    # stack and its shared memory are not counted in the kernel.
    for function in functions:
        for attribute in [a for a in function.attributes if a.startswith('"target-')]:
            function.attributes.discard(attribute)
    # As library.get_codeobj does, which takes most of its time to link the whole of the device library.
    called = frozenset(f.name for f in functions if f.is_declaration and not f.name.startswith("llvm."))
    modules = [*library._get_linker_inputs(arch), _device_library(arch, called)]
    linked = llvmutils.clean_up_kernel_module(llvmutils.link_modules(modules, True), to_bc=True)
    code, _, _ = comgrutils.compile_bc(linked, isa_name=f"amdgcn-amd-amdhsa--{arch}", logging=True)
    return bytes(code)


@functools.cache
def _device_library(arch: str, called: frozenset) -> bytes:
    """numba-hip's device library, less what a kernel that calls these functions does not reach."""
    keep = ";".join(f"preserve-gv={name}" for name in sorted(called))
    machine = AMDGPUTargetMachine(arch)
    return machine.optimize_module(
        hipdevicelib.get_llvm_bc(arch), passes=f"internalize<{keep}>,globaldce", to_bc=True
    )


@functools.lru_cache(maxsize=1)
def _lowered(kernel: Kernel, signature):
    """The LLVM modules of a kernel and its device functions, the same for every architecture."""
    options = kernel.targetoptions
    result = _compile(kernel.py_func, types.void, signature, fastmath=options["fastmath"], amdgpu_arch=ANY)
    code = kernel.py_func.__code__
    library, wrapper = result.target_context.prepare_hip_kernel(
        result.library, result.fndesc, False, False, {"opt": 3}, code.co_filename, code.co_firstlineno,
        name=entry_name(kernel),
    )  # fmt: skip
    # The registers that a thread may use follow from the largest block; without this it is 1024 threads.
    # llvmlite refuses attributes that it does not know; numba-hip adds its own in the same way.
    set.add(wrapper.attributes, f'"amdgpu-flat-work-group-size"="1,{options["threads"]}"')
    return library


def _compile(
    py_func, return_type, args, debug=False, lineinfo=False, inline=False, fastmath=False, options=None,
    amdgpu_arch=None,
):  # fmt: skip
    """numba.hip.compiler.compile_hip, but fast mathematics still reckon with NaN and infinity."""
    flags = HIPFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.forceinline = bool(inline)
    if fastmath:
        flags.fastmath = FastMathOptions(FASTMATH)
    flags.hip_options = options or {"opt": 3}
    flags.amdgpu_arch = amdgpu_arch
    with target_override("hip"):
        result = compiler.compile_extra(
            typingctx=hip_target.typing_context, targetctx=hip_target.target_context, func=py_func, args=args,
            return_type=return_type, flags=flags, locals={}, pipeline_class=HIPCompiler,
        )  # fmt: skip
    result.library.finalize()
    return result


# A device function asks for the current GPU while its caller is typed; no GPU need be there.
dispatcher.get_current_device = lambda: python_types.SimpleNamespace(amdgpu_arch=ANY)
dispatcher.compile_hip = _compile
