"""The only package that imports numba or CuPy. Operators take everything they need from here."""

import contextlib

import numpy as np
from numba import float32, int32, int64, uint32

from nbtrain.device.arrays import (
    FLOATS,
    aligned,
    array_module,
    as_array,
    as_arrays,
    bfloat16,
    expect,
    is_cupy,
    same_memory,
)
from nbtrain.device.backend import SIMULATED, TARGET, backend, cuda
from nbtrain.device.cpu import njit, prange, twin
from nbtrain.device.tuning import row_shape, tuned
from nbtrain.device.vector import (
    block_max,
    block_sum,
    exp2,
    load,
    log2,
    rcp,
    read8,
    round8,
    row_access,
    rsqrt,
    store,
)

__all__ = [
    "FLOATS", "SIMULATED", "TARGET", "aligned", "array_module", "as_array", "as_arrays", "bfloat16", "block_max", "block_sum",
    "cuda", "device_function", "exp2", "expect", "float32", "int32", "int64", "is_cupy", "kernel", "launch", "load", "log2",
    "njit", "on_gpu", "prange", "rcp", "read8", "recording", "round8", "row_access", "row_shape", "rsqrt", "same_memory",
    "store", "tuned", "twin", "uint32",
]  # fmt: skip

kernel, device_function = backend.kernel, backend.device_function
_records: list | None = None


def on_gpu(x) -> bool:
    """True if operators on `x` launch kernels rather than run the CPU twin."""
    return SIMULATED or _records is not None or is_cupy(x)


def launch(compiled, grid, block, *args) -> None:
    """Launches a kernel on CuPy's current stream.

    fp16 arrays reach the kernel as int16 views and bf16 arrays as uint16 views: the one form that numba-cuda, numba-hip and
    the simulator all take. Host numbers travel as fp32, int32 or int64 (give NumPy scalars; a Python int is int64).
    """
    args = [_stored(x) for x in args]
    if _records is not None:
        _records.append((compiled, tuple(args), grid, block))
        return
    backend.launch(compiled, grid, block, args)


def _stored(x):
    dtype = getattr(x, "dtype", None)
    if dtype == np.float16:
        return x.view(np.int16)
    if dtype == bfloat16:
        return x.view(np.uint16)
    return x


@contextlib.contextmanager
def recording():
    """Collects launches instead of making them: a list of (kernel, arguments, grid, block).

    Inside, launchers take NumPy arrays for GPU arrays. For checks that compile every kernel on a machine without a GPU.
    """
    global _records
    before, _records = _records, []
    try:
        yield _records
    finally:
        _records = before
