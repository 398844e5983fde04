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
    read8,
    round8,
    rsqrt,
    store,
    store8,
    unpack8,
)
from nbtrain.device.packed import make_launch  # noqa: E402

__all__ = [
    "block_reduce", "block_sums", "compile_for", "cuda", "device_function", "exp2", "kernel", "launch",
    "load", "load8", "log2", "rcp", "read8", "round8", "rsqrt", "store", "store8", "unpack8",
]  # fmt: skip

cuda = numba.hip


@functools.cache
def _name_of(device: int) -> str:
    from cupy.cuda import runtime

    return runtime.getDeviceProperties(device)["gcnArchName"].decode().split(":")[0]


def architecture() -> str:
    """The current device's: gfx942 and the like. Its features (sramecc+, xnack-) are left to the driver."""
    from cupy.cuda import runtime

    return _name_of(runtime.getDevice())


def _compile_binary(compiled, signature) -> tuple[str, bytes]:
    """(entry point, code object) for the current device."""
    return entry_name(compiled), compile_for(compiled, signature, architecture())


def _compiled_for() -> str:
    from cupy.cuda import runtime

    return f"{architecture()} by ROCm {runtime.runtimeGetVersion()}"


launch = make_launch(_compile_binary, _compiled_for)
