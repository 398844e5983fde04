"""One call of every launcher, at GPT-2's sizes: what the compile checks record and compile. Nothing here runs
a kernel.

Arrays are `np.empty`, never touched, so their size costs nothing. An operator's author adds a function named
after it.
"""

import numpy as np

from nbtrain.device import FLOATS, recording

N, C, V, T, H = 2048, 768, 50304, 1024, 12


def empty(dtype, *shapes):
    arrays = [np.empty(shape, dtype) for shape in shapes]
    return arrays[0] if len(arrays) == 1 else arrays


def layernorm(dtype):
    from nbtrain.ops.layernorm import layernorm_backward, layernorm_forward

    for channels in (768, 1600, 767):  # whole groups, ragged groups, rows that are not aligned
        x, w = empty(dtype, (N, channels), (channels,))
        y, mean, rstd, total = layernorm_forward(x, w, w, residual=x)
        layernorm_forward(x, w, w)
        layernorm_backward(x, total, w, mean, rstd, dresidual=x)
        layernorm_backward(x, total, w, mean, rstd, dresidual=x, dx_sum=w)
        layernorm_backward(x, total, w, mean, rstd)


def softmax(dtype):
    from nbtrain.ops.softmax import softmax_backward, softmax_forward

    rng = empty(np.uint32, (3,))
    # GPT-2's context, unaligned rows, the longest that stay in registers, the longest of all
    for L, causal in (
        (1024, False),
        (1024, True),
        (1023, True),
        (16384, True),
        (32767, False),
        (32768, True),
    ):
        x, lse = empty(dtype, (L, L)), empty(np.float32, (L,))
        y = softmax_forward(x, causal=causal)
        softmax_backward(x, y, causal=causal)
        softmax_forward(x, causal=causal, lse=lse, dropout=0.1, rng=rng)
        softmax_backward(x, y, causal=causal, dropout=0.1, rng=rng, dropped=y)


def attention(dtype):
    from nbtrain.ops.attention import attention_backward, attention_forward

    qkv, rng = empty(dtype, (2, T, 3 * C)), empty(np.uint32, (3,))
    for options in ({}, dict(dropout=0.1, rng=rng)):
        y, lse = attention_forward(qkv, H, **options)
        attention_backward(y, qkv, y, lse, H, **options)


def cross_entropy(dtype):
    from nbtrain.ops import cross_entropy as op

    # GPT-2's vocabulary padded and not, the whole of a padded one, and a small one
    for columns, vocab_size in ((50304, 50257), (50257, None), (50304, None), (65, None)):
        logits = empty(dtype, (N, columns))
        targets, dloss = empty(np.int32, (N,)), empty(np.float32, (1,))
        losses, lse = op.cross_entropy_forward(logits, targets, vocab_size=vocab_size)
        op.cross_entropy_forward_backward(logits, targets, dloss, vocab_size=vocab_size)
        op.cross_entropy_backward(losses, logits, targets, lse, vocab_size=vocab_size)
    op.sum_losses(losses)


def embedding(dtype):
    from nbtrain.ops.embedding import embedding_backward, embedding_forward

    for channels in (768, 1600, 767):
        wte, wpe, dwte = empty(dtype, (V, channels), (T, channels), (V, channels))
        tokens, order = empty(np.int32, (N // T, T), (N,))
        dx = embedding_forward(tokens, wte, wpe)
        embedding_backward(dx, tokens, order, dwte, wpe, accumulate=False)
        embedding_backward(dx, tokens, order, empty(np.float32, (V, channels)), wpe)


def batch_check(dtype):
    from nbtrain.ops.batch_check import batch_check, nan_if_bad

    tokens, targets, scale = empty(np.int32, (4, 8, T)), empty(np.int32, (4, 8, T)), empty(np.float32, (1,))
    batch_check(tokens, targets, scale, vocab_size=V)
    batch_check(tokens, targets, scale)
    nan_if_bad(empty(np.float32, (1,)), empty(np.int32, (3,)))


def global_norm(dtype):
    from nbtrain.ops.global_norm import global_norm

    for n in (256 * N, 256 * N + 3):
        global_norm(empty(dtype, (n,)))


def adamw(dtype):
    from nbtrain.ops.adamw import adamw

    master, m, v, g = empty(np.float32, *[(256 * N,)] * 4)
    params = master if dtype == np.float32 else empty(dtype, (256 * N,))
    decay, hyper = empty(np.uint8, (N,)), empty(np.float32, (8,))
    for gradient in (g, empty(dtype, (256 * N,)), empty(dtype, (256 * N + 1,))[1:]):
        adamw(gradient, master, m, v, params, decay, hyper)
        adamw(gradient, master, m, v, params, decay, hyper, out=(master, m, v, params))
        adamw(gradient, master, m, v, params, decay, hyper, out=(master, m, v, params), zero_grad=True)


def control(dtype):
    from nbtrain.ops.control import control
    from nbtrain.optim import Schedule

    one, whole = empty(np.float32, (1,)), empty(np.int32, (1,))
    schedule = Schedule("cosine", lr=1e-3, warmup=10, total=100)
    control(one, one, empty(np.int32, (3,)), whole, whole, one, whole, schedule=schedule)


def linear(dtype):
    from nbtrain.ops.linear import linear_backward, linear_forward

    for K, M in ((768, 2304), (768, 767)):
        x, weight, bias = empty(dtype, (N, K), (K, M), (M,))
        linear_backward(linear_forward(x, weight, bias), x, weight)


def gelu(dtype):
    from nbtrain.ops.gelu import gelu_backward, gelu_forward

    rng = empty(np.uint32, (3,))
    for channels in (3072, 6400, 767):
        x, bias = empty(dtype, (N, channels), (channels,))
        for first in (0, 1):
            for options in ({}, dict(dropout=0.1, rng=rng, first=first)):
                for b in (bias, None):
                    gelu_forward(x, b, **options)
                    gelu_backward(x, x, b, **options)
                    gelu_backward(x, x, b, recompute_out=x, **options)


def dropout(dtype):
    from nbtrain.ops.dropout import dropout_forward

    rng = empty(np.uint32, (3,))
    for channels in (768, 767):
        for first in (0, 1):
            dropout_forward(empty(dtype, (N - 1, channels)), 0.1, rng, site=0, first=first)


def cast(dtype):
    from nbtrain.ops.cast import cast_and_scale

    x, single, wide = empty(dtype, (256 * N + 3,)), empty(np.float32, ()), empty(np.float32, (256 * N + 4,))
    for out in (x, wide[:-1], wide[1:]):
        cast_and_scale(x, single, out=out)
        cast_and_scale(out, single, out=x)
        cast_and_scale(x, 2.0, out=out, accumulate=True)


def attention_decode(dtype):
    from nbtrain.ops.attention_decode import attention_decode

    for heads, D in ((12, 64), (2, 128), (2, 80), (2, 63), (1, 4)):
        qkv, cache = empty(dtype, (2, 3 * heads * D), (2, heads, T, D))
        attention_decode(qkv, cache, cache, empty(np.int32, (2,)))


def embedding_decode(dtype):
    from nbtrain.ops.embedding_decode import embedding_decode

    ids = empty(np.int32, (8,))
    for channels in (768, 1600, 767):
        embedding_decode(ids, ids, *empty(dtype, (V, channels), (T, channels)))


def sample(dtype):
    from nbtrain.ops.sample import sample

    rng = empty(np.uint32, (3,))
    logits, ragged = empty(dtype, (8, V), (8, 50257))
    sample(logits, temperature=0, vocab_size=50257)
    for options in ({}, dict(top_k=50), dict(top_p=0.9), dict(top_k=50, top_p=0.9)):
        sample(logits, rng, vocab_size=50257, **options)
    sample(ragged, rng, top_k=50, top_p=0.9)


CALLS = [
    layernorm,
    linear,
    gelu,
    dropout,
    cast,
    softmax,
    attention,
    cross_entropy,
    global_norm,
    adamw,
    embedding,
    batch_check,
    control,
    attention_decode,
    embedding_decode,
    sample,
]


def record(only: str = "", dtypes=tuple(FLOATS), capability=None):
    """Every distinct (kernel, numba argument types, grid, block) of `CALLS` whose names contain `only`, on an
    NVIDIA GPU of this compute capability, or, for None, on a GPU without one."""
    from numba import typeof

    found = {}
    for call in CALLS:
        if only in call.__name__:
            for dtype in dtypes:
                with recording(capability) as records:
                    call(FLOATS[dtype])
                for kernel, args, grid, block in records:
                    types = tuple(typeof(x) for x in args)
                    found[kernel, types] = (kernel, types, grid, block)
    return list(found.values())
