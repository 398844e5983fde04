"""Builds the environment in which kernels are compiled for AMD GPUs without ROCm and without a GPU.

    python tests/amd/setup_gate.py           builds it if it is not there and prints its folder

Everything is pinned: wheels by `requirements.txt` beside this file (pip checks the hashes), two Debian
packages by SHA-256 below. The folder is `~/.cache/nbtrain-gate/<hash of the pins>`, or under
NBTRAIN_GATE_ROOT. It holds

    venv/            numba-hip with the LLVM that its bindings bundle, libclang, and zig for its clang and lld
    hiprtc.h         the HIP runtime's device header, which ROCm keeps as a symbol of libhiprtc-builtins
    bitcode/         ROCm's device mathematics, ocml.bc and ockl.bc
    cupy/            CuPy's ROCm wheel, which imports only over the stubs of rocm_stubs.py
    rocm/            the one folder of a ROCm installation that numba-hip looks for: clang's own headers
    shim/            stand-ins for two compression libraries that the bundled LLVM asks for under ROCm's names
    tmp/             numba-hip's cache of the compiled device header

It needs no compiler, no ROCm and no root rights: only Python 3.11 to 3.14 and apt, on x86-64 Linux.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS, CUPY = HERE / "requirements.txt", HERE / "cupy_requirements.txt"
SUITE = "trixie"  # a released Debian: its packages stay as they are


@dataclass(frozen=True)
class Deb:
    name: str
    version: str
    sha256: str


HIPRTC = Deb(
    "libhiprtc-builtins5",
    "5.7.1-6+deb13u1",
    "badcd2e52f86eeec84a2dda525bd4bb4ae7ffb864dd39f759612bac9a1f6877b",
)
DEVICE_LIBS = Deb(
    "rocm-device-libs-17",
    "6.0+git20231212.5a852ed-2",
    "fa10f0f5be5269c715492e4e3d3816f956a4d8b9098443d54052d351cfda9213",
)

# What libLLVM imports, to compress debug sections, from two libraries that only ROCm has under these names.
# Kernels have no debug sections: every function may refuse.
SHIMS = {
    "librocm_sysdeps_z.so.1": "compress2 compressBound crc32 uncompress",
    "librocm_sysdeps_zstd.so.1": "ZSTD_CCtx_setParameter ZSTD_compress2 ZSTD_compressBound ZSTD_createCCtx "
    "ZSTD_decompress ZSTD_freeCCtx ZSTD_getErrorName ZSTD_isError",
}
SHIM_VERSION = "AMDROCM_SYSDEPS_1.0"


class GateUnavailable(Exception):
    """Why the environment is not there, or cannot be built on this machine."""


@dataclass(frozen=True)
class Gate:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def packages(self) -> Path:
        major, minor = sys.version_info[:2]
        return self.folder / "venv" / "lib" / f"python{major}.{minor}" / "site-packages"

    @property
    def zig(self) -> Path:
        return self.packages / "ziglang" / "zig"

    @property
    def libclang(self) -> Path:
        return self.packages / "clang" / "native" / "libclang.so"

    @property
    def header(self) -> Path:
        return self.folder / "hiprtc.h"

    @property
    def bitcode(self) -> Path:
        return self.folder / "bitcode"

    @property
    def complete(self) -> Path:
        return self.folder / "complete"


def expected_gate() -> Gate:
    """Where the environment for these pins and this Python belongs, whether or not it is there."""
    pins = hashlib.sha256(Path(__file__).read_bytes() + REQUIREMENTS.read_bytes() + CUPY.read_bytes())
    pins.update(repr(sys.version_info[:2]).encode())
    root = os.environ.get("NBTRAIN_GATE_ROOT") or Path.home() / ".cache" / "nbtrain-gate"
    return Gate(Path(root).expanduser().resolve() / pins.hexdigest()[:16])


def find_gate() -> Gate:
    """The environment, or GateUnavailable where it has not been built."""
    gate = expected_gate()
    if not gate.complete.exists():
        raise GateUnavailable(
            f"the AMD gate is not installed in {gate.folder}; run python {_relative(__file__)}"
        )
    return gate


def build_gate() -> Gate:
    """The environment, built first if it is not there. Only one process builds; the others wait for it."""
    gate = expected_gate()
    if gate.complete.exists():
        return gate
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not (3, 11) <= sys.version_info < (
        3,
        15,
    ):
        raise GateUnavailable(
            f"the AMD gate is built on x86-64 Linux with Python 3.11 to 3.14; this is {platform.system()} "
            f"{platform.machine()} with Python {platform.python_version()}"
        )
    gate.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(gate.folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not gate.complete.exists():
            shutil.rmtree(gate.folder, ignore_errors=True)
            gate.folder.mkdir()
            _unpack_debs(
                gate
            )  # the quicker half first: it also finds out whether Debian's packages can be had
            _install_wheels(gate)
            _build_shims(gate)
            clang_headers = gate.folder / "rocm" / "llvm" / "lib" / "clang"
            clang_headers.mkdir(parents=True)
            (clang_headers / "19").symlink_to(gate.zig.parent / "lib")
            (gate.folder / "tmp").mkdir()
            gate.complete.touch()
    return gate


def _relative(path) -> str:
    return os.path.relpath(path)


def _run(*command, **options) -> str:
    """Standard output of a command, or GateUnavailable with the last lines that it wrote."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    except FileNotFoundError:
        raise GateUnavailable(f"the AMD gate needs the command {command[0]}") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise GateUnavailable(f"{' '.join(map(str, command[:4]))} … failed:\n{tail}")
    return done.stdout


# ----------------------------------------------------------------------------
# Wheels


def _install_wheels(gate: Gate):
    venv.create(gate.folder / "venv", with_pip=True)
    _pip(gate, REQUIREMENTS)
    _pip(gate, CUPY, "--target", gate.folder / "cupy")


def _pip(gate: Gate, requirements: Path, *options):
    """Installs pinned wheels with pip, which checks every hash."""
    _run(
        gate.python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
        "--require-hashes", "--disable-pip-version-check", "-r", requirements, *options,
    )  # fmt: skip


# ----------------------------------------------------------------------------
# Debian packages, fetched by apt with folders of its own, so that the system's package lists stay as they are


def _unpack_debs(gate: Gate):
    with _private_apt(gate.folder / "apt") as apt:
        hiprtc, device_libs = (_unpack(apt, gate.folder / "apt", deb) for deb in (HIPRTC, DEVICE_LIBS))
        gate.header.write_bytes(_embedded_header(next(hiprtc.rglob("libhiprtc-builtins.so.*"))))
        gate.bitcode.mkdir()
        for name in ("ocml.bc", "ockl.bc"):
            shutil.copy(next(device_libs.rglob(name)), gate.bitcode)


@contextlib.contextmanager
def _private_apt(folder: Path):
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(_debian_source())
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": "none",
    }
    if os.geteuid() == 0:
        settings["APT::Sandbox::User"] = "root"  # apt's own user cannot write below a private folder
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    _run(*apt, "update")
    yield apt
    shutil.rmtree(folder)


def _debian_source() -> str:
    """A line of sources.list for SUITE on the mirror that this machine already uses for Debian."""
    etc = Path("/etc/apt")
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    mirrors = re.findall(r"^(?:deb\s+(?:\[.*?\]\s+)?|URIs:\s*)(\S*/debian/?)(?=\s|$)", text, re.MULTILINE)
    if not mirrors:
        raise GateUnavailable(
            "the AMD gate takes two packages from Debian, and apt knows no mirror of it here"
        )
    keys = re.search(r"^Signed-By:\s*(\S*debian-archive\S*)", text, re.MULTILINE)
    signed = f"[signed-by={keys[1]}] " if keys else ""
    return f"deb {signed}{mirrors[0]} {SUITE} main\n"


def _unpack(apt, folder: Path, deb: Deb) -> Path:
    _run(*apt, "download", f"{deb.name}={deb.version}", cwd=folder)
    (file,) = folder.glob(f"{deb.name}_*.deb")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != deb.sha256:
        raise GateUnavailable(f"{file.name} has SHA-256 {found}, expected {deb.sha256}; it is not unpacked")
    target = folder / deb.name
    _run("dpkg-deb", "-x", file, target)
    return target


def _embedded_header(library: Path) -> bytes:
    lib = ctypes.CDLL(str(library))
    size = ctypes.c_uint32.in_dll(lib, "__hipRTC_header_size").value
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(lib, "__hipRTC_header")), size)


# ----------------------------------------------------------------------------
# Stand-ins


def _build_shims(gate: Gate):
    folder = gate.folder / "shim"
    folder.mkdir()
    exports = folder / "exports.map"
    exports.write_text(f"{SHIM_VERSION} {{ global: *; }};\n")
    for soname, functions in SHIMS.items():
        source, compiled = folder / "shim.c", folder / "shim.o"
        source.write_text("".join(f"long {name}(void) {{ return -1; }}\n" for name in functions.split()))
        _run(gate.zig, "clang", "-w", "-O1", "-fPIC", "-ffreestanding", "-c", source, "-o", compiled)
        _run(gate.zig, "ld.lld", "-shared", "-soname", soname, f"--version-script={exports}", compiled,
             "-o", folder / soname)  # fmt: skip


if __name__ == "__main__":
    try:
        print(build_gate().folder)
    except GateUnavailable as reason:
        print(f"AMD gate unavailable: {reason}", file=sys.stderr)
        sys.exit(1)
