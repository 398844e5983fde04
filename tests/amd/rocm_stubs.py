"""Stub ROCm libraries: CuPy's ROCm wheel imports over them on a machine without ROCm, and they record calls.

What the wheel needs is read from its own files: libraries, functions and their versions. The functions of
rocm_stub.c do something, the others return 0. All of them are in the stub of the HIP runtime, which the other
stubs depend on.
"""

import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("rocm_stub.c")
RUNTIME = "libamdhip64.so.7"
SHT_DYNAMIC, SHT_DYNSYM, SHT_VERNEED, SHT_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
DT_NEEDED, SHN_UNDEF = 1, 0


class Call(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("words", ctypes.c_longlong * 64)]


class Stubs:
    """Builds the stubs in `folder`, loads them and puts CuPy on the path."""

    def __init__(self, gate, folder: Path):
        libraries, functions = set(), {}
        for path in (gate.folder / "cupy").rglob("*.so"):
            _read_imports(path.read_bytes(), libraries, functions)
        written = set(re.findall(r"^int (\w+)\(", SOURCE.read_text(), re.MULTILINE))
        plain = folder / "plain.c"
        plain.write_text(
            "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(set(functions) - written))
        )
        versions = {}
        for name, version in functions.items():
            versions.setdefault(version, []).append(name)
        script = folder / "versions.map"
        script.write_text(
            "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in versions.items() if v)
        )
        objects = []
        for source in (SOURCE, plain):
            objects.append(folder / f"{source.stem}.o")
            _zig(gate, f"clang -O1 -w -fPIC -fno-builtin -ffreestanding -c {source} -o {objects[-1]}")
        runtime = folder / RUNTIME
        together = " ".join(map(str, objects))
        _zig(gate, f"ld.lld -shared -soname {RUNTIME} --version-script={script} {together} -o {runtime}")
        self.runtime = ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        for soname in sorted(libraries - {RUNTIME}):
            _zig(gate, f"ld.lld -shared -soname {soname} --no-as-needed {runtime} -o {folder / soname}")
            ctypes.CDLL(str(folder / soname), ctypes.RTLD_GLOBAL)
        (folder / "lib").mkdir()
        (folder / "lib" / "libhipblas.so").symlink_to(folder / "libhipblas.so.3")
        (folder / "llvm").symlink_to(gate.folder / "rocm" / "llvm")
        os.environ["ROCM_PATH"] = str(folder)  # where ROCm's Python bindings look
        sys.path.insert(0, str(gate.folder / "cupy"))

    def calls(self) -> list[tuple[str, list[int]]]:
        """(function, words) of the calls since the last time."""
        count = ctypes.c_int.in_dll(self.runtime, "stub_count")
        made = (Call * 64).in_dll(self.runtime, "stub_calls")[: count.value]
        found = [(call.name.decode(), list(call.words)) for call in made]
        count.value = 0
        return found

    def expect_parameters(self, sizes) -> None:
        """Says how many bytes each parameter of the next kernels has."""
        slots = (ctypes.c_int * 64).in_dll(self.runtime, "stub_parameter_sizes")
        slots[:] = [*sizes, *[0] * (64 - len(sizes))]


def _zig(gate, command: str) -> None:
    subprocess.run([gate.zig, *command.split()], check=True, capture_output=True)


def _read_imports(image: bytes, libraries: set, functions: dict) -> None:
    """Adds the ROCm libraries that an ELF file needs, and {function: version or None} of its imports."""
    from tests.amd.code_object import sections_of

    sections = sections_of(image)
    by_kind = {section[1]: section for section in sections}

    def text(section, at):
        start = sections[section[6]][4] + at
        return image[start : image.index(b"\0", start)].decode()

    dynamic = by_kind[SHT_DYNAMIC]
    for tag, value in struct.iter_unpack("<qQ", image[dynamic[4] : dynamic[4] + dynamic[5]]):
        if tag == DT_NEEDED and re.match(r"lib(amdhip64|hip|roc|rccl)", text(dynamic, value)):
            libraries.add(text(dynamic, value))
    names, at = {}, by_kind[SHT_VERNEED][4] if SHT_VERNEED in by_kind else 0
    while at:
        _, count, _, first, following = struct.unpack_from("<HHIII", image, at)
        entry = at + first
        for _ in range(count):
            _, _, index, name, step = struct.unpack_from("<IHHII", image, entry)
            names[index] = text(by_kind[SHT_VERNEED], name)
            entry += step
        at = at + following if following else 0
    symbols = by_kind[SHT_DYNSYM]
    for k in range(symbols[5] // 24):
        name, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", image, symbols[4] + 24 * k)
        name = text(symbols, name)
        if section == SHN_UNDEF and re.match(r"(__)?hip|roc|nccl", name):
            version = struct.unpack_from("<H", image, by_kind[SHT_VERSYM][4] + 2 * k)[0] if names else 0
            functions[name] = names.get(version)
