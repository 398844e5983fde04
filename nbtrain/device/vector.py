"""What a kernel says to memory and to its neighbours: one name, one body a backend.

    load(a, i)                      a[i] as fp32
    store(a, i, x)                  a[i] = x, rounded once, to nearest, ties to even
    load8(dst, at, a, i, count)     dst[at : at + 8] = a[i : i + 8] as fp32
    store8(a, i, src, at, count)    a[i : i + 8] = src[at : at + 8]
    round8(dst, at, a)              dst[at : at + 8] rounded to the storage of a, still fp32
    read8(words, k, a, i)           words[k : k + 4] = a[i : i + 8], 16-bit storage, as uint32, to be kept
    unpack8(dst, at, words, k, a)   dst[at : at + 8] = those, in the storage of a, as fp32
    exp2 log2 rcp rsqrt             one instruction each

    block_sum(threads, rows)        device functions: the sum, or the largest, of one fp32 value over the
    block_max(threads, rows)        `threads` threads (threadIdx.x) of a row of a (threads, rows) block,
    block_sums(threads, rows)       returned to each of them; the sums of two values, as a pair

Arrays are C-contiguous, of any rank, and indexed flat. `dst` and `src` are local arrays. `row_access` picks
the eight-wide forms: one 128-bit access (two for fp32) where every row begins at a 16-byte boundary, else
element by element, where elements from `count` on are read as 0 and not written.
"""

import functools

from numba import float32

from nbtrain.device.backend import backend, cuda

load, store = backend.load, backend.store
round8, read8, unpack8 = backend.round8, backend.read8, backend.unpack8
exp2, log2, rcp, rsqrt = backend.exp2, backend.log2, backend.rcp, backend.rsqrt


@backend.device_function
def _load8_ragged(dst, at, src, i, count):
    for j in range(8):
        dst[at + j] = float32(0.0)
        if j < count:
            dst[at + j] = load(src, i + j)


@backend.device_function
def _store8_ragged(dst, i, src, at, count):
    for j in range(8):
        if j < count:
            store(dst, i + j, src[at + j])


def row_access(aligned: bool):
    """(load8, store8) for rows that are `aligned` (see `nbtrain.device.aligned`) or not."""
    return (backend.load8, backend.store8) if aligned else (_load8_ragged, _store8_ragged)


def _sum(a, b):
    return a + b


def _max(a, b):
    return max(a, b)


@functools.cache
def block_sum(threads: int, rows: int = 1):
    return backend.block_reduce(_sum, threads, rows) or _shared_reduce(_sum, threads, rows)


@functools.cache
def block_max(threads: int, rows: int = 1):
    return backend.block_reduce(_max, threads, rows) or _shared_reduce(_max, threads, rows)


@functools.cache
def block_sums(threads: int, rows: int = 1):
    return backend.block_sums(threads, rows) or _one_by_one(block_sum(threads, rows))


def _one_by_one(reduce):
    @backend.device_function
    def both(a, b):
        return reduce(a), reduce(b)

    return both


def _shared_reduce(combine, threads: int, rows: int):
    """A tree over shared memory with a barrier at every stage: right for warps of 32, wavefronts of 64 and
    any `threads`."""
    combine = backend.device_function(combine)
    first = 1
    while first * 2 < threads:
        first *= 2

    @backend.device_function
    def reduce(value):
        buf = cuda.shared.array((rows, threads), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        cuda.syncthreads()  # buf may still be read from the call before
        buf[y, x] = value
        cuda.syncthreads()
        half = first
        while half > 0:
            if x < half and x + half < threads:
                buf[y, x] = combine(buf[y, x], buf[y, x + half])
            cuda.syncthreads()
            half >>= 1
        return buf[y, 0]

    return reduce
