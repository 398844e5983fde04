"""Sums over rows in one fixed order, no atomics: each block adds up its rows, one kernel adds the blocks.

A kernel that sums the columns of (N, C) runs on the block and grid of `column_block` and `column_grid`:
thread x of block x owns eight columns, from (blockIdx.x * X + x) * 8 on; rows are dealt to threadIdx.y and
blockIdx.y. It keeps its sums in a local array of 8 and ends with `block_rows_sum(X, Y)(sums, partial, C)`.
`sum_blocks` makes the result of `partial`, flat fp32 of blocks * C. `sum_rows` is both, for an array alone.
"""

import functools

import numpy as np
from numba import float32

from nbtrain.device.arrays import aligned, array_module
from nbtrain.device.backend import backend, cuda
from nbtrain.device.launching import launch
from nbtrain.device.tuning import tuned
from nbtrain.device.vector import row_access, store

ZERO = np.float32(0)
READS = 16  # of sum_blocks, under way at a time, a thread


def column_block(name: str, most: int = 32) -> tuple[int, int]:
    """(X, Y): threads over columns, eight each, at most so many, and threads over rows."""
    threads, _ = tuned(name)
    X = min(most, threads // 2)
    return X, threads // X


def column_grid(name: str, N: int, C: int) -> tuple[int, int]:
    """(blocks over columns, blocks over rows): set by the shape alone, and with it the order of the sums."""
    X, Y = column_block(name)
    columns = -(-C // (8 * X))
    return columns, min(max(1, tuned(name)[1] // columns), -(-N // Y))


@functools.cache
def block_rows_sum(X: int, Y: int):
    """A device function: partial[blockIdx.y, c] = sum over threadIdx.y of `sums`."""
    WIDTH = 8 * X

    @backend.device_function
    def write_sum(sums, partial, C):
        buf = cuda.shared.array((Y, WIDTH), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        for j in range(8):
            buf[y, j * X + x] = sums[j]  # lanes side by side: no bank conflicts
        cuda.syncthreads()
        k = y * X + x
        while k < WIDTH:
            c = (cuda.blockIdx.x * X + k % X) * 8 + k // X
            if c < C:
                s = ZERO
                for row in range(Y):
                    s += buf[row, k]
                partial[cuda.blockIdx.y * C + c] = s
            k += X * Y

    return write_sum


@functools.cache
def _sum_blocks_kernel():
    """A block takes eight columns, one a thread, a sector of memory; its rows of threads share the blocks. So
    little is read that what counts is how many reads follow one another."""
    X, Y = column_block("sum_blocks", most=8)

    @backend.kernel(launch_bounds=X * Y)
    def sum_blocks(partial, blocks, C, out, second, third):
        buf = cuda.shared.array((Y, X), float32)
        a = cuda.local.array(READS, float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        c = cuda.blockIdx.x * X + x
        s = ZERO
        if c < C:
            first = cuda.blockIdx.y * blocks * C + c
            b = y
            while b < blocks:
                for u in range(READS):
                    a[u] = partial[first + min(b + u * Y, blocks - 1) * C]
                for u in range(READS):
                    if b + u * Y < blocks:
                        s += a[u]
                b += READS * Y
        buf[y, x] = s
        cuda.syncthreads()
        if y == 0 and c < C:
            for k in range(1, Y):
                s += buf[k, x]
            if cuda.blockIdx.y == 0:
                store(out, c, s)
            elif cuda.blockIdx.y == 1:
                store(second, c, s)
            else:
                store(third, c, s)

    return sum_blocks, X, Y


def sum_blocks(partial, blocks: int, *outs) -> None:
    """The first of one to three `outs` (C,) = the sum of the first `blocks` rows of `partial` (flat fp32,
    rows of C), the second that of the next, and so on."""
    sum_, X, Y = _sum_blocks_kernel()
    C, grid = outs[0].size, (-(-outs[0].size // X), len(outs))
    # An absent one is an array that is not written: the simulator copies every argument back.
    launch(sum_, grid, (X, Y), partial, blocks, C, *outs, *[partial] * (3 - len(outs)))


@functools.cache
def _sum_rows_kernel(aligned: bool):
    """partial[b] = the sum of the rows that block row b takes, four at a time."""
    X, Y = column_block("sum_rows")
    ROWS = 4
    W = 8 * ROWS
    load8, _ = row_access(aligned)
    write_sum = block_rows_sum(X, Y)

    @backend.kernel(launch_bounds=X * Y)
    def sum_rows(x, partial, N, C):
        sums = cuda.local.array(8, float32)
        d = cuda.local.array(W, float32)
        for j in range(8):
            sums[j] = ZERO
        c = (cuda.blockIdx.x * X + cuda.threadIdx.x) * 8
        step = cuda.gridDim.y * Y
        if c < C:
            n = cuda.blockIdx.y * Y + cuda.threadIdx.y
            while n < N:
                for k in range(ROWS):  # all loads before the first sum: their latencies overlap
                    if n + k * step < N:
                        load8(d, k * 8, x, (n + k * step) * C + c, C - c)
                    else:
                        for j in range(8):
                            d[k * 8 + j] = ZERO
                for k in range(ROWS):
                    for j in range(8):
                        sums[j] += d[k * 8 + j]
                n += ROWS * step
        write_sum(sums, partial, C)

    return sum_rows, X, Y


def sum_rows(x, out) -> None:
    """out (C,) = the sum over rows of x (N, C), in fp32, rounded once."""
    N, C = x.shape
    sum_, X, Y = _sum_rows_kernel(aligned(C, x))
    columns, blocks = column_grid("sum_rows", N, C)
    partial = array_module(x).empty(blocks * C, np.float32)
    launch(sum_, (columns, blocks), (X, Y), x, partial, N, C)
    sum_blocks(partial, blocks, out)
