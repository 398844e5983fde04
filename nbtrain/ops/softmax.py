"""Softmax over rows, with a causal mask and dropout on the probabilities (Srivastava et al., 2014).

    y[n, c]  = exp(sm_scale * x[n, c] - lse[n])         lse[n] = log sum_c exp(sm_scale * x[n, c])
    dx[n, c] = sm_scale * y[n, c] * (dy[n, c] - sum_c dy[n, c] * y[n, c])

N = rows, L = columns, at most 32,768.  x, y, dy, dx: (N, L), one of fp32, fp16, bf16; lse: (N,) fp32.
Causal: row n is query n % L of square (L, L) score matrices that are stacked; sums run over c <= n % L;
later columns are not read, and their y and dx are exactly 0.

Dropout: y becomes keep * y / (1 - p) after the softmax, with keep[n, c] drawn for element first + n * L + c
(see `nbtrain.device.philox`). The mask is never stored: the backward takes the undropped y, draws the mask
again and hands back the dropped y on request, for the product that needs it.

Arithmetic and sums are fp32. The largest score is subtracted before the scale is applied, so scores may be as
large as their dtype allows. A row of -inf only, or one with a nan or +inf, becomes nan.
"""

import numpy as np

from nbtrain.device import array_module, as_arrays, expect, on_gpu, prange, same_memory, twin
from nbtrain.device.cpu import exp, fill, larger, scratch, span, task_count
from nbtrain.device.dropout import BITS_ROOM, draw_bits, dropout_of
from nbtrain.device.softmax_rows import check_length, launch_backward, launch_forward
from nbtrain.errors import InvalidValue

ZERO, ONE = np.float32(0), np.float32(1)

# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="y lse")
def _forward_cpu(x, sm_scale, causal, y, lse, rng, site, first, threshold, keep_scale, bits, work):
    """work (tasks, L): a row, so that the sum has the same order in place (y = x) and not."""
    N, L = x.shape
    tasks = bits.shape[0]
    for t in prange(tasks):
        begin, end = span(t, tasks, N)
        for n in range(begin, end):
            seen = n % L + 1 if causal else L
            a, b, w = x[n, :seen], y[n, :seen], work[t, :seen]
            top = np.float32(-np.inf)
            for c in range(seen):
                top = larger(top, a[c])
            s = ZERO
            for c in range(seen):
                e = exp((a[c] - top) * sm_scale)
                w[c] = e
                s += e
            if lse is not None:
                lse[n] = top * sm_scale + np.log(s)
            inv = ONE / s
            for c in range(seen):
                b[c] = w[c] * inv
            if rng is not None:
                u = draw_bits(bits[t], rng, site, first + n * L, seen)
                for c in range(seen):
                    b[c] = b[c] * keep_scale if u[c] >= threshold else ZERO
            fill(y[n, seen:], ZERO)


@twin(writes="dx dropped")
def _backward_cpu(dy, y, sm_scale, causal, dx, dropped, rng, site, first, threshold, keep_scale, bits, work):
    """work (tasks, L): the row's gradient behind the dropout."""
    N, L = y.shape
    tasks = bits.shape[0]
    for t in prange(tasks):
        begin, end = span(t, tasks, N)
        for n in range(begin, end):
            seen = n % L + 1 if causal else L
            p, out, d = y[n, :seen], dx[n, :seen], work[t, :seen]
            g = dy[n, :seen]
            if rng is None:
                for c in range(seen):
                    d[c] = g[c]
            else:
                u = draw_bits(bits[t], rng, site, first + n * L, seen)
                for c in range(seen):
                    d[c] = g[c] * keep_scale if u[c] >= threshold else ZERO
            s = ZERO
            for c in range(seen):
                s += p[c] * d[c]
            for c in range(seen):
                d[c] = p[c] * (d[c] - s) * sm_scale
            if dropped is not None:  # before dx, which may be y
                q = dropped[n, :seen]
                if rng is None:
                    for c in range(seen):
                        q[c] = p[c]
                else:
                    u = bits[t, (first + n * L) & 3 :]
                    for c in range(seen):
                        q[c] = p[c] * keep_scale if u[c] >= threshold else ZERO
                fill(dropped[n, seen:], ZERO)
            for c in range(seen):
                out[c] = d[c]
            fill(dx[n, seen:], ZERO)


# ----------------------------------------------------------------------------
# Launchers


def softmax_forward(
    x, *, sm_scale: float = 1.0, causal: bool = False, dropout: float = 0.0, rng=None, site: int = 0,
    first: int = 0, lse=None, out=None,
):  # fmt: skip
    """Returns y; `out` may be x. `lse`, where given, is written too: the log of each row's sum."""
    x, rng, lse, out = as_arrays(x, rng, lse, out)
    N, L = expect(
        "softmax_forward",
        "x (N, L), rng (3,) uint32, lse (N,) fp32, out (N, L)",
        *(x, rng, lse, out),
        hint="Flatten to rows with x.reshape(-1, L).",
    )
    drop = _check("softmax_forward", N, L, sm_scale, causal, dropout, rng, site, first)
    y = array_module(x).empty_like(x) if out is None else out
    if on_gpu(x):
        launch_forward(x, y, L, sm_scale=sm_scale, causal=causal, lse=lse, dropout=drop)
    else:
        _forward_cpu(x, np.float32(sm_scale), causal, y, lse, *drop, *_scratch(N, L, dropout))
    return y


def softmax_backward(
    dy, y, *, sm_scale: float = 1.0, causal: bool = False, dropout: float = 0.0, rng=None, site: int = 0,
    first: int = 0, dropped=None, out=None,
):  # fmt: skip
    """Returns dx from dy, the gradient at the forward's result, and y, the probabilities before dropout.

    `out` may be dy or y. `dropped`, where given, is written too: y after dropout; it may be y.
    """
    dy, y, rng, dropped, out = as_arrays(dy, y, rng, dropped, out)
    N, L = expect(
        "softmax_backward",
        "dy (N, L), y (N, L), rng (3,) uint32, dropped (N, L), out (N, L)",
        *(dy, y, rng, dropped, out),
        hint="Flatten to rows with y.reshape(-1, L).",
    )
    drop = _check("softmax_backward", N, L, sm_scale, causal, dropout, rng, site, first)
    if same_memory(dropped, out) or same_memory(dropped, dy):
        raise InvalidValue(
            "softmax_backward writes dropped to y or an array of its own; got out's or dy's. Pass another."
        )
    dx = array_module(y).empty_like(y) if out is None else out
    if on_gpu(y):
        launch_backward(dy, y, dx, L, sm_scale=sm_scale, causal=causal, dropped=dropped, dropout=drop)
    else:
        _backward_cpu(dy, y, np.float32(sm_scale), causal, dx, dropped, *drop, *_scratch(N, L, dropout))
    return dx


def _check(op, N, L, sm_scale, causal, dropout, rng, site, first):
    check_length(op, L)
    if not 0 < sm_scale < np.inf:
        raise InvalidValue(f"{op} expects a positive sm_scale; got {sm_scale}. Negate x for a negative one.")
    if causal and N % max(L, 1):
        raise InvalidValue(
            f"{op} with causal=True expects square score matrices, stacked: N a multiple of L; got N = {N}, "
            f"L = {L}, {N % L} rows too many. Pass whole (L, L) matrices."
        )
    return dropout_of(op, dropout, rng, site, first)


def _scratch(N, L, dropout):
    tasks = task_count(N * L, 4096)
    return np.empty((tasks, L + BITS_ROOM if dropout else 0), np.uint32), scratch(tasks, L)
