"""Attention of one new token a sequence to the keys and values that are kept of the tokens before it.

    k_cache[b, h, n] = k[b, h]      v_cache[b, h, n] = v[b, h]      n = lengths[b]
    y[b, h] = sum_{i <= n} p_i v_cache[b, h, i]          p = softmax_i(sm_scale * q[b, h] k_cache[b, h, i])

qkv: (B, 3C) holds q, k and v of the new tokens side by side, each with its H heads of D = C / H side by side.
k_cache, v_cache: (B, H, T, D), room for T tokens, written at place n of each sequence; what lies behind it is
not read. y: (B, C). One of fp32, fp16, bf16. lengths: (B,) int32, the tokens that a sequence has before this
one, 0 … T - 1; they are read on the device, so that a captured launch can be replayed for every token.

Softmax runs over a few hundred places at a time (Milakov and Gimelshein, 2018), in fp32. One block a head and
sequence: a cache of 1024 places is two rounds of its 512 threads, less than a second kernel that puts parts
together would take.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    block_max,
    block_sum,
    cuda,
    exp2,
    expect,
    expect_ids,
    float32,
    is_recording,
    kernel,
    launch,
    on_gpu,
    prange,
    rcp,
    row_access,
    store,
    tuned,
    twin,
)
from nbtrain.device.cpu import exp, larger
from nbtrain.errors import InvalidValue

ZERO, ONE, LOG2E = np.float32(0), np.float32(1), np.float32(1 / np.log(2))
LOWEST = np.finfo(np.float32).min  # not -inf: kernels are compiled for finite constants
PARTS = 8704  # products of eights in shared memory at once: 34 of the 48 KB that every kernel may have

# ----------------------------------------------------------------------------
# GPU kernel


@functools.cache
def _kernel(D: int, aligned: bool):
    """One block a head and sequence: G threads share a place of the cache, eight elements each, R places are
    read side by side, U times a round. The new token begins the sums, from qkv: its keys and values are
    written to the cache and not read from it."""
    G = -(-D // 8)
    R = tuned("attention_decode")[0] // G
    THREADS = G * R
    U = max(1, min(G, 8, PARTS // ((G + 1) * R)))
    PLACES = R * U  # of a round, at most THREADS
    ROW = G + 1  # a column more than needed: no bank conflicts
    BUFFER = max(PLACES * ROW, 8 * THREADS)
    load8, store8 = row_access(aligned)
    whole_sum, whole_max = block_sum(THREADS), block_max(THREADS)

    @kernel(launch_bounds=THREADS)
    def attention_decode(qkv, k_cache, v_cache, lengths, y, H, T, sm_scale):
        parts = cuda.shared.array(BUFFER, float32)
        weights = cuda.shared.array(PLACES, float32)
        q = cuda.local.array(8, float32)
        a = cuda.local.array(8, float32)
        acc = cuda.local.array(8, float32)
        t = cuda.threadIdx.x
        r = t // G
        g = t - r * G
        b = cuda.blockIdx.y
        h = cuda.blockIdx.x
        n = min(max(lengths[b], 0), T - 1)
        at = b * (3 * H * D) + h * D + g * 8
        cache = (b * H + h) * T * D + g * 8
        count = D - g * 8
        load8(q, 0, qkv, at, count)
        load8(a, 0, qkv, at + H * D, count)
        load8(acc, 0, qkv, at + 2 * H * D, count)
        s = ZERO
        for j in range(8):
            q[j] *= sm_scale * LOG2E
            s += q[j] * a[j]
        if r == 0:
            store8(k_cache, cache + n * D, a, 0, count)
            store8(v_cache, cache + n * D, acc, 0, count)
        else:
            s = ZERO
            for j in range(8):
                acc[j] = ZERO
        top = whole_sum(s)
        total = ONE
        first = 0
        while first < n:
            for u in range(U):
                i = first + u * R + r
                if i < n:
                    load8(a, 0, k_cache, cache + i * D, count)
                    s = ZERO
                    for j in range(8):
                        s += q[j] * a[j]
                    parts[(u * R + r) * ROW + g] = s
            cuda.syncthreads()
            live = t < PLACES and first + t < n
            s = LOWEST
            if live:
                s = ZERO
                for j in range(G):
                    s += parts[t * ROW + j]
            higher = max(top, whole_max(s))
            s = exp2(s - higher) if live else ZERO
            shrink = exp2(top - higher)
            total = total * shrink + whole_sum(s)
            top = higher
            for j in range(8):
                acc[j] *= shrink
            if t < PLACES:
                weights[t] = s
            cuda.syncthreads()
            for u in range(U):
                i = first + u * R + r
                if i < n:
                    load8(a, 0, v_cache, cache + i * D, count)
                    w = weights[u * R + r]
                    for j in range(8):
                        acc[j] += w * a[j]
            first += PLACES
        for j in range(8):
            parts[(r * 8 + j) * G + g] = acc[j]  # neighbours side by side
        cuda.syncthreads()
        inv = rcp(total)
        c = t
        while c < D:
            s = ZERO
            for i in range(R):
                s += parts[(i * 8 + c % 8) * G + c // 8]
            store(y, (b * H + h) * D + c, s * inv)
            c += THREADS

    return attention_decode, THREADS


# ----------------------------------------------------------------------------
# CPU twin


@twin(writes="k_cache v_cache y")
def _cpu(qkv, k_cache, v_cache, lengths, y, sm_scale, scores):
    """scores (B * H, T)"""
    B, H, _, D = k_cache.shape
    C = H * D
    for item in prange(B * H):
        b, h = item // H, item % H
        n = lengths[b]
        q, k = qkv[b, h * D : h * D + D], qkv[b, C + h * D : C + h * D + D]
        v, o = qkv[b, 2 * C + h * D : 2 * C + h * D + D], y[b, h * D : h * D + D]
        row = scores[item]
        for d in range(D):
            k_cache[b, h, n, d] = k[d]
            v_cache[b, h, n, d] = v[d]
            o[d] = ZERO
        top = np.float32(-np.inf)
        for i in range(n + 1):
            key = k_cache[b, h, i]
            s = ZERO
            for d in range(D):
                s += q[d] * key[d]
            row[i] = s * sm_scale
            top = larger(top, row[i])
        total = ZERO
        for i in range(n + 1):
            e = exp(row[i] - top)
            total += e
            value = v_cache[b, h, i]
            for d in range(D):
                o[d] += e * value[d]
        inv = ONE / total
        for d in range(D):
            o[d] *= inv


# ----------------------------------------------------------------------------
# Launcher


def attention_decode(qkv, k_cache, v_cache, lengths, *, sm_scale: float | None = None, out=None):
    """Returns y, and writes the new keys and values to both caches at `lengths`, which stays as it is.

    sm_scale is 1 / sqrt(D) by default. On the host a length outside 0 … T - 1 is an InvalidValue; on a GPU it
    is taken for the nearest that is not.
    """
    qkv, k_cache, v_cache, lengths, y = as_arrays(qkv, k_cache, v_cache, lengths, out)
    B, H, T, D = expect(
        "attention_decode",
        "k_cache (B, H, T, D), v_cache (B, H, T, D), lengths (B,) int32",
        *(k_cache, v_cache, lengths),
    )
    C = H * D
    expect(
        "attention_decode",
        f"qkv (B, {3 * C}), k_cache (B, {H}, {T}, {D}), y (B, {C})",
        *(qkv, k_cache, y),
        hint="qkv holds q, k and v of one token a sequence.",
    )
    if not is_recording():
        expect_ids("attention_decode", "lengths", lengths, T)
    y = array_module(qkv).empty((B, C), qkv.dtype) if out is None else y
    scale = np.float32(D**-0.5 if sm_scale is None else sm_scale)
    if on_gpu(qkv):
        most = 8 * tuned("attention_decode")[0]
        if D > most:
            raise InvalidValue(
                f"attention_decode on a GPU takes heads of at most {most} columns, a block's threads times "
                f"eight; got D = {D}. Use more heads."
            )
        decode, threads = _kernel(D, aligned(D, qkv, k_cache, v_cache))
        launch(decode, (H, B), threads, qkv, k_cache, v_cache, lengths, y, H, T, scale)
    else:
        _cpu(qkv, k_cache, v_cache, lengths, y, scale, np.empty((B * H, T), np.float32))
    return y
