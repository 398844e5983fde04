"""Lets numba-hip compile without ROCm and without a GPU: `install(gate)`, before numba.hip is imported.

numba-hip hands its work to AMD's code object manager through four functions of rocm.comgr. Here they are done
by clang and lld (those in the zig wheel) and by ROCm's LLVM, which numba-hip's bindings bundle. The code
objects are real ones, from the same LLVM passes; what cannot be seen without a GPU is whether they run.
"""

import ctypes
import functools
import importlib
import os
import subprocess
import tempfile
from pathlib import Path

ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100")  # MI200, MI300, Radeon RX 7900
TRIPLE = b"amdgcn-amd-amdhsa"
_gate = None


def install(gate) -> None:
    """Points numba-hip at the gate's files and replaces the four functions."""
    global _gate
    _gate = gate
    for shim in sorted((gate.folder / "shim").glob("*.so.1")):
        ctypes.CDLL(str(shim), ctypes.RTLD_GLOBAL)  # libLLVM asks for them by soname and finds them loaded
    os.environ["HIP_PYTHON_HIPRTC_RUNTIME_HEADER"] = str(gate.header)
    os.environ["NUMBA_HIP_LIBCLANG_FILE"] = str(gate.libclang)
    os.environ["ROCM_PATH"] = str(gate.folder / "rocm")
    tempfile.tempdir = str(gate.folder / "tmp")  # where numba-hip keeps the compiled device header
    comgr = importlib.import_module("rocm.comgr")
    for function in (get_isa_metadata_all, compile_hip_to_bc, compile_bc, compile_bc_to_hsa):
        setattr(comgr, function.__name__, function)
    importlib.import_module(
        "rocm.bindings.clang.cindex"
    ).Config.compatibility_check = False  # libclang 18, bindings 23


# ----------------------------------------------------------------------------
# The four functions, with the signatures of rocm.comgr


def get_isa_metadata_all():
    names = (f"{TRIPLE.decode()}--{arch}" for arch in ARCHITECTURES)
    return {name: {"Name": name, "Architecture": "amdgcn", "Processor": _arch(name)} for name in names}


def compile_hip_to_bc(source, isa_name, hip_version_tuple, extra_opts=(), **_):
    """HIP C++ to bitcode. The device header, which declares ROCm's mathematics, is linked with them."""
    arch = _arch(isa_name)
    source = source.encode() if isinstance(source, str) else bytes(source)
    with tempfile.TemporaryDirectory() as folder:
        text, bitcode = Path(folder, "source.hip"), Path(folder, "source.bc")
        text.write_bytes(source)
        major, minor, patch = hip_version_tuple
        _run("clang", "-x", "hip", "--cuda-device-only", f"--offload-arch={arch}", "-emit-llvm",
             "-c", text, "-o", bitcode,
             "-O3", "-std=c++14", "-fgpu-rdc", "-mcumode", "-nogpuinc", "-nogpulib", "-w",
             "-DHIP_PI=3.14159265358979323846", "-DHIP_PI_F=3.14159265358979323846f",
             f"-DHIP_VERSION_MAJOR={major}", f"-DHIP_VERSION_MINOR={minor}", f"-DHIP_VERSION_PATCH={patch}",
             # The header of ROCm 5.7 reads its clock by an instruction that RDNA 3 does not have.
             "-D__builtin_amdgcn_s_memtime=__builtin_readcyclecounter", *extra_opts)  # fmt: skip
        module = bitcode.read_bytes()
    if b"__ocml_" in source:
        from numba.hip.amdgcn import AMDGPUTargetMachine
        from numba.hip.util import llvmutils

        machine = AMDGPUTargetMachine(arch)
        libraries = [(_gate.bitcode / name).read_bytes() for name in ("ocml.bc", "ockl.bc")]
        linked = llvmutils.link_modules([_controls(arch, machine.data_layout), *libraries, module], True)
        module = machine.optimize_module(linked, passes="default<O2>", to_bc=True)
    return module, None, None


def compile_bc(ir_or_bc, isa_name, **_):
    """Bitcode to a linked code object."""
    with tempfile.TemporaryDirectory() as folder:
        relocatable, linked = Path(folder, "kernel.o"), Path(folder, "kernel.co")
        relocatable.write_bytes(_llvm().emit(bytes(ir_or_bc), _arch(isa_name), assembly=False))
        _run("ld.lld", "-shared", "--no-undefined", relocatable, "-o", linked)
        return linked.read_bytes(), "", None


def compile_bc_to_hsa(source, isa_name, **_):
    """Bitcode to assembly."""
    return _llvm().emit(bytes(source), _arch(isa_name), assembly=True), None, None


# ----------------------------------------------------------------------------


def _arch(isa_name) -> str:
    return isa_name.split("--")[1].split(":")[0]


def _run(*command) -> None:
    done = subprocess.run([str(_gate.zig), *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[:4000]}")


def _controls(arch: str, data_layout: str) -> bytes:
    """The constants that tell ROCm's device mathematics their target: those of its oclc_*.bc files."""
    wave64 = arch.startswith("gfx9")
    version = int(arch[3:-2]) * 1000 + int(arch[-2], 16) * 100 + int(arch[-1], 16)
    constants = {
        "wavefrontsize64": ("i8", int(wave64)), "wavefrontsize_log2": ("i8", 6 if wave64 else 5),
        "finite_only_opt": ("i8", 0), "unsafe_math_opt": ("i8", 0), "daz_opt": ("i8", 0),
        "correctly_rounded_sqrt32": ("i8", 1), "ISA_version": ("i32", version), "ABI_version": ("i32", 600),
    }  # fmt: skip
    lines = [f'target datalayout = "{data_layout}"', f'target triple = "{TRIPLE.decode()}"']
    for name, (kind, value) in constants.items():
        lines.append(
            f"@__oclc_{name} = linkonce_odr protected local_unnamed_addr addrspace(4) constant {kind} {value}"
        )
    return "\n".join(lines).encode()


def _check(failed, message) -> None:
    if failed:
        raise RuntimeError(message.value.decode() if message.value else "LLVM failed without saying why")


@functools.cache
def _llvm() -> "Llvm":
    return Llvm()


class Llvm:
    """The LLVM bundled with numba-hip's bindings, by its C interface: compile a module, disassemble."""

    def __init__(self):
        paths = importlib.import_module("rocm.bindings.util.paths")
        self.lib = lib = ctypes.CDLL(os.fsdecode(paths.get_library_path("LLVM")))
        for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser", "Disassembler"):
            getattr(lib, f"LLVMInitializeAMDGPU{part}")()
        pointers = "ContextCreate CreateMemoryBufferWithMemoryRangeCopy CreateTargetMachine GetBufferStart"
        for name in (pointers + " CreatePassBuilderOptions RunPasses CreateDisasmCPU").split():
            getattr(lib, f"LLVM{name}").restype = ctypes.c_void_p
        lib.LLVMGetBufferSize.restype = lib.LLVMDisasmInstruction.restype = ctypes.c_size_t
        lib.LLVMGetErrorMessage.restype = ctypes.c_char_p

    def emit(self, bitcode: bytes, arch: str, assembly: bool) -> bytes:
        lib, pointer = self.lib, ctypes.c_void_p
        context = pointer(lib.LLVMContextCreate())
        buffer = pointer(
            lib.LLVMCreateMemoryBufferWithMemoryRangeCopy(bitcode, ctypes.c_size_t(len(bitcode)), b"kernel")
        )
        module, target, out, message = pointer(), pointer(), pointer(), ctypes.c_char_p()
        _check(
            lib.LLVMParseIRInContext(context, buffer, ctypes.byref(module), ctypes.byref(message)), message
        )
        _check(lib.LLVMGetTargetFromTriple(TRIPLE, ctypes.byref(target), ctypes.byref(message)), message)
        aggressive, position_independent, default_model = 3, 2, 0
        machine = pointer(
            lib.LLVMCreateTargetMachine(
                target, TRIPLE, arch.encode(), b"", aggressive, position_independent, default_model
            )
        )
        options = pointer(lib.LLVMCreatePassBuilderOptions())
        failed = lib.LLVMRunPasses(module, b"default<O3>", machine, options)
        if failed:
            raise RuntimeError(lib.LLVMGetErrorMessage(pointer(failed)).decode())
        kind = 0 if assembly else 1
        failed = lib.LLVMTargetMachineEmitToMemoryBuffer(
            machine, module, kind, ctypes.byref(message), ctypes.byref(out)
        )
        _check(failed, message)
        result = ctypes.string_at(lib.LLVMGetBufferStart(out), lib.LLVMGetBufferSize(out))
        lib.LLVMDisposeMemoryBuffer(out)
        lib.LLVMDisposePassBuilderOptions(options)
        lib.LLVMDisposeTargetMachine(machine)
        lib.LLVMContextDispose(context)  # takes the module with it
        return result

    def disassemble(self, code: bytes, arch: str) -> list[str]:
        """The instructions of machine code, one a line."""
        lib = self.lib
        reader = ctypes.c_void_p(lib.LLVMCreateDisasmCPU(TRIPLE, arch.encode(), None, 0, None, None))
        memory = (ctypes.c_uint8 * len(code)).from_buffer_copy(code)
        start, at, line, lines = ctypes.addressof(memory), 0, ctypes.create_string_buffer(256), []
        while at < len(code):
            used = lib.LLVMDisasmInstruction(
                reader, ctypes.c_void_p(start + at), ctypes.c_uint64(len(code) - at), ctypes.c_uint64(at),
                line, ctypes.c_size_t(len(line)),
            )  # fmt: skip
            lines.append(
                line.value.decode().strip()
                if used
                else f".long {int.from_bytes(code[at : at + 4], 'little')}"
            )
            at += used or 4
        lib.LLVMDisasmDispose(reader)
        return lines


def disassemble(code: bytes, arch: str) -> list[str]:
    return _llvm().disassemble(code, arch)
