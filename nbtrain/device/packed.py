"""Launching machine code with arguments packed once: 5 to 10 us a launch, where Numba's own launcher takes
80.

A kernel is compiled by Numba to a binary, loaded by CuPy's driver module, and launched on CuPy's current
stream: the same path on CUDA and on HIP. An array reaches the kernel as Numba's seven words (meminfo, parent,
nitems, itemsize, data, shape, stride), always as one dimension, since kernels index flat.
"""

import ctypes
import functools
import struct
import threading

import numpy as np
from numba import types

from nbtrain.device.arrays import bfloat16, signature_of
from nbtrain.device.binaries import cached_binary
from nbtrain.device.cpu import cache_folder
from nbtrain.device.place import say_once

_ELEMENTS = {
    np.dtype(np.float32): types.float32,
    np.dtype(np.float16): types.int16,
    bfloat16: types.uint16,
    np.dtype(np.int32): types.int32,
    np.dtype(np.uint32): types.uint32,
    np.dtype(np.int64): types.int64,
    np.dtype(np.uint8): types.uint8,
}
_SCALARS = {
    np.float32: (types.float32, "<f"),
    np.int32: (types.int32, "<i"),
    np.uint32: (types.uint32, "<I"),
    int: (types.int64, "<q"),
    np.int64: (types.int64, "<q"),
}
_ARRAYS = {dtype: types.Array(element, 1, "C") for dtype, element in _ELEMENTS.items()}
_lock = threading.Lock()
_MAX_DYNAMIC_SHARED_BYTES = 8  # a function attribute's number, CUDA's and HIP's


class _Prepared:
    """A loaded kernel and the memory that holds its parameters; every parameter has a slot of 8 bytes."""

    def __init__(self, function, signature, shared_bytes):
        from cupy.cuda import driver

        self.function = function  # keeps the module alive
        self.shared_bytes = shared_bytes
        if shared_bytes:  # beyond 48 KB, its static memory included, it must be asked for
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        self.fields: list[tuple[int, str | None]] = []
        slots = 0
        for entry in signature:
            if entry in _ARRAYS:
                self.fields.append((slots, None))
                slots += 7
            else:
                self.fields.append((slots * 8, _SCALARS[entry][1]))
                slots += 1
        self.values = (ctypes.c_uint64 * slots)()
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * slots)(*(base + 8 * i for i in range(slots)))
        self.sizes = [-1] * len(self.fields)

    def fill(self, args):
        values, sizes = self.values, self.sizes
        for k, (x, (at, form)) in enumerate(zip(args, self.fields, strict=True)):
            if form is None:
                if sizes[k] != x.size:
                    sizes[k] = x.size
                    values[at + 2] = values[at + 5] = x.size
                    values[at + 3] = values[at + 6] = x.itemsize
                values[at + 4] = x.data.ptr
            else:
                struct.pack_into(form, values, at, x)


@functools.cache
def _driver():
    from cupy.cuda import driver, stream

    return driver.launchKernel, stream.get_current_stream


def numba_types(signature: tuple) -> tuple:
    """Numba's types of what `signature_of` describes."""
    return tuple(_ARRAYS.get(entry) or _SCALARS[entry][0] for entry in signature)


def make_launch(compile_binary, architecture):
    """`launch(compiled, grid, block, args)` for a backend.

    `compile_binary(compiled, numba types, architecture)` returns (entry point, machine code);
    `architecture()` names the current device's.
    """
    prepared: dict = {}

    def prepare(compiled, signature):
        from cupy.cuda import function

        types, arch = numba_types(signature), architecture()

        def compile_():
            say_once(f"compiling kernels, once for this machine; they are kept in {cache_folder()}")
            return compile_binary(compiled, types, arch)

        entry, binary = cached_binary(compiled, types, arch, compile_)
        module = function.Module()
        module.load(binary)
        return _Prepared(module.get_function(entry), signature, getattr(compiled, "shared_bytes", 0))

    def launch(compiled, grid, block, args):
        from cupy.cuda import runtime

        signature = signature_of(args)
        key = compiled, signature, runtime.getDevice()
        launch_kernel, current_stream = _driver()
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        block = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
        with _lock:
            kernel = prepared.get(key)
            if kernel is None:
                kernel = prepared[key] = prepare(compiled, signature)
            kernel.fill(args)
            launch_kernel(
                kernel.function.ptr, *grid, *block, kernel.shared_bytes, current_stream().ptr,
                ctypes.addressof(kernel.pointers), 0,
            )  # fmt: skip

    return launch
