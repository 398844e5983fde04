"""Launching kernels, or recording what would be launched."""

import contextlib

import numpy as np

from nbtrain.device.arrays import bfloat16, is_cupy, signature_of
from nbtrain.device.backend import SIMULATED, backend
from nbtrain.device.outline import Outline

_records: list | None = None
_recorded_capability: tuple[int, int] | None = None


def on_gpu(x) -> bool:
    """True if operators on `x` launch kernels rather than run the CPU twin."""
    return SIMULATED or _records is not None or is_cupy(x)


def is_recording() -> bool:
    return _records is not None


def launch(compiled, grid, block, *args) -> None:
    """Launches a kernel on CuPy's current stream.

    Arrays must be C-contiguous and reach the kernel as one dimension; fp16 as int16 and bf16 as uint16 bits,
    the one form that numba-cuda, numba-hip and the simulator all take. Host numbers: NumPy scalars for fp32
    and int32; a Python int is int64. Where the first argument is an outline, its card may note the launch.
    """
    if isinstance(args[0], Outline):
        if args[0].card.launches is not None:
            args[0].card.launches[compiled, signature_of(args)] = None
        return
    if _records is not None:
        _records.append((compiled, tuple(map(_stored, args)), grid, block))
    elif SIMULATED:
        backend.launch(compiled, grid, block, [_stored(x) for x in args])
    else:
        backend.launch(compiled, grid, block, args)


def _stored(x):
    if not isinstance(x, np.ndarray):
        return x
    x = x.reshape(-1)
    if x.dtype == np.float16:
        return x.view(np.int16)
    return x.view(np.uint16) if x.dtype == bfloat16 else x


def recorded_capability() -> tuple[int, int] | None:
    """The compute capability that launches are being recorded for."""
    return _recorded_capability


@contextlib.contextmanager
def recording(capability: tuple[int, int] | None = None):
    """Collects launches instead of making them: a list of (kernel, arguments, grid, block).

    Inside, launchers take NumPy arrays for those of an NVIDIA GPU of this compute capability, or, for None,
    of a GPU without one, and matrix products are skipped. For checks that compile every kernel without a GPU.
    """
    global _records, _recorded_capability
    before = _records, _recorded_capability
    _records, _recorded_capability = [], capability
    try:
        yield _records
    finally:
        _records, _recorded_capability = before
