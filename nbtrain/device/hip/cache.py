"""Code objects on disk, so that a kernel is compiled once on a machine and not once a run.

A code object is kept under a key made of all that it is compiled from: the kernel's bytecode and constants, those of every
device function that it reaches, the argument types, the block, the architecture, and the versions of what compiles it.

    <cache folder>/hip/<key>.co       the code object
    <cache folder>/hip/<key>.json     its SHA-256, and what it is, for people

A pair that does not fit is named in a warning, compiled again and replaced. Nothing is unpickled.
"""

import dis
import hashlib
import importlib.metadata
import json
import platform
import types as python_types
import warnings
from functools import cache
from pathlib import Path

import numpy as np
from numba import types
from numba.core.extending import _Intrinsic
from numba.hip.dispatcher import HIPDispatcher

import nbtrain
from nbtrain.device.cpu import cache_folder
from nbtrain.device.hip.compiler import Kernel, compile_for
from nbtrain.files import write_atomically

COMPILERS = ("numba", "numba-hip", "llvmlite", "rocm-bindings-compiler")


def code_object(kernel: Kernel, signature, arch: str, rocm: int) -> bytes:
    """The code object of a kernel for `arch`, from disk if it is there. `rocm` is the version of the installed ROCm."""
    what = {
        "kernel": kernel.py_func.__qualname__,
        "signature": [str(t) for t in signature],
        "threads": kernel.max_threads,
        "fastmath": kernel.fastmath,
        "arch": arch,
        "versions": {**versions(), "rocm": rocm},
    }
    source = fingerprint(kernel.py_func)
    if source is None:
        return compile_for(kernel, signature, arch)
    key = hashlib.sha256(json.dumps([what, source], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "hip"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = _read(folder / key)
    if found is None:
        found = compile_for(kernel, signature, arch)
        about = {**what, "sha256": hashlib.sha256(found).hexdigest()}
        write_atomically(folder / f"{key}.co", lambda file: file.write(found))
        write_atomically(
            folder / f"{key}.json", lambda file: file.write(json.dumps(about, indent=1).encode())
        )
    return found


def _read(path: Path) -> bytes | None:
    image, about = path.with_suffix(".co"), path.with_suffix(".json")
    if not about.exists():
        return None
    try:
        data = image.read_bytes()
        if hashlib.sha256(data).hexdigest() == json.loads(about.read_text())["sha256"]:
            return data
        reason = "its SHA-256 is not the one in the .json file"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    warnings.warn(f"the compiled kernel {image} is damaged ({reason}); it is compiled again.", stacklevel=2)
    return None


@cache
def versions() -> dict[str, str]:
    ours = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        ours.update(path.read_bytes())
    return {
        "nbtrain": f"{nbtrain.__version__} {ours.hexdigest()[:16]}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in COMPILERS},
    }


# ----------------------------------------------------------------------------
# What a function is compiled from


class _Unknown(Exception):
    """A value whose effect on the code cannot be told: the kernel is not kept."""


def fingerprint(py_func) -> str | None:
    """A hash of a function's bytecode and of every value that it refers to; None if one of them cannot be told."""
    digest = hashlib.sha256()
    try:
        _describe(py_func, digest.update, set())
    except _Unknown:
        return None
    return digest.hexdigest()


def _describe(value, write, seen) -> None:
    if isinstance(value, python_types.FunctionType):
        _describe_function(value, write, seen)
    elif isinstance(value, HIPDispatcher):
        _describe_function(value.py_func, write, seen)
    elif isinstance(value, _Intrinsic):
        _describe_function(value._defn, write, seen, own_globals=False)
    elif isinstance(value, python_types.CodeType):
        write(value.co_code)
        write(repr((value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)).encode())
        for constant in value.co_consts:
            _describe(constant, write, seen)
    elif isinstance(value, (tuple, frozenset)):
        write(f"{type(value).__name__} {len(value)}".encode())
        for item in value if isinstance(value, tuple) else sorted(value, key=repr):
            _describe(item, write, seen)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, np.generic, np.dtype, types.Type)):
        write(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, python_types.ModuleType):
        write(f"module {value.__name__};".encode())
    elif isinstance(value, (type, python_types.BuiltinFunctionType, np.ufunc)):
        write(f"{getattr(value, '__module__', None)}.{value.__name__};".encode())
    else:
        raise _Unknown(value)


def _describe_function(function, write, seen, own_globals=True) -> None:
    write(f"{function.__module__}.{function.__qualname__};".encode())
    if id(function) in seen:
        return
    seen.add(id(function))
    _describe(function.__code__, write, seen)
    _describe(function.__defaults__, write, seen)
    for cell in function.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:  # not assigned yet
            raise _Unknown(cell) from None
        _describe(contents, write, seen)
    # The globals of an intrinsic are LLVM's vocabulary; the files of this package are hashed as a whole.
    for name in sorted(_global_names(function.__code__)) if own_globals else ():
        if name in function.__globals__:
            write(name.encode())
            _describe(function.__globals__[name], write, seen)


def _global_names(code) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            names |= _global_names(constant)
    return names
