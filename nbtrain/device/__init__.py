"""The only package that imports numba or CuPy. Operators take everything they need from here."""

from numba import float32, int32, int64, uint32, uint64

from nbtrain.device.arrays import (
    FLOATS,
    aligned,
    array_module,
    as_array,
    as_arrays,
    bfloat16,
    dtype_name,
    expect,
    expect_ids,
    is_cupy,
    same_memory,
)
from nbtrain.device.backend import SIMULATED, TARGET, backend, cuda
from nbtrain.device.capability import can_fetch
from nbtrain.device.cpu import njit, prange, twin
from nbtrain.device.launching import is_recording, launch, on_gpu, recording
from nbtrain.device.philox import random_bits, random_bits8
from nbtrain.device.tuning import row_shape, tuned
from nbtrain.device.vector import (
    block_max,
    block_sum,
    block_sums,
    exp2,
    fetch_access,
    load,
    log2,
    rcp,
    round8,
    row_access,
    rsqrt,
    store,
)

__all__ = [
    # arrays
    "FLOATS", "aligned", "array_module", "as_array", "as_arrays", "bfloat16", "dtype_name", "expect",
    "expect_ids", "is_cupy", "same_memory",
    # types
    "float32", "int32", "int64", "uint32", "uint64",
    # the GPU target, and how its kernels are written and launched
    "SIMULATED", "TARGET", "cuda", "device_function", "kernel",
    "can_fetch", "is_recording", "launch", "on_gpu", "recording", "row_shape", "tuned",
    # inside kernels
    "fetch_access", "load", "round8", "row_access", "store",
    "block_max", "block_sum", "block_sums", "exp2", "log2", "random_bits", "random_bits8", "rcp", "rsqrt",
    # CPU twins
    "njit", "prange", "twin",
]  # fmt: skip

kernel, device_function = backend.kernel, backend.device_function
