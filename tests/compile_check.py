"""Compiles every kernel for one NVIDIA architecture without a GPU and checks the machine code: no fp64, no
stack, no spills.

    python -m tests.compile_check 90 [part of an operator's name]

Prints a line a kernel and exits with 1 if one breaks a rule. PTX comes from numba-cuda, machine code from
CUDA's ptxas (the wheel nvidia-cuda-nvcc, or the one on PATH).
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What may break a rule, and why: {(kernel, architecture): {"f64" | "stack" | "spill": bytes or count}}
ALLOWED: dict[tuple[str, str], dict[str, int]] = {}

DTYPES_BEFORE_AMPERE = ("fp32", "fp16")


def find_ptxas() -> str:
    for file in importlib.metadata.files("nvidia-cuda-nvcc") or ():
        if file.name == "ptxas":
            return str(file.locate())
    return shutil.which("ptxas") or sys.exit("ptxas not found: pip install nvidia-cuda-nvcc==13.0.*")


def assemble(ptx: str, arch: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [find_ptxas(), f"-arch={arch}", "-v", str(source), "-o", str(source.with_suffix(".cubin"))]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[:2000])

    def number(pattern):
        return sum(map(int, re.findall(pattern, result.stderr)))

    return {
        "registers": number(r"Used (\d+) registers"),
        "shared": number(r"(\d+) bytes smem"),
        "stack": number(r"(\d+) bytes stack frame"),
        "spill": number(r"(\d+) bytes spill"),
        "f64": len(re.findall(r"\.f64\s", ptx)),
        "serialized": len(re.findall(r"serialized", result.stderr)),  # wgmma that ptxas had to wait for
    }


def capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) of "90" and "90a"."""
    digits = arch.rstrip("a")
    return int(digits[:-1]), int(digits[-1])


def calls(arch: str, only: str):
    """What there is to compile for `arch`: every operator's kernels, and those that only some architectures
    can run."""
    from nbtrain.device import FLOATS
    from tests.kernel_calls import record
    from tests.nvidia.flash_calls import record as record_flash

    capability = capability_of(arch)
    dtypes = DTYPES_BEFORE_AMPERE if capability < (8, 0) else tuple(FLOATS)
    found = [] if arch.endswith("a") else record(only, dtypes, capability)
    return found + (record_flash(arch) if arch in ("80", "90a") and only in "flash" else [])


def main(arch: str, only: str = "") -> int:
    from nbtrain.device.nvidia import compile_for

    cc, failures = capability_of(arch), 0
    with ThreadPoolExecutor(2) as pool:  # ptxas runs beside the next kernel's compilation
        jobs = []
        for kernel, types, _, _ in calls(arch, only):
            name = kernel.py_func.__name__
            storage = "/".join(dict.fromkeys(str(t.dtype) for t in types if hasattr(t, "dtype")))
            jobs.append((name, storage, pool.submit(assemble, compile_for(kernel, types, cc), f"sm_{arch}")))
        for name, storage, job in jobs:
            try:
                row = job.result()
                allowed = ALLOWED.get((name, f"sm_{arch}"), {})
                bad = [
                    rule
                    for rule in ("f64", "stack", "spill", "serialized")
                    if row[rule] > allowed.get(rule, 0)
                ]
            except RuntimeError as error:
                row, bad = {"ptxas": str(error)}, ["ptxas"]
            failures += bool(bad)
            print(
                f"{'BAD ' if bad else 'ok  '} sm_{arch} {name:24} {storage:32}",
                *(f"{k}={v}" for k, v in row.items()),
            )
    print(f"{len(jobs)} kernels, {failures} failed")
    return 1 if failures or not jobs else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
