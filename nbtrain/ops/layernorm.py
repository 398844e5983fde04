"""Layer normalisation over the last axis (Ba et al., 2016), with the residual addition before it.

    total = x + residual, rounded to storage (x itself without a residual)
    y     = (total - mean) * rstd * weight + bias          rstd = 1 / sqrt(var + eps)

    dx      = dresidual + rstd * (g - mean_c(g) - xhat * mean_c(g * xhat))
    dweight = sum_n dy * xhat          dbias = sum_n dy
              g = dy * weight          xhat = (total - mean) * rstd

N = rows (batch * time), C = channels. x, residual, total, y, dy, dx: (N, C), weight, bias, dweight, dbias:
(C,), one of fp32, fp16, bf16. mean, rstd: (N,) fp32. Statistics are those of the rounded total, in two
passes: sum(x*x)/C - mean**2 cancels when |mean| >> std. Arithmetic and sums are fp32.
"""

import functools
import math

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    block_sum,
    block_sums,
    can_fetch,
    cuda,
    device_function,
    expect,
    fetch_access,
    float32,
    kernel,
    launch,
    on_gpu,
    prange,
    round8,
    row_access,
    row_shape,
    rsqrt,
    tuned,
    twin,
)
from nbtrain.device.cpu import scratch, span, task_count
from nbtrain.device.reduce import sum_blocks
from nbtrain.errors import InvalidValue

ZERO, ONE = np.float32(0), np.float32(1)
BACKWARD_CHANNELS = 12_000  # a row of fp32 sums in the 48 KB of shared memory that every kernel may have
BACKWARD_VECTORS = 1  # eights of a row that a thread of the backward kernel holds, at most, where T allows it
# Its threads on a multiprocessor, which leaves each 64 registers; ragged rows need more.
BACKWARD_RESIDENT = 960
OWN_SHARED_BYTES = 46 << 10  # a block's, of the 48 KB that every kernel may have

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _forward_kernel(C: int, aligned: bool, with_residual: bool):
    """A row to a group of threads, eight channels at a time, kept in registers."""
    T, R = row_shape("layernorm_forward", C, vectors=1)
    V = -(-C // (8 * T))
    W, WHOLE, INV_C = 8 * V, C == 8 * T * V, np.float32(1 / C)
    load8, store8 = row_access(aligned)
    row_sum = block_sum(T, R)

    @kernel(launch_bounds=T * R)
    def layernorm_forward(x, residual, weight, bias, total, y, mean, rstd, N, eps):
        n = cuda.blockIdx.x * R + cuda.threadIdx.y
        lane = cuda.threadIdx.x
        live = n < N
        a = cuda.local.array(W, float32)
        w = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        s = ZERO
        for v in range(V):
            c = (v * T + lane) * 8
            for j in range(8):
                a[v * 8 + j] = ZERO
            if live and (WHOLE or c < C):
                load8(a, v * 8, x, n * C + c, C - c)
                if with_residual:
                    load8(b, 0, residual, n * C + c, C - c)
                    for j in range(8):
                        a[v * 8 + j] += b[j]
                    round8(a, v * 8, total)
                    store8(total, n * C + c, a, v * 8, C - c)
            for j in range(8):
                s += a[v * 8 + j]
        mu = row_sum(s) * INV_C
        s = ZERO
        for v in range(V):
            c = (v * T + lane) * 8
            for j in range(8):
                if WHOLE or c + j < C:
                    d = a[v * 8 + j] - mu
                    s += d * d
        r = rsqrt(row_sum(s) * INV_C + eps)
        if live:
            if lane == 0:
                mean[n] = mu
                rstd[n] = r
            for v in range(V):
                c = (v * T + lane) * 8
                if WHOLE or c < C:
                    load8(w, 0, weight, c, C - c)
                    load8(b, 0, bias, c, C - c)
                    for j in range(8):
                        b[j] += (a[v * 8 + j] - mu) * r * w[j]
                    store8(y, n * C + c, b, 0, C - c)

    return layernorm_forward, T, R


def _backward_shape(C: int) -> tuple[int, int, int]:
    """(threads a row, rows a block, eights of a row that a thread takes)"""
    T, R = row_shape("layernorm_backward", C, vectors=BACKWARD_VECTORS)
    return T, R, -(-C // (8 * T))


@functools.cache
def _backward_kernel(C: int, aligned: bool, with_dresidual: bool, with_sum: bool, ahead: bool):
    """A persistent grid: block b takes rows b, b + grid, … in groups, so the sums over rows have one fixed
    order. `ahead`, the next group arrives in shared memory while this one waits for its sums.

    partial[0, b], partial[1, b] and `with_sum` partial[2, b] are the block's share of dweight, dbias and
    dx_sum.
    """
    T, R, V = _backward_shape(C)
    W, WHOLE, INV_C = 8 * V, C == 8 * T * V, np.float32(1 / C)
    load8, store8 = row_access(aligned)
    WORDS = 4 * T * R * V  # of one array's group of rows
    slots, fetch8, await_fetches, read8 = fetch_access(ahead, aligned, 3 * WORDS)
    row_sums = block_sums(T, R)

    resident = BACKWARD_RESIDENT if aligned else BACKWARD_RESIDENT * 2 // 3

    @device_function
    def slot(which, v):
        return which * WORDS + ((v * R + cuda.threadIdx.y) * T + cuda.threadIdx.x) * 4

    @device_function
    def fetch(words, which, a, n, N):
        for v in range(V):
            c = (v * T + cuda.threadIdx.x) * 8
            if n < N and (WHOLE or c < C):
                fetch8(words, slot(which, v), a, n * C + c)

    @kernel(launch_bounds=(T * R, max(1, resident // (T * R))))
    def layernorm_backward(dy, x, weight, mean, rstd, dresidual, dx, partial, N):
        lane, y = cuda.threadIdx.x, cuda.threadIdx.y
        buf = cuda.shared.array((R, C), float32)
        dw = cuda.local.array(W, float32)
        db = cuda.local.array(W, float32)
        ds = cuda.local.array(W, float32)
        h = cuda.local.array(W, float32)
        g = cuda.local.array(W, float32)
        t = cuda.local.array(8, float32)
        for k in range(W):
            dw[k] = ZERO
            db[k] = ZERO
            ds[k] = ZERO
        n0, step = cuda.blockIdx.x * R, cuda.gridDim.x * R
        next_mu, next_r = ZERO, ZERO
        if n0 + y < N:
            next_mu = mean[n0 + y]
            next_r = rstd[n0 + y]
        words = slots()
        fetch(words, 0, dy, n0 + y, N)
        fetch(words, 1, x, n0 + y, N)
        if with_dresidual:
            fetch(words, 2, dresidual, n0 + y, N)
        while n0 < N:  # the same for the whole block: row_sums holds barriers
            n = n0 + y
            live = n < N
            mu, r = next_mu, next_r
            if n + step < N:
                next_mu = mean[n + step]
                next_r = rstd[n + step]
            await_fetches()
            s1, s2 = ZERO, ZERO
            for v in range(V):
                c = (v * T + lane) * 8
                for j in range(8):
                    g[v * 8 + j] = ZERO
                    h[v * 8 + j] = mu
                if live and (WHOLE or c < C):
                    read8(g, v * 8, words, slot(0, v), dy, n * C + c, C - c)
                    read8(h, v * 8, words, slot(1, v), x, n * C + c, C - c)
                    load8(t, 0, weight, c, C - c)
                    for j in range(8):
                        k = v * 8 + j
                        xhat = (h[k] - mu) * r
                        h[k] = xhat
                        db[k] += g[k]
                        dw[k] += g[k] * xhat
                        g[k] *= t[j]
                        s1 += g[k]
                        s2 += g[k] * xhat
            fetch(words, 0, dy, n + step, N)
            fetch(words, 1, x, n + step, N)
            s1, s2 = row_sums(s1, s2)
            s1 *= INV_C
            s2 *= INV_C
            if live:
                for v in range(V):
                    c = (v * T + lane) * 8
                    if WHOLE or c < C:
                        for j in range(8):
                            t[j] = ZERO
                        if with_dresidual:
                            read8(t, 0, words, slot(2, v), dresidual, n * C + c, C - c)
                        for j in range(8):
                            k = v * 8 + j
                            t[j] += (g[k] - s1 - h[k] * s2) * r
                            if with_sum:
                                ds[k] += t[j]
                        store8(dx, n * C + c, t, 0, C - c)
            if with_dresidual:
                fetch(words, 2, dresidual, n + step, N)
            n0 += step
        for which in range(3 if with_sum else 2):
            cuda.syncthreads()  # buf is read by the pass before
            for v in range(V):
                c = (v * T + lane) * 8
                for j in range(8):
                    if WHOLE or c + j < C:
                        k = v * 8 + j
                        buf[y, c + j] = dw[k] if which == 0 else db[k] if which == 1 else ds[k]
            cuda.syncthreads()
            c = y * T + lane
            while c < C:
                s = ZERO
                for w in range(R):
                    s += buf[w, c]
                partial[(which * cuda.gridDim.x + cuda.blockIdx.x) * C + c] = s
                c += T * R

    return layernorm_backward, T, R


def _reads_ahead(x, aligned: bool) -> bool:
    """Whether the backward kernel does: where all blocks find their shared memory."""
    C = x.shape[1]
    T, R, V = _backward_shape(C)
    own = 48 * T * R * V + 4 * R * C  # three arrays' eights of a group, and the sums at the end
    return own <= OWN_SHARED_BYTES and can_fetch(x, aligned, max(1, BACKWARD_RESIDENT // (T * R)), own)


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="total y mean rstd")
def _forward_cpu(x, residual, weight, bias, eps, total, y, mean, rstd):
    N, C = x.shape
    inv = ONE / np.float32(C)
    for n in prange(N):
        s = ZERO
        if residual is None:
            row = x[n]
            for c in range(C):
                s += row[c]
        else:
            row = total[n]
            for c in range(C):
                a = x[n, c] + residual[n, c]
                row[c] = a
                s += a
        mu = s * inv
        s = ZERO
        for c in range(C):
            d = row[c] - mu
            s += d * d
        r = ONE / np.sqrt(s * inv + eps)
        for c in range(C):
            y[n, c] = (row[c] - mu) * r * weight[c] + bias[c]
        mean[n], rstd[n] = mu, r


@twin(writes="dx dweight dbias dx_sum")
def _backward_cpu(dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias, dx_sum, partial):
    N, C = x.shape
    tasks = partial.shape[0]
    inv = ONE / np.float32(C)
    for t in prange(tasks):
        dw, db, ds = partial[t, 0], partial[t, 1], partial[t, 2]
        dw[:] = ZERO
        db[:] = ZERO
        ds[:] = ZERO
        first, last = span(t, tasks, N)
        for n in range(first, last):
            mu, r = mean[n], rstd[n]
            s1 = ZERO
            s2 = ZERO
            for c in range(C):
                g = dy[n, c] * weight[c]
                s1 += g
                s2 += g * (x[n, c] - mu)
            s1 = s1 * inv
            s2 = s2 * r * r * inv
            for c in range(C):
                h = x[n, c] - mu
                d = dy[n, c]
                db[c] += d
                dw[c] += d * h * r
                g = r * (d * weight[c] - s1 - h * s2)
                if dresidual is not None:
                    g += dresidual[n, c]
                dx[n, c] = g
                if dx_sum is not None:
                    ds[c] += g
    for c in range(C):
        dweight[c] = ZERO
        dbias[c] = ZERO
    for t in range(tasks):
        for c in range(C):
            dweight[c] += partial[t, 0, c]
            dbias[c] += partial[t, 1, c]
    if dx_sum is not None:
        for c in range(C):
            dx_sum[c] = ZERO
        for t in range(tasks):
            for c in range(C):
                dx_sum[c] += partial[t, 2, c]


# ----------------------------------------------------------------------------
# Launchers


def layernorm_forward(x, weight, bias, *, residual=None, eps: float = 1e-5, out=None):
    """Returns `(y, mean, rstd, total)`; save the last three for `layernorm_backward`.

    `total` is x + residual, the residual stream; without a residual it is `x` itself. `out` gives the four
    arrays to write.
    """
    if not 0 <= eps < math.inf:
        raise InvalidValue(f"layernorm expects a finite eps, 0 or more; got {eps}. 1e-5 is usual.")
    x, weight, bias, residual = as_arrays(x, weight, bias, residual)
    N, C = _check(x, weight, bias, residual)
    xp = array_module(x)
    if out is None:
        out = (
            xp.empty_like(x), xp.empty(N, np.float32), xp.empty(N, np.float32),
            x if residual is None else xp.empty_like(x),
        )  # fmt: skip
    y, mean, rstd, total = out
    total = x if residual is None else total
    expect(
        "layernorm's out",
        "y (N, C), mean (N,) fp32, rstd (N,) fp32, total (N, C), x (N, C)",
        y,
        mean,
        rstd,
        total,
        x,
    )
    if on_gpu(x):
        forward, T, R = _forward_kernel(
            C, aligned(C, x, residual, weight, bias, total, y), residual is not None
        )
        other = x if residual is None else residual
        launch(forward, -(-N // R), (T, R), x, other, weight, bias, total, y, mean, rstd, N, np.float32(eps))
    else:
        if (
            residual is not None and x.dtype != np.float32
        ):  # the twin rounds at its end; total is rounded before
            np.add(x, residual, out=total)
            x, residual = total, None
        written = None if residual is None else total  # x may be an array that nobody can write
        _forward_cpu(x, residual, weight, bias, np.float32(eps), written, y, mean, rstd)
    return y, mean, rstd, total


def layernorm_backward(dy, x, weight, mean, rstd, *, dresidual=None, dx_sum=None, out=None):
    """Returns `(dx, dweight, dbias)`, the gradients of `layernorm_forward` at `x` = the `total` that it
    returned.

    `dresidual` is the gradient that reaches `total` along the residual stream; it is added to dx, which is
    then the gradient of both x and residual. dx may be written over dresidual or dy. `dx_sum` (C,), if given,
    is written too: the sum of dx over rows before it is rounded, the gradient of a bias that was added to x.
    `out` gives the three arrays to write.
    """
    dy, x, weight, mean, rstd, dresidual = as_arrays(dy, x, weight, mean, rstd, dresidual)
    N, C = expect(
        "layernorm_backward",
        "dy (N, C), x (N, C), weight (C,), mean (N,) fp32, rstd (N,) fp32, dresidual (N, C)",
        *(dy, x, weight, mean, rstd, dresidual),
        hint="Flatten (B, T, C) with x.reshape(-1, C).",
    )
    xp = array_module(x)
    if out is None:
        out = xp.empty_like(x), xp.empty_like(weight), xp.empty_like(weight)
    dx, dweight, dbias = out
    outputs = "dx (N, C), dweight (C,), dbias (C,), dx_sum (C,), x (N, C)"
    expect("layernorm_backward's out", outputs, dx, dweight, dbias, dx_sum, x)
    if on_gpu(x):
        if C > BACKWARD_CHANNELS:
            raise InvalidValue(
                f"layernorm_backward on a GPU takes rows of at most {BACKWARD_CHANNELS} channels, which its "
                f"shared memory holds; got C = {C}. Use a smaller n_embd."
            )
        sums = [dweight, dbias] if dx_sum is None else [dweight, dbias, dx_sum]
        whole = aligned(C, dy, x, weight, dresidual, dx)
        backward, T, R = _backward_kernel(
            C, whole, dresidual is not None, dx_sum is not None, _reads_ahead(x, whole)
        )
        blocks = min(tuned("layernorm_backward")[1], -(-N // R))
        partial = xp.empty(len(sums) * blocks * C, np.float32)
        other = dy if dresidual is None else dresidual
        launch(backward, blocks, (T, R), dy, x, weight, mean, rstd, other, dx, partial, N)
        sum_blocks(partial, blocks, *sums)
    else:
        partial = scratch(task_count(N, 64), 3, C)
        _backward_cpu(dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias, dx_sum, partial)
    return dx, dweight, dbias


def _check(x, weight, bias, residual):
    return expect(
        "layernorm",
        "x (N, C), weight (C,), bias (C,), residual (N, C)",
        *(x, weight, bias, residual),
        hint="Flatten (B, T, C) with x.reshape(-1, C).",
    )
