"""What operators made of a softmax over rows share (softmax, attention): the GPU kernels.

Equations, shapes and what dropout means are in `nbtrain.ops.softmax`. Both kernels give a row to a group of
threads, eight columns at a time, and keep it in registers; rows of more than 16,384 are read again for every
pass, from the cache. A causal row reads only the eights that its query sees.
"""

import functools

import numpy as np
from numba import float32, uint32

from nbtrain.device.arrays import aligned
from nbtrain.device.backend import backend, cuda
from nbtrain.device.dropout import KEEP_ALL, NO_DROPOUT, bits8_of, drop_mode
from nbtrain.device.launching import launch
from nbtrain.device.tuning import row_shape
from nbtrain.device.vector import block_max, block_sum, exp2, log2, rcp, row_access
from nbtrain.errors import InvalidValue

MAX_L = 32768  # 1024 threads, 32 columns each
ZERO, LOG2E, LN2 = np.float32(0), np.float32(1 / np.log(2)), np.float32(np.log(2))
LOWEST = np.finfo(np.float32).min  # not -inf: kernels are compiled for finite constants


def check_length(op: str, L: int) -> None:
    if L > MAX_L:
        raise InvalidValue(
            f"{op} expects rows of at most {MAX_L} columns; got {L}. Split the row, or use a shorter context."
        )


@functools.cache
def _forward_kernel(L: int, aligned: bool, causal: bool, with_lse: bool, drop: int):
    T, R = row_shape("softmax_forward", L, vectors=4)
    V = -(-L // (8 * T))
    WHOLE, KEPT = (
        not causal and L == 8 * T * V,
        V * T <= 2048,
    )  # KEPT: the row stays in registers between the passes
    W = 8 * V if KEPT else 8
    load8, store8 = row_access(aligned)
    bits8 = bits8_of(drop)
    row_max, row_sum = block_max(T, R), block_sum(T, R)

    @backend.kernel(launch_bounds=T * R)
    def softmax_forward(x, N, sm_scale, rng, site, first, threshold, keep_scale, lse, y):
        n = cuda.blockIdx.x * R + cuda.threadIdx.y
        lane = cuda.threadIdx.x
        live = n < N
        end = L
        if causal:
            end = n % L + 1
        a = cuda.local.array(W, float32)
        bits = cuda.local.array(8, uint32)
        m = LOWEST
        for v in range(V):
            c = (v * T + lane) * 8
            at = v * 8 if KEPT else 0
            for j in range(8):
                a[at + j] = LOWEST
            if live and (WHOLE or c < end):
                load8(a, at, x, n * L + c, L - c)
            for j in range(8):
                if WHOLE or c + j < end:
                    m = max(m, a[at + j])
        m = row_max(m)
        s = ZERO
        for v in range(V):
            c = (v * T + lane) * 8
            at = v * 8 if KEPT else 0
            if KEPT or live:
                if WHOLE or c < end:
                    if not KEPT:
                        load8(a, 0, x, n * L + c, L - c)
                    for j in range(8):
                        # Subtract first: the product of a huge score and the scale may be infinite.
                        a[at + j] = exp2((a[at + j] - m) * (sm_scale * LOG2E))
                        if WHOLE or c + j < end:
                            s += a[at + j]
        s = row_sum(s)
        inv = rcp(s)
        if live:
            if with_lse and lane == 0:
                lse[n] = m * sm_scale + log2(s) * LN2
            for v in range(V):
                c = (v * T + lane) * 8
                at = v * 8 if KEPT else 0
                if WHOLE or c < L:
                    if not KEPT and c < end:
                        load8(a, 0, x, n * L + c, L - c)
                        for j in range(8):
                            a[j] = exp2((a[j] - m) * (sm_scale * LOG2E))
                    for j in range(8):
                        a[at + j] = a[at + j] * inv if WHOLE or c + j < end else ZERO
                    if drop != KEEP_ALL and c < end:
                        bits8(bits, 0, rng, site, first + n * L + c)
                        for j in range(8):
                            a[at + j] = a[at + j] * keep_scale if bits[j] >= threshold else ZERO
                    store8(y, n * L + c, a, at, L - c)

    return softmax_forward, T, R


@functools.cache
def _backward_kernel(L: int, aligned: bool, causal: bool, with_dropped: bool, drop: int):
    """A dropped probability is negated in registers: its sign is the mask (one of 0 is 0 either way)."""
    T, R = row_shape("softmax_backward", L, vectors=1)
    V = -(-L // (8 * T))
    WHOLE, KEPT = not causal and L == 8 * T * V, V <= 2
    W = 8 * V if KEPT else 8
    load8, store8 = row_access(aligned)
    bits8 = bits8_of(drop)
    row_sum = block_sum(T, R)

    @backend.device_function
    def fetch(a, d, at, dy, y, i, count, end, rng, site, element, threshold, keep_scale):
        """a = the probabilities, negative where dropped; d = their gradient, through the dropout."""
        load8(a, at, y, i, count)
        load8(d, at, dy, i, count)
        for j in range(8):
            if not WHOLE and j >= end:
                a[at + j] = ZERO
                d[at + j] = ZERO
        if drop != KEEP_ALL:
            bits = cuda.local.array(8, uint32)
            bits8(bits, 0, rng, site, element)
            for j in range(8):
                if bits[j] >= threshold:
                    d[at + j] = d[at + j] * keep_scale
                else:
                    d[at + j] = ZERO
                    a[at + j] = -a[at + j]

    @backend.kernel(launch_bounds=T * R)
    def softmax_backward(dy, y, N, sm_scale, rng, site, first, threshold, keep_scale, dropped, dx):
        n = cuda.blockIdx.x * R + cuda.threadIdx.y
        lane = cuda.threadIdx.x
        live = n < N
        end = L
        if causal:
            end = n % L + 1
        a = cuda.local.array(W, float32)
        d = cuda.local.array(W, float32)
        s = ZERO
        for v in range(V):
            c = (v * T + lane) * 8
            at = v * 8 if KEPT else 0
            for j in range(8):
                a[at + j] = ZERO
                d[at + j] = ZERO
            if live and (WHOLE or c < end):
                i = n * L + c
                fetch(a, d, at, dy, y, i, L - c, end - c, rng, site, first + i, threshold, keep_scale)
            for j in range(8):
                s += abs(a[at + j]) * d[at + j]
        s = row_sum(s)
        if live:
            for v in range(V):
                c = (v * T + lane) * 8
                i = n * L + c
                at = v * 8 if KEPT else 0
                if WHOLE or c < L:
                    if not KEPT:
                        for j in range(8):
                            a[j] = ZERO
                            d[j] = ZERO
                        if WHOLE or c < end:
                            fetch(
                                a, d, 0, dy, y, i, L - c, end - c, rng, site, first + i, threshold, keep_scale
                            )
                    for j in range(8):
                        d[at + j] = abs(a[at + j]) * (d[at + j] - s) * sm_scale
                        if not WHOLE and c + j >= end:
                            d[at + j] = ZERO
                    store8(dx, i, d, at, L - c)
                    if with_dropped:
                        for j in range(8):
                            a[at + j] = a[at + j] * keep_scale if a[at + j] > ZERO else ZERO
                        store8(dropped, i, a, at, L - c)

    return softmax_backward, T, R


# An input stands in for an argument that is absent, and what may be written in place comes last: the
# simulator copies every argument back, in order.


def launch_forward(x, y, L: int, *, sm_scale, causal, lse=None, dropout=NO_DROPOUT) -> None:
    """y = softmax of the rows of L in x, any shape; y may be x."""
    N = x.size // L
    forward, T, R = _forward_kernel(L, aligned(L, x, y), causal, lse is not None, drop_mode(dropout, L))
    rng, *rest = dropout
    rng, lse = (x if a is None else a for a in (rng, lse))
    launch(forward, -(-N // R), (T, R), x, N, np.float32(sm_scale), rng, *rest, lse, y)


def launch_backward(dy, y, dx, L: int, *, sm_scale, causal, dropped=None, dropout=NO_DROPOUT) -> None:
    """dx = the gradient at the scores, dropped (if given) = y after dropout.

    dx may be dy or y, dropped may be y.
    """
    N = y.size // L
    backward, T, R = _backward_kernel(
        L, aligned(L, dy, y, dx, dropped), causal, dropped is not None, drop_mode(dropout, L)
    )
    rng, *rest = dropout
    rng, dropped = (y if a is None else a for a in (rng, dropped))
    launch(backward, -(-N // R), (T, R), dy, y, N, np.float32(sm_scale), rng, *rest, dropped, dx)
