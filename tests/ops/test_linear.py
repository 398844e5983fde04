import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, row_shape
from nbtrain.device.reduce import column_block, column_grid
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.ops.linear import (
    linear_backward,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
    matmul,
)
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
# Columns around one eight and a block of eights; rows around a block and beyond the whole grid of dbias.
X, Y = column_block("sum_rows")
_, R = row_shape("linear_bias", 16, vectors=1)
WIDE = 8 * X
MANY = column_grid("sum_rows", 2**20, 16)[1] * Y * 4 + 3
SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (2, 7, 8),
    (4 * R + 1, 8, 9),
    (Y - 1, 3, WIDE),
    (Y + 1, 2, WIDE + 1),
    (MANY, 4, 16),
]
# Cut into several tasks by rows of y, by columns of y, by rows of dweight, by columns of dweight; one row.
CPU_SHAPES = [(515, 9, 130), (40, 17, 700), (300, 203, 33), (1, 203, 700)]
GPT2_SHAPES = [(2048, 768, 2304), (515, 3072, 768), (1000, 767, 1031), (64, 1600, 6400)]


def inputs(xp, dtype, N, K, M):
    return randn(xp, dtype, (N, K), (K, M), (M,), (N, M))


def poison(xp, dtype, *shape):
    return xp.full(shape, np.nan, dtype)


def check_forward_and_backward(xp, dtype, N, K, M):
    """An fp32 sum of n terms, one after the other, is off by about sqrt(n) * eps / 3 of its rms; among
    millions of sums the worst is five times that. So the limit of 16 eps grows with n from 64 on."""
    limits = [max(1, n**0.5 / 8) for n in (K, M, N)] if dtype == np.float32 else [1, 1, 1]
    limits = dict(zip(("y", "dx", "dweight"), limits, strict=True), dbias=limits[2])
    x, weight, bias, dy = inputs(xp, dtype, N, K, M)
    x64, weight64, dy64 = map(reference.f64, (x, weight, dy))
    for b in (None, bias):
        y = linear_forward(x, weight, b, out=poison(xp, dtype, N, M))
        assert y.dtype == dtype
        assert_close(y, reference.linear(x, weight, b), dtype, scale=limits["y"])
    out = poison(xp, dtype, N, K), poison(xp, dtype, K, M), poison(xp, dtype, M)
    got = linear_backward(dy, x, weight, out=out)
    want = dy64 @ weight64.T, x64.T @ dy64, dy64.sum(0)
    for name, a, b in zip(("dx", "dweight", "dbias"), got, want, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, dtype, name=name, scale=limits[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K,M", SHAPES)
def test_forward_and_backward_match_float64(xp, N, K, M, dtype):
    check_forward_and_backward(xp, dtype, N, K, M)


@pytest.mark.skipif(SIMULATED, reason="tasks are the CPU twin's")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K,M", CPU_SHAPES)
def test_every_cut_into_tasks_matches_float64(N, K, M, dtype):
    check_forward_and_backward(np, dtype, N, K, M)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K,M", GPT2_SHAPES)
def test_gpt2_sizes_match_float64(N, K, M, dtype):
    import cupy

    check_forward_and_backward(cupy, dtype, N, K, M)


@pytest.mark.parametrize("N,K,M", [(3, 4, 5), (1, 9, 2)])
def test_backward_matches_finite_differences(xp, N, K, M):
    x, weight, bias, dy = inputs(xp, np.float32, N, K, M)
    got = linear_backward(dy, x, weight)
    want = reference.vjp(reference.linear, (x, weight, bias), dy)
    for name, a, b in zip(("dx", "dweight", "dbias"), got, want, strict=True):
        assert_close(a, b, np.float32, name=name)


def test_each_gradient_can_be_had_alone(xp):
    x, weight, _, dy = inputs(xp, np.float32, 5, 6, 24)
    dx, dweight, dbias = linear_backward(dy, x, weight)
    assert (linear_backward_input(dy, weight) == dx).all()
    alone = linear_backward_weight(dy, x)
    assert (alone[0] == dweight).all() and (alone[1] == dbias).all()
    only = linear_backward_weight(dy, x, bias=False)
    assert (only[0] == dweight).all() and only[1] is None
    no_dx = linear_backward(dy, x, weight, bias=False, need_dx=False)
    assert no_dx[0] is None and no_dx[2] is None and (no_dx[1] == dweight).all()


def test_dx_may_be_written_over_x(xp):
    x, weight, _, dy = inputs(xp, np.float32, 5, 6, 7)
    want = linear_backward(dy, x, weight)
    got = linear_backward(dy, x, weight, out=(x, None, None))
    assert got[0] is x
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,K,N", [(3, 5, 7), (70, 3, 131), (131, 66, 2), (1, 9, 5), (6, 1, 3), (4, 2, 1)])
def test_matmul_takes_transposed_operands_and_slices(xp, M, K, N, dtype):
    a, b, a_t, b_t, wide = randn(xp, dtype, (M, K), (K, N), (K, M), (N, K), (M + 2, K + 3))
    views = [(a, b), (a_t.T, b), (a, b_t.T), (a_t.T, b_t.T), (wide[1:-1, 2:-1], b)]
    for u, v in views:
        out = poison(xp, dtype, M, N + 2)[:, 1:-1]
        assert matmul(u, v, out=out) is out
        assert_close(out, reference.f64(u) @ reference.f64(v), dtype)
        if xp is np:  # a BLAS on a GPU may take another algorithm for another row stride
            assert (matmul(u, v) == out).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_adds_beta_times_out(xp, dtype):
    """As the gradient of the embedding grows over chunks of logits: fp32, whatever the logits are."""
    dlogits, h, before = randn(xp, dtype, (33, 17), (33, 24), (17, 24))
    before = before.astype(np.float32)
    out = matmul(dlogits.T, h, out=before.copy(), beta=0.5)
    want = reference.f64(dlogits).T @ reference.f64(h) + 0.5 * reference.f64(before)
    assert_close(out, want, np.float32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_row_is_added_to_beta_times_out(xp, transposed, beta):
    """With beta = 0 what out holds is not read."""
    a, b, b_t, before = randn(xp, np.float32, (1, 17), (17, 24), (24, 17), (1, 24))
    b = b_t.T if transposed else b
    want = reference.f64(a) @ reference.f64(b) + beta * reference.f64(before)
    out = before.copy() if beta else xp.full((1, 24), np.nan, np.float32)
    assert_close(matmul(a, b, out=out, beta=beta), want, np.float32)


def test_repeated_backward_is_bitwise_equal(xp):
    x, weight, _, dy = inputs(xp, np.float32, MANY, 4, 16)
    first, second = (linear_backward(dy, x, weight) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    x, weight, bias, dy = inputs(np, np.float32, 1111, 33, 200)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append([linear_forward(x, weight, bias), *linear_backward(dy, x, weight)])
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(results[0], results[-1], strict=True))


def test_rejects_shapes_that_do_not_fit(xp):
    x, weight, bias, dy = inputs(xp, np.float32, 3, 4, 5)
    with pytest.raises(InvalidValue, match=r"x \(N, K\), weight \(K, M\).*weight float32 \(5, 4\)"):
        linear_forward(x, weight.T.copy(), bias)
    with pytest.raises(InvalidValue, match=r"linear's out.*y float32 \(5, 3\)"):
        linear_forward(x, weight, bias, out=dy.T.copy())
    with pytest.raises(InvalidValue, match=r"x float32 \(1, 3, 4\).*reshape"):
        linear_forward(x[None], weight, bias)
    with pytest.raises(InvalidValue, match=r"dy float32 \(3, 4\)"):
        linear_backward_weight(x, dy[:2])
    with pytest.raises(InvalidValue, match=r"matmul.*a float32 \(3, 4\), b float32 \(3, 5\)"):
        matmul(x, dy)
    with pytest.raises(InvalidValue, match=r"out float32 \(3, 4\)"):
        matmul(x, weight, out=xp.empty_like(x))


def test_a_wrong_output_is_refused_before_anything_is_written(xp):
    x, weight, _, dy = inputs(xp, np.float32, 3, 4, 5)
    dweight = poison(xp, np.float32, 4, 5)
    with pytest.raises(InvalidValue, match=r"dx float32 \(3, 5\)"):
        linear_backward(dy, x, weight, out=(xp.empty_like(dy), dweight, None))
    assert np.isnan(reference.f64(dweight)).all()


def test_rejects_dtypes_that_do_not_fit(xp):
    x, weight, bias, _ = inputs(xp, np.float32, 3, 4, 5)
    with pytest.raises(InvalidType, match="weight float16"):
        linear_forward(x, weight.astype(np.float16), bias)
    with pytest.raises(InvalidType, match="b float16"):
        matmul(x, weight.astype(np.float16))
    with pytest.raises(InvalidType, match="out float16"):
        matmul(x, weight, out=xp.empty((3, 5), np.float16))
    with pytest.raises(InvalidType, match="got list"):
        matmul([[0.0]], weight)


def test_rejects_views_without_a_contiguous_axis(xp):
    x, weight, _, _ = inputs(xp, np.float32, 4, 6, 8)
    with pytest.raises(InvalidValue, match="one axis of a contiguous.*strides"):
        matmul(x[::2, ::2], weight[:3])
    with pytest.raises(InvalidValue, match="last axis of out contiguous"):
        matmul(x, weight, out=xp.empty((8, 4), np.float32).T)
    with pytest.raises(InvalidValue, match="one axis of b contiguous"):
        matmul(x, xp.broadcast_to(weight[:1], (6, 8)))
    with pytest.raises(InvalidValue, match="C-contiguous"):
        linear_forward(x.T, weight[:4])


def test_matmul_with_beta_needs_an_array_to_add_to(xp):
    x, weight, _, _ = inputs(xp, np.float32, 4, 6, 8)
    with pytest.raises(InvalidValue, match="beta = 1.0 adds to out"):
        matmul(x, weight, beta=1.0)


def test_accumulation_is_fp32_or_fp16(xp):
    x, weight, _, _ = inputs(xp, np.float16, 4, 6, 8)
    with pytest.raises(InvalidValue, match='"fp32" or "fp16"; got \'bf16\''):
        linear_forward(x, weight, accumulate="bf16")


@pytest.mark.skipif(SIMULATED, reason="the CPU twin refuses")
def test_the_cpu_refuses_fp16_accumulation():
    x, weight, _, _ = inputs(np, np.float16, 4, 6, 8)
    with pytest.raises(Unavailable, match="summed in fp32"):
        linear_forward(x, weight, accumulate="fp16")


@pytest.mark.gpu
def test_fp16_accumulation_is_for_fp16_and_loses_bits():
    """2048 + 1 is not an fp16 number: an fp16 sum of ones stalls or rounds where an fp32 sum does not."""
    import cupy

    ones = cupy.ones((64, 4096), np.float16)
    exact = matmul(ones, ones.T)
    assert (exact == 4096).all()
    half = linear_forward(ones, cupy.ascontiguousarray(ones.T), accumulate="fp16")
    assert_close(half, reference.f64(exact), np.float16, scale=64)  # log2(4096) bits of 11 may go
    with pytest.raises(InvalidType, match="fp16 arrays into fp16; got float32"):
        matmul(ones.astype(np.float32), ones.T.astype(np.float32), accumulate="fp16")


@pytest.mark.gpu
def test_rejects_arrays_of_two_devices():
    import cupy

    x, weight, _, _ = inputs(np, np.float32, 3, 4, 5)
    with pytest.raises(InvalidType, match="one device"):
        matmul(cupy.asarray(x), weight)
