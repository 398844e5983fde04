"""NVIDIA GPUs through numba-cuda. What only this vendor can run lives in this package."""

import re

from numba import cuda, types

from nbtrain.device.nvidia import vector
from nbtrain.device.nvidia.vector import (
    await_fetches,
    block_reduce,
    block_sums,
    exp2,
    fetch8,
    load,
    load8,
    log2,
    rcp,
    round8,
    rsqrt,
    shared_words,
    store,
    store8,
    unpack8,
)
from nbtrain.device.packed import make_launch

__all__ = [
    "architecture", "await_fetches", "block_reduce", "block_sums", "compile_binary", "compile_for", "cuda",
    "device_function", "exp2", "fetch8", "kernel", "launch", "load", "load8", "log2", "rcp", "round8",
    "rsqrt", "shared_words", "store", "store8", "unpack8",
]  # fmt: skip

device_function = cuda.jit(device=True, fastmath=True)


def kernel(
    *, launch_bounds=None, fastmath: bool = True, shared_bytes: int = 0, one_architecture: bool = False
):
    """Decorates a kernel. `launch_bounds` is threads a block, or (threads, blocks on a multiprocessor).

    `shared_bytes` of dynamic shared memory come with every launch. `one_architecture`: the kernel uses what
    only the architecture that it is compiled for has, and later ones have not (wgmma on sm_90a).
    """

    def decorate(function):
        compiled = cuda.jit(launch_bounds=launch_bounds, fastmath=fastmath)(function)
        compiled.shared_bytes, compiled.one_architecture = shared_bytes, one_architecture
        return compiled

    return decorate


def compile_for(compiled, signature, cc: tuple[int, int]) -> str:
    """PTX of a kernel for compute capability `cc`; needs neither a GPU nor a driver.

    A device function asks the current device for its capability while the kernel is typed; here `cc` answers.
    Overloads are kept, so use one capability in a process.
    """
    import numba.cuda.dispatcher

    class Device:
        compute_capability = cc

    numba.cuda.dispatcher.get_current_device = lambda: Device
    vector.compiling_for = cc
    options = compiled.targetoptions
    text, _ = cuda.compile(
        compiled.py_func,
        types.void(*signature),
        cc=(*cc, "a") if compiled.one_architecture else cc,
        device=False,
        abi="numba",
        output="ptx",
        fastmath=options.get("fastmath", False),
        launch_bounds=options.get("launch_bounds"),
    )
    return text


def architecture() -> str:
    """The current device's, with the letter that unlocks what only this architecture has: wgmma on sm_90a."""
    from cupy.cuda import Device

    text = Device().compute_capability  # "90"
    return f"sm_{text}{'a' if int(text) >= 90 else ''}"


def compile_binary(compiled, signature, architecture: str) -> tuple[str, bytes]:
    """(entry point, machine code) for an architecture, through nvJitLink."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    digits = architecture.removeprefix("sm_").rstrip("a")
    ptx = compile_for(compiled, signature, (int(digits[:-1]), int(digits[-1])))
    entry = compiled.py_func.__name__  # what profilers show, in place of a mangled name of 500 letters
    ptx = ptx.replace(re.findall(r"\.entry\s+([\w$]+)", ptx)[0], entry)
    code = ObjectCode.from_ptx(ptx.encode())
    return entry, Linker(code, options=LinkerOptions(arch=architecture)).link("cubin").code


launch = make_launch(compile_binary, architecture)
