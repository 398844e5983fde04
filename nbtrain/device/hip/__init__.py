"""AMD GPUs through numba-hip: the names of `nbtrain.device.nvidia`. It compiles; untested on hardware.

numba-hip compiles each kernel to a code object; CuPy loads and launches it. numba-hip's own driver is not
used: passing it CuPy's streams is reported broken.
"""

import functools

import numba.hip

numba.hip.pose_as_cuda()  # first, and for good: from here on `from numba import cuda` is numba-hip

from nbtrain.device.hip.compiler import compile_for, device_function, entry_name, kernel  # noqa: E402
from nbtrain.device.hip.vector import (  # noqa: E402
    block_reduce,
    block_sums,
    exp2,
    load,
    load8,
    log2,
    rcp,
    round8,
    rsqrt,
    store,
    store8,
)
from nbtrain.device.packed import make_launch  # noqa: E402

__all__ = [
    "architecture", "block_reduce", "block_sums", "compile_binary", "compile_for", "cuda", "device_function",
    "exp2", "kernel", "launch", "load", "load8", "log2", "rcp", "round8", "rsqrt", "store", "store8",
]  # fmt: skip

cuda = numba.hip


@functools.cache
def _name_of(device: int) -> str:
    from cupy.cuda import runtime

    return runtime.getDeviceProperties(device)["gcnArchName"].decode().split(":")[0]


def architecture() -> str:
    """The current device's and who compiles for it: gfx942 by ROCm 70051831. The device's features (sramecc+,
    xnack-) are left to the driver."""
    from cupy.cuda import runtime

    return f"{_name_of(runtime.getDevice())} by ROCm {runtime.runtimeGetVersion()}"


def compile_binary(compiled, signature, architecture: str) -> tuple[str, bytes]:
    """(entry point, code object) for an architecture."""
    return entry_name(compiled), compile_for(compiled, signature, architecture.partition(" ")[0])


launch = make_launch(compile_binary, architecture)
