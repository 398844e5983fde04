"""NVIDIA GPUs through numba-cuda. What only this vendor can run lives in this package."""

import functools

from numba import cuda, types

from nbtrain.device.nvidia.vector import (
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

device_function = cuda.jit(device=True, fastmath=True)


def kernel(*, launch_bounds=None, fastmath: bool = True):
    """Decorates a kernel. `launch_bounds` is threads a block, or (threads, blocks on a multiprocessor)."""
    return cuda.jit(launch_bounds=launch_bounds, fastmath=fastmath)


@functools.lru_cache(maxsize=64)
def _stream(handle: int):
    return cuda.external_stream(handle)


def launch(compiled, grid, block, args) -> None:
    """Launches on CuPy's current stream, so that CuPy's work and ours is ordered."""
    import cupy

    compiled[grid, block, _stream(cupy.cuda.get_current_stream().ptr)](*args)


def compile_for(compiled, signature, cc: tuple[int, int]) -> str:
    """PTX of a kernel for compute capability `cc`; needs neither a GPU nor a driver.

    A device function asks the current device for its capability while the kernel is typed; here `cc` answers. Overloads
    are kept, so use one process for each capability.
    """
    import numba.cuda.dispatcher

    class Device:
        compute_capability = cc

    numba.cuda.dispatcher.get_current_device = lambda: Device
    options = compiled.targetoptions
    text, _ = cuda.compile(
        compiled.py_func,
        types.void(*signature),
        cc=cc,
        device=False,
        abi="numba",
        output="ptx",
        fastmath=options.get("fastmath", False),
        launch_bounds=options.get("launch_bounds"),
    )
    return text
