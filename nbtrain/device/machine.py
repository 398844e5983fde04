"""The machine: what of it decides a result's bits, beside the libraries' versions and the plan of the
products; and how many cores it has."""

import os

import llvmlite.binding
from numba import config

from nbtrain.device.cpu import blas_architectures


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str) -> dict[str, str]:
    """What "cpu", "cuda:0" or "hip:0" is, as names and texts: results of two equal machines have the same
    bits.

    The number of CPU threads is not among them, nor which one of several GPUs it is: no result depends on
    that.
    """
    if device == "cpu":
        name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
        features = config.CPU_FEATURES
        if features is None:
            features = llvmlite.binding.get_host_cpu_features().flatten()
        here = sorted(feature[1:] for feature in features.split(",") if feature.startswith("+"))
        return {"device": "cpu", "cpu": name, "blas": blas_architectures(), "instructions": " ".join(here)}
    import cupy

    kind, _, index = device.partition(":")
    properties = cupy.cuda.runtime.getDeviceProperties(int(index))
    about = {
        "device": kind,
        "gpu": properties["name"].decode(),
        "multiprocessors": str(properties["multiProcessorCount"]),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
    }
    if kind == "hip":
        return about | {"architecture": properties["gcnArchName"].decode()}
    return about | {"compute_capability": f"{properties['major']}.{properties['minor']}"}
