"""The same vocabulary in plain Python, for numba-cuda's simulator (NUMBA_ENABLE_CUDASIM=1): kernels run on
NumPy arrays, slowly, on a machine without a GPU. See `nbtrain.device.vector` for what each name means."""

import threading

import numpy as np
from numba import cuda, uint32

from nbtrain.device.arrays import bfloat16

F = np.float32
device_function = cuda.jit(device=True)


def kernel(*, launch_bounds=None, fastmath: bool = True, shared_bytes: int = 0):
    def decorate(function):
        compiled = cuda.jit(function)
        compiled.shared_bytes = shared_bytes
        return compiled

    return decorate


def launch(compiled, grid, block, args) -> None:
    # The simulator copies every array back after a launch, so a read-only one must be a copy.
    writable = (x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x for x in args)
    compiled[grid, block, 0, compiled.shared_bytes](*writable)


def _flat(array):
    return getattr(array, "_ary", array).reshape(-1)  # a simulated device array wraps a NumPy array


_STORED = {
    np.dtype(np.float32): np.dtype(F),
    np.dtype(np.int16): np.dtype(np.float16),
    np.dtype(np.uint16): bfloat16,
}


def _values(stored):
    return stored.view(_STORED[stored.dtype]).astype(F)


def _rounded(values, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(values, F).astype(_STORED[dtype]).view(dtype)


def load(src, i):
    return _values(_flat(src)[i : i + 1])[0]


def store(dst, i, value):
    target = _flat(dst)
    target[i : i + 1] = _rounded([value], target.dtype)


def load8(dst, at, src, i, count):
    _flat(dst)[at : at + 8] = _values(_flat(src)[i : i + 8])


def store8(dst, i, src, at, count):
    target = _flat(dst)
    target[i : i + 8] = _rounded(_flat(src)[at : at + 8], target.dtype)


def round8(dst, at, like):
    values = _flat(dst)
    values[at : at + 8] = _values(_rounded(values[at : at + 8], _flat(like).dtype))


def shared_words(n: int):
    @device_function
    def slots():  # a kernel may have one: the simulator tells shared arrays apart by their source line
        return cuda.shared.array(n, uint32)

    return slots


_under_way = threading.local()


def fetch8(words, k, src, i):
    """The copy is made when it is awaited, as late as may be; until then the words are nan in any storage."""
    _flat(words)[k : k + 4] = 0xFFFFFFFF
    vars(_under_way).setdefault("copies", []).append((_flat(words)[k : k + 4], _flat(src)[i : i + 8]))


def await_fetches():
    for words, source in vars(_under_way).pop("copies", ()):
        words[:] = np.ascontiguousarray(source).view(np.uint32)


def unpack8(dst, at, words, k, like):
    stored = np.ascontiguousarray(_flat(words)[k : k + 4]).view(_flat(like).dtype)
    _flat(dst)[at : at + 8] = _values(stored)


def exp2(x):
    with np.errstate(over="ignore"):  # inf, as on a GPU
        return np.exp2(F(x))


def log2(x):
    return np.log2(F(x))


def rcp(x):
    return F(1) / F(x)


def rsqrt(x):
    return F(1) / np.sqrt(F(x))


def block_reduce(combine, threads: int, rows: int):
    return None  # no shuffles here: the portable form is the one to test


def block_sums(threads: int, rows: int):
    return None
