"""What a kernel says to memory and to its neighbours: one name, one body a backend.

    load(a, i)                      a[i] as fp32
    store(a, i, x)                  a[i] = x, rounded once, to nearest, ties to even
    load8(dst, at, a, i, count)     dst[at : at + 8] = a[i : i + 8] as fp32
    store8(a, i, src, at, count)    a[i : i + 8] = src[at : at + 8]
    round8(dst, at, a)              dst[at : at + 8] rounded to the storage of a, still fp32
    exp2 log2 rcp rsqrt             one instruction each

    block_sum(threads, rows)        device functions: the sum, or the largest, of one fp32 value over the
    block_max(threads, rows)        `threads` threads (threadIdx.x) of a row of a (threads, rows) block,
    block_sums(threads, rows)       returned to each of them; the sums of two values, as a pair

Arrays are C-contiguous, of any rank, and indexed flat. `dst` and `src` are local arrays. `row_access` picks
the eight-wide forms: one 128-bit access (two for fp32) where every row begins at a 16-byte boundary, else
element by element, where elements from `count` on are read as 0 and not written.

`fetch_access` lets a thread start what it reads later, and go on: four names for inside a kernel,

    words = slots()                         the block's shared memory, four words for eight 16-bit numbers
    fetch8(words, k, a, i)                  starts words[k : k + 4] = a[i : i + 8]
    await_fetches()                         waits for those of this thread; nobody else may read its words
    read8(dst, at, words, k, a, i, count)   dst[at : at + 8] = those as fp32

or, where memory cannot copy by itself, the same names without the copy: `read8` reads a[i : i + 8] then.
"""

import functools

from numba import float32

from nbtrain.device.backend import backend, cuda

load, store = backend.load, backend.store
round8 = backend.round8
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


@functools.cache
def fetch_access(ahead: bool, aligned: bool, words: int):
    """(slots, fetch8, await_fetches, read8). ahead: `words` of shared memory are there, rows are `aligned`
    and 16-bit, and the device copies by itself (`nbtrain.device.can_fetch`). words 0: as many as
    the kernel's shared_bytes hold."""
    if ahead:
        unpack8 = backend.unpack8

        @backend.device_function
        def read_fetched(dst, at, words, k, a, i, count):
            unpack8(dst, at, words, k, a)

        return backend.shared_words(words), backend.fetch8, backend.await_fetches, read_fetched
    load8, _ = row_access(aligned)

    @backend.device_function
    def no_slots():
        return 0

    @backend.device_function
    def fetch_later(words, k, a, i):
        pass

    @backend.device_function
    def await_nothing():
        pass

    @backend.device_function
    def read_now(dst, at, words, k, a, i, count):
        load8(dst, at, a, i, count)

    return no_slots, fetch_later, await_nothing, read_now


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
