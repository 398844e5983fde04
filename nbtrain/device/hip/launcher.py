"""Launches code objects through CuPy, on CuPy's current stream, so that its work and ours is ordered."""

import functools

import numpy as np
from numba import types, typeof
from numba.np.numpy_support import from_dtype

from nbtrain.device.hip.cache import code_object
from nbtrain.device.hip.compiler import Kernel, entry_name


def launch(kernel: Kernel, grid, block, args) -> None:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    signature = tuple(map(_type_of, args))
    function = kernel.loaded.get((signature, device))
    if function is None:
        image = code_object(kernel, signature, architecture(device), cupy.cuda.runtime.runtimeGetVersion())
        function = kernel.loaded[signature, device] = _load(image, entry_name(kernel))
    block = _triple(block)
    assert block[0] * block[1] * block[2] <= kernel.max_threads, (
        kernel,
        block,
    )  # it was compiled for no more
    function(_triple(grid), block, tuple(word for x in args for word in flat_argument(x)))


@functools.cache
def architecture(device: int) -> str:
    """gfx942 and the like; its features (sramecc+, xnack-) are left to the driver."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(device)["gcnArchName"]
    return (name.decode() if isinstance(name, bytes) else name).split(":")[0].rstrip("\0")


def _load(image: bytes, name: str):
    from cupy.cuda.function import Module

    module = Module()
    module.load(image)
    return module.get_function(name)  # which keeps the module


def _triple(n) -> tuple[int, int, int]:
    n = n if isinstance(n, tuple) else (n,)
    return tuple(map(int, (*n, *(1,) * (3 - len(n)))))


def _type_of(x):
    """The numba type of an argument. CuPy's arrays are C-contiguous here: launchers have checked it."""
    if hasattr(x, "__cuda_array_interface__"):
        return types.Array(from_dtype(x.dtype), x.ndim, "C")
    return typeof(x)


def flat_argument(x) -> list:
    """The words that stand for an argument in numba's calling convention.

    An array is: meminfo, parent, element count, element size, address, each extent, each stride in bytes. A Python int is
    an int64.
    """
    if hasattr(x, "__cuda_array_interface__"):
        return [np.intp(w) for w in (0, 0, x.size, x.itemsize, x.data.ptr, *x.shape, *x.strides)]
    return [np.int64(x) if type(x) is int else x]
