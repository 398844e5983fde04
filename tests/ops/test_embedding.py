import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, row_shape
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops import embedding as op
from nbtrain.ops.embedding import SEGMENT, embedding_backward, embedding_forward
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
_, ROWS = row_shape("embedding_forward", 16, vectors=1)
# (B, T, V, P, C): around one eight, ragged rows, rows around the forward's block, two blocks over the columns
SHAPES = [
    (1, 1, 1, 1, 1), (2, 3, 5, 3, 7), (3, 2, 4, 4, 8), (1, ROWS + 1, 9, ROWS + 1, 16), (5, 4, 7, 6, 33),
    (2, 20, 6, 20, 80),
]  # fmt: skip


def inputs(xp, dtype, B, T, V, P, C, seed=0):
    wte, wpe, dx = randn(xp, dtype, (V, C), (P, C), (B, T, C), seed=seed)
    return skewed(xp, B, T, V, seed), wte, wpe, dx


def skewed(xp, B, T, V, seed=0):
    """Tokens that are frequent and rare, as in a text; some do not occur."""
    u = np.random.default_rng(seed).random((B, T))
    return xp.asarray((V * u**3).astype(np.int32))


def stable_order(xp, tokens):
    return xp.asarray(reference.host(tokens).ravel().argsort(kind="stable").astype(np.int32))


def embedding_vjp(dx, tokens, V, P):
    """(dwte, dwpe) in float64; `test_backward_matches_finite_differences` ties it to the reference."""
    dx, tokens = reference.f64(dx), reference.host(tokens)
    dwte, dwpe = np.zeros((V, dx.shape[-1])), np.zeros((P, dx.shape[-1]))
    np.add.at(dwte, tokens, dx)
    dwpe[: dx.shape[1]] = dx.sum(0)
    return dwte, dwpe


def backward(xp, dx, tokens, V, P, dtype, accumulate=False):
    """Gradients on arrays that hold NaN before."""
    C = dx.shape[-1]
    dwte, dwpe = xp.empty((V, C), dtype), xp.empty((P, C), dtype)
    dwte[...] = dwpe[...] = np.nan
    embedding_backward(dx, tokens, stable_order(xp, tokens), dwte, dwpe, accumulate=accumulate)
    return dwte, dwpe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,T,V,P,C", SHAPES)
def test_forward_and_backward_match_float64(xp, B, T, V, P, C, dtype):
    tokens, wte, wpe, dx = inputs(xp, dtype, B, T, V, P, C)
    x = xp.empty_like(dx)
    x[...] = np.nan
    assert embedding_forward(tokens, wte, wpe, out=x) is x
    assert (x == embedding_forward(tokens, wte, wpe)).all()
    assert_close(x, reference.embedding(tokens, wte, wpe), dtype, name="x")
    want = embedding_vjp(dx, tokens, V, P)
    # A token's sum of R rows is off by about sqrt(R) * eps of one row, and most rows of dwte are zero.
    limit = max(1, np.bincount(reference.host(tokens).ravel()).max() ** 0.5)
    for name, a, b in zip(("dwte", "dwpe"), backward(xp, dx, tokens, V, P, dtype), want, strict=True):
        assert_close(a, b, dtype, name=name, scale=limit if dtype == np.float32 else 1)
    assert not want[1][T:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B,T,V,P,C",
    [(8, 1024, 50304, 1024, 768), (2, 1000, 50257, 1024, 1600), (3, 65, 100, 70, 767), (5, 7, 40, 9, 9000)],
)
def test_gpt2_sizes_match_float64(B, T, V, P, C, dtype):
    import cupy

    test_forward_and_backward_match_float64(cupy, B, T, V, P, C, dtype)


def test_backward_matches_finite_differences(xp):
    tokens, wte, wpe, dx = inputs(xp, np.float32, 3, 4, 5, 6, 3)
    want = reference.vjp(lambda wte, wpe: reference.embedding(tokens, wte, wpe), (wte, wpe), dx)
    got = backward(xp, dx, tokens, 5, 6, np.float32)
    for name, a, b, c in zip(("dwte", "dwpe"), got, want, embedding_vjp(dx, tokens, 5, 6), strict=True):
        assert_close(a, b, np.float32, name=name)
        assert_close(c, b, np.float32, name=name)


RUNS = {  # lengths of the runs of equal tokens along the order
    "one short": [SEGMENT - 1],
    "one whole": [SEGMENT],
    "one over": [SEGMENT + 1],
    "borders on runs": [SEGMENT, SEGMENT, 2 * SEGMENT, 3],
    "over one border": [SEGMENT - 2, 5, SEGMENT - 1, 2],
    "over many borders": [3, 5 * SEGMENT, 4],
    "all of it": [9 * SEGMENT + 1],  # more parts than threads of a block in the simulator
    "each once": [1] * (2 * SEGMENT + 3),
    "from border to border": [SEGMENT // 2, SEGMENT // 2 + SEGMENT, 7, SEGMENT - 7 + 1],
}


@pytest.mark.parametrize("lengths", RUNS.values(), ids=RUNS.keys())
def test_runs_at_segment_borders_match_float64(xp, lengths):
    C = 9
    tokens = np.repeat(2 * np.arange(len(lengths)), lengths).astype(np.int32)
    tokens = xp.asarray(np.random.default_rng(0).permutation(tokens)[None])
    (dx,) = randn(xp, np.float32, (*tokens.shape, C))
    V, P = 2 * len(lengths), tokens.size
    want = embedding_vjp(dx, tokens, V, P)
    for name, a, b in zip(("dwte", "dwpe"), backward(xp, dx, tokens, V, P, np.float32), want, strict=True):
        assert_close(a, b, np.float32, name=name)


@pytest.mark.gpu
def test_a_run_of_more_parts_than_a_block_has_threads_matches_float64():
    import cupy

    tokens = cupy.zeros((1, 150 * SEGMENT), np.int32)
    (dx,) = randn(cupy, np.float32, (1, 150 * SEGMENT, 768))
    dwte, _ = backward(cupy, dx, tokens, 2, 150 * SEGMENT, np.float32)
    assert_close(dwte, embedding_vjp(dx, tokens, 2, 150 * SEGMENT)[0], np.float32)


def test_a_row_longer_than_a_block_is_several_blocks_work(kernel_xp, monkeypatch):
    tokens, wte, wpe, _ = inputs(kernel_xp, np.float32, 5, 3, 7, 4, 73)
    monkeypatch.setattr(op, "row_shape", lambda name, C, vectors: (4, 2))
    op._forward_kernel.cache_clear()
    try:
        x = embedding_forward(tokens, wte, wpe)
    finally:
        op._forward_kernel.cache_clear()
    assert (reference.host(x) == reference.embedding(tokens, wte, wpe).astype(np.float32)).all()


def test_more_sequences_than_a_grid_has_are_refused(kernel_xp):
    xp = kernel_xp
    tokens = xp.zeros((4 * 65_535 + 1, 1), np.int32)
    with pytest.raises(InvalidValue, match="at most 262,140 sequences on a GPU; got 262,141"):
        embedding_forward(tokens, xp.zeros((1, 8), np.float32), xp.zeros((1, 8), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulates_into_fp32_and_leaves_other_rows(xp, dtype):
    """The tied vocabulary product has written dwte; 16-bit gradients are added to it in fp32."""
    tokens, _, wpe, dx = inputs(xp, dtype, 3, 30, 50, 31, 24)
    (before,) = randn(xp, np.float32, (50, 24), seed=1)
    dwte, dwpe = before.copy(), xp.empty_like(wpe)
    embedding_backward(dx, tokens, stable_order(xp, tokens), dwte, dwpe)
    added, want = embedding_vjp(dx, tokens, 50, 31)
    assert_close(dwte, reference.f64(before) + added, np.float32, name="dwte")
    assert_close(dwpe, want, dtype, name="dwpe")
    unused = np.setdiff1d(np.arange(50), reference.host(tokens))
    assert len(unused) and (dwte[unused] == before[unused]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_backward_is_bitwise_equal(xp, dtype):
    tokens, _, _, dx = inputs(xp, dtype, 3, 2 * SEGMENT, 5, 2 * SEGMENT, 9)
    first, second = (backward(xp, dx, tokens, 5, 2 * SEGMENT, dtype) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    tokens, _, _, dx = inputs(np, np.float32, 6, 50, 20, 50, 100)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(backward(np, dx, tokens, 20, 50, np.float32))
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(results[0], results[-1], strict=True))


@pytest.mark.parametrize("xp_name", [pytest.param("cupy", marks=pytest.mark.gpu), "simulator"])
def test_kernels_clamp_bad_ids(xp_name, monkeypatch):
    if xp_name == "simulator" and not SIMULATED:
        pytest.skip("the CPU twin's ids are checked on the host; its kernels run in the simulator")
    xp = np if xp_name == "simulator" else pytest.importorskip("cupy")
    monkeypatch.setattr(op, "expect_ids", lambda *args: None)
    tokens = xp.asarray(np.int32([[-(2**31), -1, 0, 4, 5, 2**31 - 1]]))
    wte, wpe, dx = randn(xp, np.float32, (5, 8), (6, 8), (1, 6, 8))
    clamped = np.clip(reference.host(tokens), 0, 4)
    assert_close(embedding_forward(tokens, wte, wpe), reference.embedding(clamped, wte, wpe), np.float32)
    dwte, _ = backward(xp, dx, tokens, 5, 6, np.float32)
    assert_close(dwte, embedding_vjp(dx, clamped, 5, 6)[0], np.float32)


@pytest.mark.parametrize("bad", [65_000, -1])
def test_rejects_host_ids_outside_the_vocabulary(bad):
    tokens = np.int32([[0, 1, 2], [3, bad, 4]])
    wte, wpe, dx = randn(np, np.float32, (5, 4), (3, 4), (2, 3, 4))
    with pytest.raises(InvalidValue, match=rf"tokens in 0\.\.4; got tokens\[1, 1\] = {bad}"):
        embedding_forward(tokens, wte, wpe)
    with pytest.raises(InvalidValue, match=rf"tokens\[1, 1\] = {bad}"):
        embedding_backward(dx, tokens, stable_order(np, tokens), wte, wpe)


def test_rejects_more_positions_than_wpe_has(xp):
    tokens, wte, wpe, dx = inputs(xp, np.float32, 2, 4, 5, 4, 3)
    with pytest.raises(InvalidValue, match=r"at most 3 positions.*\(2, 4\)"):
        embedding_forward(tokens, wte, wpe[:3])
    with pytest.raises(InvalidValue, match=r"at most 3 positions"):
        embedding_backward(dx, tokens, stable_order(xp, tokens), wte, wpe[:3])


def test_rejects_wrong_shapes_and_dtypes(xp):
    tokens, wte, wpe, dx = inputs(xp, np.float32, 2, 4, 5, 4, 3)
    order = stable_order(xp, tokens)
    with pytest.raises(InvalidValue, match=r"tokens\[None\]"):
        embedding_forward(tokens[0], wte, wpe)
    with pytest.raises(InvalidType, match="tokens int64"):
        embedding_forward(tokens.astype(np.int64), wte, wpe)
    with pytest.raises(InvalidType, match="wpe float16"):
        embedding_forward(tokens, wte, wpe.astype(np.float16))
    with pytest.raises(InvalidValue, match=r"order \(8,\).*got \(7,\).*argsort"):
        embedding_backward(dx, tokens, order[:7], wte, wpe)
    with pytest.raises(InvalidType, match="order int64"):
        embedding_backward(dx, tokens, order.astype(np.int64), wte, wpe)


@pytest.mark.parametrize("xp_name", [pytest.param("cupy", marks=pytest.mark.gpu), "numpy"])
def test_only_the_cpu_does_without_an_order(xp_name):
    xp = np if xp_name == "numpy" else pytest.importorskip("cupy")
    tokens, wte, wpe, dx = inputs(xp, np.float32, 2, 4, 5, 4, 3)
    want = backward(xp, dx, tokens, 5, 4, np.float32)
    if xp is np and not SIMULATED:
        embedding_backward(dx, tokens, None, wte, wpe, accumulate=False)
        assert (wte == want[0]).all() and (wpe == want[1]).all()
    else:
        with pytest.raises(InvalidValue, match="order of the tokens on a GPU; got None.*argsort"):
            embedding_backward(dx, tokens, None, wte, wpe)
