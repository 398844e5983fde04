"""GELU in its tanh form (Hendrycks and Gimpel, 2016), with the bias before it and dropout behind it.

    y  = u * s                                u = x + bias
    s  = (1 + tanh(z / 2)) / 2 = 1 / (1 + exp(-z))          z = 2 sqrt(2/pi) (u + 0.044715 u**3)
    dx = dy * (s + u * s * (1 - s) * dz/du)          dbias = sum_n dx

N = rows (batch * time), C = channels. x, y, dy, dx: (N, C), bias, dbias: (C,), one of fp32, fp16, bf16.
One exponential gives y and its slope, finite for every finite u. Arithmetic and sums are fp32; dbias sums dx
before it is rounded. Dropout (see `nbtrain.device.dropout`) acts on y, with element first + n * C + c.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    cuda,
    exp2,
    expect,
    float32,
    kernel,
    launch,
    njit,
    on_gpu,
    prange,
    rcp,
    row_access,
    row_shape,
    twin,
    uint32,
)
from nbtrain.device.cpu import FASTMATH, exp, scratch, span, task_count
from nbtrain.device.dropout import (
    BITS_ROOM,
    DROP_ANYWHERE,
    KEEP_ALL,
    bits8_of,
    draw_bits,
    drop_mode,
    dropout_of,
)
from nbtrain.device.reduce import block_rows_sum, column_block, column_grid, sum_blocks

ZERO, ONE = np.float32(0), np.float32(1)
_K = 2 * (2 / np.pi) ** 0.5
K1, K3 = np.float32(-_K), np.float32(-_K * 0.044715)  # exponent of e: u * (K1 + K3 * u**2)
L1, L3 = np.float32(-_K / np.log(2)), np.float32(-_K * 0.044715 / np.log(2))  # exponent of 2
D1, D3 = np.float32(_K), np.float32(_K * 3 * 0.044715)
BIG = np.float32(1e18)  # where u**2 stops, so that 0 * u**2 is never nan; s is 0 or 1 long before
LIMIT = np.float32(10)
FLATTEN = "Flatten (B, T, C) with x.reshape(-1, C)."

# ----------------------------------------------------------------------------
# GPU kernels. Without fastmath, so that the backward recomputes y with the roundings of the forward.


@functools.cache
def _forward_kernel(C: int, aligned: bool, with_bias: bool, drop: int):
    """Eight columns of ROWS rows a thread; blockIdx.y counts the chunks of a long row."""
    T, R = row_shape("gelu_forward", C, vectors=1)
    ROWS = 1 if drop == DROP_ANYWHERE else 2  # two rows of sixteen words each would leave the registers
    W = 8 * ROWS
    load8, store8 = row_access(aligned)
    bits8 = bits8_of(drop)

    @kernel(launch_bounds=T * R, fastmath=False)
    def gelu_forward(x, bias, rng, site, first, threshold, keep_scale, N, y):
        a = cuda.local.array(W, float32)
        b = cuda.local.array(8, float32)
        bits = cuda.local.array(8, uint32)
        c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
        n0 = (cuda.blockIdx.x * R + cuda.threadIdx.y) * ROWS
        if c < C:
            for j in range(8):
                b[j] = ZERO
            if with_bias:
                load8(b, 0, bias, c, C - c)
            for k in range(ROWS):
                if n0 + k < N:
                    load8(a, k * 8, x, (n0 + k) * C + c, C - c)
            for k in range(ROWS):
                i = (n0 + k) * C + c
                if n0 + k < N:
                    if drop != KEEP_ALL:
                        bits8(bits, 0, rng, site, first + i)
                    for j in range(8):
                        u = a[k * 8 + j] + b[j]
                        u2 = min(u * u, BIG)
                        s = rcp(ONE + exp2(u * (L1 + L3 * u2)))
                        r = u * s
                        if drop != KEEP_ALL:
                            r = r * keep_scale if bits[j] >= threshold else ZERO
                        a[k * 8 + j] = r
                    store8(y, i, a, k * 8, C - c)

    return gelu_forward, T, R, ROWS


@functools.cache
def _backward_kernel(aligned: bool, with_bias: bool, with_y: bool, drop: int):
    """A persistent grid over rows, so that the sums of dbias have one fixed order."""
    X, Y = column_block("gelu_backward")
    load8, store8 = row_access(aligned)
    bits8 = bits8_of(drop)
    write_sum = block_rows_sum(X, Y)

    @kernel(launch_bounds=(X * Y, 3), fastmath=False)
    def gelu_backward(dy, x, bias, rng, site, first, threshold, keep_scale, N, C, partial, y, dx):
        sums = cuda.local.array(8, float32)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        d = cuda.local.array(8, float32)
        bits = cuda.local.array(8, uint32)
        for j in range(8):
            sums[j] = ZERO
            b[j] = ZERO
        c = (cuda.blockIdx.x * X + cuda.threadIdx.x) * 8
        if c < C:
            if with_bias:
                load8(b, 0, bias, c, C - c)
            n = cuda.blockIdx.y * Y + cuda.threadIdx.y
            while n < N:
                i = n * C + c
                load8(a, 0, x, i, C - c)
                load8(d, 0, dy, i, C - c)
                if drop != KEEP_ALL:
                    bits8(bits, 0, rng, site, first + i)
                for j in range(8):
                    u = a[j] + b[j]
                    u2 = min(u * u, BIG)
                    s = rcp(ONE + exp2(u * (L1 + L3 * u2)))
                    r = u * s
                    g = s + r * (ONE - s) * (D1 + D3 * u2)
                    if drop != KEEP_ALL:
                        keep = keep_scale if bits[j] >= threshold else ZERO
                        g *= keep
                        r = r * keep_scale if bits[j] >= threshold else ZERO
                    d[j] *= g
                    sums[j] += d[j]
                    a[j] = r
                store8(dx, i, d, 0, C - c)
                if with_y:
                    store8(y, i, a, 0, C - c)
                n += cuda.gridDim.y * Y
        if with_bias:
            write_sum(sums, partial, C)

    return gelu_backward, X, Y


# ----------------------------------------------------------------------------
# CPU twins. `work` (tasks, C) takes a row of results: a loop that reads what it writes rounds in other ways.


@njit(fastmath=FASTMATH, inline="always")
def _gate(u):
    """(w, w**2, s), w = u within the limits where s is 0 or 1 for every purpose and exp is valid."""
    w = LIMIT if u > LIMIT else (-LIMIT if u < -LIMIT else u)
    return w, w * w, ONE / (ONE + exp(w * (K1 + K3 * (w * w))))


@twin(writes="y")
def _forward_cpu(x, bias, y, rng, site, first, threshold, keep_scale, bits, work):
    N, C = x.shape
    tasks = bits.shape[0]
    for t in prange(tasks):
        top, bottom = span(t, tasks, N)
        for n in range(top, bottom):
            a, b, r = x[n], y[n], work[t]
            for c in range(C):
                u = a[c] if bias is None else a[c] + bias[c]
                w, w2, s = _gate(u)
                r[c] = u * s
            if rng is None:
                for c in range(C):
                    b[c] = r[c]
            else:
                keep = draw_bits(bits[t], rng, site, first + n * C, C)
                for c in range(C):
                    b[c] = r[c] * keep_scale if keep[c] >= threshold else ZERO


@twin(writes="dx dbias")
def _backward_cpu(
    dy, x, bias, dx, dbias, partial, rng, site, first, threshold, keep_scale, bits, work
):  # fmt: skip
    N, C = x.shape
    tasks = bits.shape[0]
    for t in prange(tasks):
        top, bottom = span(t, tasks, N)
        sums = partial[t]
        for c in range(C):
            sums[c] = ZERO
        for n in range(top, bottom):
            a, d, g, r = x[n], dy[n], dx[n], work[t]
            for c in range(C):
                u = a[c] if bias is None else a[c] + bias[c]
                w, w2, s = _gate(u)
                r[c] = d[c] * (s + w * s * (ONE - s) * (D1 + D3 * w2))
            if rng is not None:
                keep = draw_bits(bits[t], rng, site, first + n * C, C)
                for c in range(C):
                    r[c] = r[c] * keep_scale if keep[c] >= threshold else ZERO
            for c in range(C):
                g[c] = r[c]
                sums[c] += r[c]
    if dbias is not None:
        for c in range(C):
            dbias[c] = ZERO
        for t in range(tasks):
            for c in range(C):
                dbias[c] += partial[t, c]


# ----------------------------------------------------------------------------
# Launchers


def gelu_forward(
    x, bias=None, *, dropout: float = 0.0, rng=None, site: int = 0, first: int = 0, out=None
):  # fmt: skip
    """Returns `y` = dropout(gelu(x + bias)). `out` gives the array to write; it may be x.

    `first` is the number of element (0, 0) within the whole batch, `site` the place in the model.
    """
    x, bias, rng = as_arrays(x, bias, rng)
    y = array_module(x).empty_like(x) if out is None else out
    spec = "x (N, C), bias (C,), rng (3,) uint32, out (N, C)"
    N, C = expect("gelu", spec, x, bias, rng, y, hint=FLATTEN)
    drop = dropout_of("gelu", dropout, rng, site, first)
    if on_gpu(x):
        forward, T, R, ROWS = _forward_kernel(C, aligned(C, x, bias, y), bias is not None, drop_mode(drop, C))
        grid = -(-N // (R * ROWS)), -(-C // (8 * T))
        launch(forward, grid, (T, R), x, *_standing_in(x, bias, drop.rng), *drop[1:], N, y)
    else:
        _forward_cpu(x, bias, y, *drop, *_scratch(N, C, drop))
    return y


def gelu_backward(
    dy, x, bias=None, *, dropout: float = 0.0, rng=None, site: int = 0, first: int = 0,
    recompute_out=None, out=None,
):  # fmt: skip
    """Returns `(dx, dbias)`, the gradients of `gelu_forward`; dbias is None without a bias.

    `recompute_out` is written too, with the forward's y, bit for bit: y need not be kept. It may be x.
    `out` gives the two arrays to write; dx may be written over dy.
    """
    dy, x, bias, rng = as_arrays(dy, x, bias, rng)
    xp = array_module(x)
    dx, dbias = (None, None) if out is None else out
    dx = xp.empty_like(x) if dx is None else dx
    dbias = xp.empty_like(bias) if dbias is None and bias is not None else dbias
    y = recompute_out
    N, C = expect(
        "gelu_backward",
        "dy (N, C), x (N, C), bias (C,), rng (3,) uint32, recompute_out (N, C), dx (N, C), dbias (C,)",
        *(dy, x, bias, rng, y, dx, dbias),
        hint=FLATTEN,
    )
    drop = dropout_of("gelu_backward", dropout, rng, site, first)
    if bias is None:
        dbias = None
    if on_gpu(x):
        backward, X, Y = _backward_kernel(
            aligned(C, dy, x, bias, y, dx), bias is not None, y is not None, drop_mode(drop, C)
        )
        columns, blocks = column_grid("gelu_backward", N, C)
        partial = None if bias is None else xp.empty(blocks * C, np.float32)
        absent = _standing_in(x, bias, drop.rng, partial, y)
        launch(
            backward, (columns, blocks), (X, Y), dy, x, *absent[:2], *drop[1:], N, C, *absent[2:], dx
        )  # fmt: skip
        if bias is not None:
            sum_blocks(partial, blocks, dbias)
    else:
        bits, work = _scratch(N, C, drop)
        _backward_cpu(dy, x, bias, dx, dbias, scratch(*work.shape), *drop, bits, work)
        if y is not None:
            _forward_cpu(x, bias, y, *drop, bits, work)
    return dx, dbias


def _scratch(N, C, drop):
    """(bits, work) for the tasks of a CPU twin."""
    tasks = task_count(N, 64)
    bits = np.empty((tasks, 0 if drop.rng is None else C + BITS_ROOM), np.uint32)
    return bits, scratch(tasks, C)


def _standing_in(x, *arrays):
    """`arrays` with x for those that are absent, which no kernel reads."""
    return tuple(x if a is None else a for a in arrays)
