import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.attention import attention_forward
from nbtrain.ops.attention_decode import attention_decode
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
THREADS, _ = tuned("attention_decode")
# (B, H, T, D): heads of less than an eight, of whole ones, ragged; caches of several rounds; every length
SHAPES = [(2, 1, 1, 4), (3, 2, 5, 8), (2, 2, 2 * THREADS + 3, 16), (3, 1, 33, 13), (1, 3, 20, 64)]


def inputs(xp, dtype, B, H, T, D):
    """The first sequence has no token, the last as many as fit; what lies behind is nan and must not
    matter."""
    qkv, k, v = randn(xp, dtype, (B, 3 * H * D), (B, H, T, D), (B, H, T, D))
    lengths = np.linspace(0 if B > 1 else T - 1, T - 1, B).astype(np.int32)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    return qkv, k, v, xp.asarray(lengths)


def expected(qkv, k, v, lengths, sm_scale=None):
    """(y, k_cache, v_cache) in float64."""
    qkv, k, v = map(reference.f64, (qkv, k, v))
    B, H, _, D = k.shape
    q, new_k, new_v = qkv.reshape(B, 3, H, D).transpose(1, 0, 2, 3)
    y = np.empty((B, H, D))
    for b, n in enumerate(reference.host(lengths)):
        k[b, :, n], v[b, :, n] = new_k[b], new_v[b]
        scores = np.einsum("hd,hid->hi", q[b], k[b, :, : n + 1])
        p = reference.softmax(scores, D**-0.5 if sm_scale is None else sm_scale)
        y[b] = np.einsum("hi,hid->hd", p, v[b, :, : n + 1])
    return y.reshape(B, H * D), k, v


def check(xp, dtype, shape, **options):
    qkv, k, v, lengths = inputs(xp, dtype, *shape)
    want, want_k, want_v = expected(qkv, k, v, lengths, **options)
    out = xp.full(want.shape, np.nan, dtype)
    assert attention_decode(qkv, k, v, lengths, out=out, **options) is out
    assert_close(out, want, dtype)
    for got, wanted in ((k, want_k), (v, want_v)):
        np.testing.assert_array_equal(reference.f64(got), wanted)  # nan where nan was


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_new_token_attends_to_the_cache_and_itself(xp, shape, dtype):
    check(xp, dtype, shape)


def test_the_scale_is_applied(xp):
    check(xp, np.float32, (2, 2, 9, 8), sm_scale=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 12, 1024, 64), (8, 12, 320, 64), (64, 12, 1024, 64), (3, 25, 777, 63), (2, 8, 1025, 128),
              (2, 4, 600, 80), (1, 2, 300, 256)]
)  # fmt: skip
def test_gpt2_sizes_match_float64(shape, dtype):
    import cupy

    check(cupy, dtype, shape)


def test_token_after_token_equals_attention_over_all_of_them(xp):
    B, T, H, D = (1, 4, 1, 8) if SIMULATED else (2, 11, 2, 8)
    (qkv,) = randn(xp, np.float32, (B, T, 3 * H * D))
    want, _ = attention_forward(qkv, H)
    k, v = (xp.full((B, H, T, D), np.nan, np.float32) for _ in range(2))
    for t in range(T):
        got = attention_decode(xp.ascontiguousarray(qkv[:, t]), k, v, xp.full(B, t, np.int32))
        assert_close(got, want[:, t], np.float32, name=f"y of token {t}")


def test_large_scores_stay_finite(xp):
    qkv, k, v, lengths = inputs(xp, np.float32, 2, 1, 30, 8)
    qkv *= np.float32(1e3)
    want, *_ = expected(qkv, k, v, lengths)
    assert_close(attention_decode(qkv, k, v, lengths), want, np.float32, scale=8)  # exp of scores near 1e4


def test_repeated_calls_are_bitwise_equal(xp):
    qkv, k, v, lengths = inputs(xp, np.float32, 3, 2, 2 * THREADS + 5 if SIMULATED else 900, 16)
    first, second = (attention_decode(qkv, k, v, lengths) for _ in range(2))
    assert (first == second).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    qkv, k, v, lengths = inputs(np, np.float32, 5, 3, 50, 16)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(attention_decode(qkv, k, v, lengths))
    finally:
        numba.set_num_threads(threads)
    assert (results[0] == results[-1]).all()


def test_rejects_what_does_not_fit(xp):
    qkv, k, v, lengths = inputs(xp, np.float32, 2, 2, 4, 8)
    with pytest.raises(InvalidValue, match=r"qkv \(B, 48\).*got qkv float32 \(2, 40\)"):
        attention_decode(xp.ascontiguousarray(qkv[:, :40]), k, v, lengths)
    with pytest.raises(InvalidValue, match=r"v_cache float32 \(2, 2, 3, 8\)"):
        attention_decode(qkv, k, xp.ascontiguousarray(v[:, :, :3]), lengths)
    with pytest.raises(InvalidType, match="lengths int64"):
        attention_decode(qkv, k, v, lengths.astype(np.int64))
    with pytest.raises(InvalidType, match="v_cache float16"):
        attention_decode(qkv, k, v.astype(np.float16), lengths)


def test_a_full_cache_is_refused_on_the_host():
    qkv, k, v, lengths = inputs(np, np.float32, 2, 2, 4, 8)
    lengths[1] = 4
    with pytest.raises(InvalidValue, match=r"lengths in 0\.\.3; got lengths\[1\] = 4"):
        attention_decode(qkv, k, v, lengths)


def test_heads_too_wide_for_a_block_are_refused_on_the_gpu():
    from nbtrain.device import recording

    D = 8 * THREADS + 8
    qkv, k = np.empty((1, 3 * D), np.float32), np.empty((1, 1, 2, D), np.float32)
    with recording() as launches, pytest.raises(InvalidValue, match=f"at most {8 * THREADS} columns"):
        attention_decode(qkv, k, k.copy(), np.zeros(1, np.int32))
    assert not launches
