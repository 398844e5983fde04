"""AMD GPUs through numba-hip: the names of `nbtrain.device.nvidia`. Compiled for AMD in every CI run, untested on hardware.

numba-hip compiles each kernel to a code object; CuPy loads and launches it. numba-hip's own driver is not used: passing it
CuPy's streams is reported broken.
"""

import numba.hip

numba.hip.pose_as_cuda()  # first: what says `from numba import cuda` from here on gets numba-hip; it cannot be undone

from nbtrain.device.hip.compiler import compile_for, device_function, kernel  # noqa: E402
from nbtrain.device.hip.launcher import launch  # noqa: E402
from nbtrain.device.hip.vector import (  # noqa: E402
    block_reduce,
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
)

__all__ = [
    "block_reduce", "compile_for", "cuda", "device_function", "exp2", "kernel", "launch", "load", "load8", "log2", "rcp",
    "read8", "round8", "rsqrt", "store", "store8",
]  # fmt: skip

cuda = numba.hip
