"""Dropout (Srivastava et al., 2014).

    y[n, c] = keep[n, c] * x[n, c] / (1 - p)          dx[n, c] = keep[n, c] * dy[n, c] / (1 - p)

x, y, dy, dx: (N, C), one of fp32, fp16, bf16. keep is 1 with probability 1 - p, drawn for element
first + n * C + c of a site (see `nbtrain.device.dropout`): rows that are split over calls, micro-batches or
ranks see the same mask, and so does the backward, which draws it again.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
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
    uint32,
)
from nbtrain.device.cpu import span, task_count
from nbtrain.device.dropout import BITS_ROOM, bits8_of, draw_bits, drop_mode, dropout_of

ZERO = np.float32(0)

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _dropout_kernel(aligned: bool, drop: int):
    """Eight elements a thread; rows do not matter."""
    T, _ = tuned("dropout")
    load8, store8 = row_access(aligned)
    bits8 = bits8_of(drop)

    @kernel(launch_bounds=T, fastmath=False)  # fastmath could drop a nan
    def dropout(x, rng, site, first, threshold, keep_scale, n, y):
        a = cuda.local.array(8, float32)
        bits = cuda.local.array(8, uint32)
        i = (cuda.blockIdx.x * T + cuda.threadIdx.x) * 8
        if i < n:
            load8(a, 0, x, i, n - i)
            bits8(bits, 0, rng, site, first + i)
            for j in range(8):
                a[j] = a[j] * keep_scale if bits[j] >= threshold else ZERO
            store8(y, i, a, 0, n - i)

    return dropout, T


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="y")
def _dropout_cpu(x, y, rng, site, first, threshold, keep_scale, bits):
    N, C = x.shape
    tasks = bits.shape[0]
    for t in prange(tasks):
        top, bottom = span(t, tasks, N)
        for n in range(top, bottom):
            keep = draw_bits(bits[t], rng, site, first + n * C, C)
            a, b = x[n], y[n]
            for c in range(C):
                b[c] = a[c] * keep_scale if keep[c] >= threshold else ZERO


# ----------------------------------------------------------------------------
# Launchers


def dropout_forward(x, p: float, rng, *, site: int, first: int = 0, out=None):
    """Returns `y`, x with a share p of its elements dropped.

    `first` is the number of element (0, 0) within the whole batch, `site` the place in the model. `out` gives
    the array to write; it may be x, and then p = 0 does nothing.
    """
    return _apply("dropout", x, p, rng, site, first, out)


def dropout_backward(dy, p: float, rng, *, site: int, first: int = 0, out=None):
    """Returns `dx`; p, rng, site and first are the forward's. `out` gives the array to write, maybe dy."""
    return _apply("dropout_backward", dy, p, rng, site, first, out)


def _apply(op, x, p, rng, site, first, out):
    x, rng = as_arrays(x, rng)
    y = array_module(x).empty_like(x) if out is None else out
    spec = "x (N, C), rng (3,) uint32, out (N, C)"
    N, C = expect(op, spec, x, rng, y, hint="Flatten (B, T, C) with x.reshape(-1, C).")
    drop = dropout_of(op, p, rng, site, first)
    if p == 0:
        if y is not x:
            y[...] = x
    elif on_gpu(x):
        dropout, T = _dropout_kernel(aligned(x.size, x, y), drop_mode(drop, 8))
        launch(dropout, -(-x.size // (8 * T)), T, x, *drop, x.size, y)
    else:
        bits = np.empty((task_count(N, 64), C + BITS_ROOM), np.uint32)
        _dropout_cpu(x, y, *drop, bits)
    return y
