"""Machine code of kernels, kept on disk: a second start takes seconds.

A file holds the SHA-256 of what follows, a line of JSON (the entry point's name) and the binary. Nothing is
unpickled; a file whose hash does not match is compiled again. The key is a hash of everything that the code
follows from: the kernel with the values that its factory fixed, the device functions that it calls, the
argument types, the architecture, nbtrain's sources and the compilers' versions.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path

from nbtrain.device.cpu import cache_folder
from nbtrain.files import write_atomically

ROOT = Path(__file__).parents[1]


@functools.cache
def _sources() -> str:
    """A hash of nbtrain's sources and of the packages that turn them into machine code."""
    digest = hashlib.sha256(platform.python_version().encode())
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for package in (
        "numba",
        "numba-cuda",
        "numba-hip",
        "rocm-bindings-compiler",
        "llvmlite",
        "cuda-core",
        "nvidia-nvvm",
        "nvidia-nvjitlink",
    ):
        try:
            digest.update(f"{package}={importlib.metadata.version(package)}".encode())
        except importlib.metadata.PackageNotFoundError:
            pass
    return digest.hexdigest()


@functools.cache
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.exists(path) else path


def _describe(value, depth: int = 0) -> str:
    """A kernel, a device function or a constant as text: code, and what its factory fixed."""
    function = getattr(value, "py_func", value)
    code = getattr(function, "__code__", None)
    if code is None or depth > 20:
        return f"{type(value).__name__}:{value!r}"
    cells = [_describe(cell.cell_contents, depth + 1) for cell in function.__closure__ or ()]
    inside = (code.co_code.hex(), code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")])
    special = [getattr(value, name, None) for name in ("one_architecture", "shared_bytes")]
    options = sorted((k, repr(v)) for k, v in getattr(value, "targetoptions", {}).items() if k != "link")
    name = f"{function.__module__}.{function.__qualname__}{_file_hash(code.co_filename)}"
    return f"{name}{inside}{options}{special}{cells}"


def path_of(compiled, types, architecture: str) -> Path:
    """The file that the machine code of a kernel for these argument types is kept in."""
    key = hashlib.sha256(repr((_describe(compiled), types, architecture, _sources())).encode()).hexdigest()
    return cache_folder() / "gpu" / f"{key}.bin"


def cached_binary(compiled, types, architecture: str, compile_) -> tuple[str, bytes]:
    """(entry point, machine code) of a kernel for these argument types, from disk or from `compile_()`."""
    path = path_of(compiled, types, architecture)
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            header, _, binary = content[32:].partition(b"\n")
            return json.loads(header)["entry"], binary
    except OSError:
        pass
    entry, binary = compile_()
    content = json.dumps({"entry": entry}).encode() + b"\n" + binary
    with contextlib.suppress(OSError):  # a full or read-only disk: the code lasts as long as the process
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, lambda file: file.write(hashlib.sha256(content).digest() + content))
    return entry, binary
