"""Embedding of one token a sequence, each at a position of its own.

    x[b] = wte[tokens[b]] + wpe[positions[b]]

tokens, positions: (B,) int32, read on the device. wte: (V, C), wpe: (P, C), x: (B, C), one of fp32, fp16,
bf16. Ids and positions out of range are refused on the host and clamped on the GPU.
"""

import functools

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    cuda,
    expect,
    expect_ids,
    float32,
    is_recording,
    kernel,
    launch,
    on_gpu,
    prange,
    row_access,
    row_shape,
    twin,
)


@functools.cache
def _kernel(C: int, aligned: bool):
    """A row to a group of threads, eight channels at a time."""
    T, R = row_shape("embedding_decode", C, vectors=1)
    load8, store8 = row_access(aligned)

    @kernel(launch_bounds=T * R)
    def embedding_decode(tokens, positions, wte, wpe, x, B, V, P):
        n = cuda.blockIdx.x * R + cuda.threadIdx.y
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        if n < B:
            token = min(max(tokens[n], 0), V - 1)
            position = min(max(positions[n], 0), P - 1)
            c = cuda.threadIdx.x * 8
            while c < C:
                load8(a, 0, wte, token * C + c, C - c)
                load8(b, 0, wpe, position * C + c, C - c)
                for j in range(8):
                    a[j] += b[j]
                store8(x, n * C + c, a, 0, C - c)
                c += T * 8

    return embedding_decode, T, R


@twin(writes="x")
def _cpu(token, position, x):
    B, C = x.shape
    for b in prange(B):
        for c in range(C):
            x[b, c] = token[b, c] + position[b, c]


def embedding_decode(tokens, positions, wte, wpe, *, out=None):
    """Returns x (B, C), the embedding of each token plus that of its position."""
    tokens, positions, wte, wpe, x = as_arrays(tokens, positions, wte, wpe, out)
    spec = "tokens (B,) int32, positions (B,) int32, wte (V, C), wpe (P, C)"
    B, V, C, P = expect("embedding_decode", spec, tokens, positions, wte, wpe)
    if not is_recording():
        expect_ids("embedding_decode", "tokens", tokens, V)
        expect_ids("embedding_decode", "positions", positions, P)
    x = array_module(wte).empty((B, C), wte.dtype) if out is None else x
    expect("embedding_decode's out", "x (B, C), tokens (B,) int32, wte (V, C)", x, tokens, wte)
    if on_gpu(wte):
        decode, X, Y = _kernel(C, aligned(C, wte, wpe, x))
        launch(decode, -(-B // Y), (X, Y), tokens, positions, wte, wpe, x, B, V, P)
    else:
        _cpu(wte[tokens], wpe[positions], x)  # rows first: 16-bit tables are not widened whole
    return x
