"""The L2 norm of all gradients together.

    norm = sqrt(sum_i g_i ** 2)

g: (n,), any number of flat arrays, fp32, fp16 or bf16. norm: (1,) fp32.

Squares and sums are fp32, in one fixed order of short sums: of eight, of a thread, of a block, of the blocks.
fp16's largest square, 4.3e9, is far below fp32's limit; a norm above 1.8e19 is infinite. An infinity or a NaN
in g gives an infinite norm or NaN: no kernel here is compiled under the assumption that there are none.
"""

import functools
import math

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    block_sum,
    cuda,
    expect,
    float32,
    kernel,
    launch,
    on_gpu,
    prange,
    row_access,
    tuned,
    twin,
)
from nbtrain.device.cpu import span, task_count
from nbtrain.errors import InvalidValue

ZERO = np.float32(0)
LOADS = 4  # 128-bit loads that each thread has in flight
RUN = 4096  # elements that the CPU twin sums in fp32, before it adds in fp64

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _squares_kernel(aligned: bool):
    """A persistent grid: block b takes pieces b, b + grid, … of LOADS * 8 elements a thread, in a row."""
    T, _ = tuned("global_norm")
    W = 8 * LOADS
    load8, _ = row_access(aligned)
    total = block_sum(T)

    @kernel(launch_bounds=T, fastmath=False)
    def global_norm_squares(g, n, last, partial, first):
        a = cuda.local.array(W, float32)
        sums = cuda.local.array(LOADS, float32)
        for k in range(LOADS):
            sums[k] = ZERO
        i = (cuda.blockIdx.x * T * LOADS + cuda.threadIdx.x) * 8
        while i < n:
            for k in range(LOADS):
                # Beyond the end the last eight are read again, and left out below: a branch around each load
                # would keep the loads from being in flight together.
                at = min(i + k * T * 8, last)
                load8(a, k * 8, g, at, n - at)
            for k in range(LOADS):
                for j in range(8):
                    a[k * 8 + j] *= a[k * 8 + j]
                for j in range(4):
                    a[k * 8 + j] += a[k * 8 + 4 + j]
                s = (a[k * 8] + a[k * 8 + 1]) + (a[k * 8 + 2] + a[k * 8 + 3])
                sums[k] += s if i + k * T * 8 < n else ZERO
            i += cuda.gridDim.x * T * W
        s = ZERO
        for k in range(LOADS):
            s += sums[k]
        s = total(s)
        if cuda.threadIdx.x == 0:
            partial[first + cuda.blockIdx.x] = s

    return global_norm_squares, T


@functools.cache
def _root_kernel():
    """One block adds the partial sums."""
    T, _ = tuned("global_norm")
    total = block_sum(T)

    @kernel(launch_bounds=T, fastmath=False)
    def global_norm_root(partial, blocks, norm):
        s = ZERO
        b = cuda.threadIdx.x
        while b < blocks:
            s += partial[b]
            b += T
        s = total(s)
        if cuda.threadIdx.x == 0:
            norm[0] = math.sqrt(s)

    return global_norm_root, T


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="")
def _squares_cpu(g, partial):
    tasks = partial.size
    for t in prange(tasks):
        first, last = span(t, tasks, g.size, RUN)
        total = np.float64(0)
        for start in range(first, last, RUN):
            x = g[start : min(last, start + RUN)]
            s = ZERO
            for i in range(x.size):
                s += x[i] * x[i]
            total += s
        partial[t] = total


# ----------------------------------------------------------------------------
# Launchers


def global_norm(*gs, out=None):
    """Returns the L2 norm (1,) fp32 of all elements of all `gs`, flat arrays (n,) of any float dtypes."""
    gs = as_arrays(*gs)
    sizes = [expect("global_norm", "g (n,)", g, hint="Flatten it with .reshape(-1).")[0] for g in gs]
    if not sum(sizes):
        raise InvalidValue(
            f"global_norm expects at least one element; got {len(gs)} arrays of sizes {sizes}. "
            "Pass the gradients."
        )
    xp = array_module(gs[0])
    norm = xp.empty(1, np.float32) if out is None else out
    for g in gs:
        expect("global_norm", "g (n,), out (1,) fp32", g, norm)
    if on_gpu(gs[0]):
        calls, blocks = [], 0
        for g, n in zip(gs, sizes, strict=True):
            squares, T = _squares_kernel(aligned(n, g))
            grid = min(tuned("global_norm")[1], -(-n // (T * LOADS * 8)))
            calls.append((squares, grid, blocks, g, n))
            blocks += grid
        partial = xp.empty(blocks, np.float32)
        for squares, grid, first, g, n in calls:
            if n:
                launch(squares, grid, T, g, n, (n - 1) // 8 * 8, partial, first)
        root, T = _root_kernel()
        launch(root, 1, T, partial, blocks, norm)
    else:
        total = 0.0
        for g in gs:
            partial = np.empty(task_count(g.size, 16 * RUN))
            _squares_cpu(g, partial)
            total += partial.sum()
        norm[0] = np.sqrt(total)
    return norm
