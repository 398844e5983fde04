import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, TARGET, recording, row_shape, tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops import layernorm as op
from nbtrain.ops.layernorm import BACKWARD_VECTORS, layernorm_backward, layernorm_forward
from tests import reference
from tests.helpers import assert_close, forms_asked, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
# Rows around one eight, one warp of eights and a block; more rows than the persistent grid holds at once.
_, ROWS = row_shape("layernorm_backward", 16, vectors=BACKWARD_VECTORS)
MANY = tuned("layernorm_backward")[1] * ROWS + 3
SHAPES = [(2 * MANY, 104), (1, 3), (3, 7), (2, 8), (2, 9), (3, 31), (2, 32), (2, 33), (3, 136), (MANY, 16)]
GPT2_SHAPES = [(2048, 768), (300, 1600), (64, 8192), (5, 767)]


def inputs(xp, dtype, N, C):
    x, residual, dy, dresidual, weight, bias = randn(xp, dtype, (N, C), (N, C), (N, C), (N, C), (C,), (C,))
    return x, residual, dy, dresidual, weight, bias


def check_forward_and_backward(xp, dtype, N, C, scale=1.0):
    x, residual, dy, dresidual, weight, bias = inputs(xp, dtype, N, C)
    for other in (None, residual):
        y, mean, rstd, total = layernorm_forward(x, weight, bias, residual=other)
        assert y.dtype == total.dtype == dtype and mean.dtype == rstd.dtype == np.float32
        if other is None:
            assert total is x
        else:
            assert (total == x + residual).all()  # rounded once
        assert_close(y, reference.layernorm(total, weight, bias), dtype, scale=scale)
        along = None if other is None else dresidual
        got = layernorm_backward(dy, total, weight, mean, rstd, dresidual=along)
        want = layernorm_vjp(dy, total, weight)
        if other is not None:
            want = (want[0] + reference.f64(dresidual), *want[1:])
        dx_sum = xp.full_like(weight, np.nan)
        again = layernorm_backward(dy, total, weight, mean, rstd, dresidual=along, dx_sum=dx_sum)
        assert all((a == b).all() for a, b in zip(again, got, strict=True))
        # Without a residual it is a sum of what adds up to little: of what, says the floor.
        floor = float(np.abs(want[0]).sum(0).max()) / 8
        assert_close(dx_sum, want[0].sum(0), dtype, name="dx_sum", scale=scale, floor=floor)
        for name, a, b in zip(("dx", "dweight", "dbias"), got, want, strict=True):
            assert a.dtype == dtype
            assert_close(a, b, dtype, name=name, scale=scale)


def layernorm_vjp(dy, x, weight, eps=1e-5):
    """The gradients in float64; `test_backward_matches_finite_differences` ties them to the forward
    reference."""
    dy, x, weight = map(reference.f64, (dy, x, weight))
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    xhat = (x - x.mean(-1, keepdims=True)) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,C", SHAPES)
def test_forward_and_backward_match_float64(xp, N, C, dtype):
    check_forward_and_backward(xp, dtype, N, C)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("N,C", [shape for shape in SHAPES if shape[1] % 8 == 0])
def test_rows_that_shared_memory_does_not_hold(kernel_xp, N, C, dtype, monkeypatch):
    asked = forms_asked(monkeypatch, op, "_backward_kernel", 0)
    check_forward_and_backward(kernel_xp, dtype, N, C)
    assert asked and not any(asked)


@pytest.mark.skipif(SIMULATED, reason="the simulator has one size of shared memory")
@pytest.mark.skipif(TARGET == "hip", reason="AMD's memory does not copy by itself")
@pytest.mark.parametrize(
    "capability,C,dtype,ahead",
    [
        ((9, 0), 768, np.float16, True),
        ((9, 0), 4608, np.float16, True),  # 45 KB
        ((9, 0), 4864, np.float16, False),  # 47.5: with block_sums' bytes, beyond 48
        ((9, 0), 768, np.float32, False),
        ((9, 0), 767, np.float16, False),
        ((8, 0), 768, np.float16, True),
        ((8, 6), 768, np.float16, True),
        (None, 768, np.float16, False),
    ],
)
def test_backward_reads_ahead_where_shared_memory_holds_the_next_rows(
    capability, C, dtype, ahead, monkeypatch
):
    asked = []
    monkeypatch.setattr(op, "_backward_kernel", lambda *key: asked.append(key) or (None, 1, 1))
    with recording(capability):
        x, weight, mean = np.empty((600, C), dtype), np.empty(C, dtype), np.empty(600, np.float32)
        layernorm_backward(x, x, weight, mean, mean)
    assert asked[0][-1] == ahead


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,C", GPT2_SHAPES)
def test_gpt2_sizes_match_float64(N, C, dtype):
    """dweight sums N fp32 terms in a tree of partial sums: sqrt(N) * eps fp32 stays below the limit."""
    import cupy

    check_forward_and_backward(cupy, dtype, N, C)


@pytest.mark.parametrize("N,C", [(3, 7), (2, 24)])
def test_backward_matches_finite_differences(xp, N, C):
    x, _, dy, _, weight, bias = inputs(xp, np.float32, N, C)
    _, mean, rstd, _ = layernorm_forward(x, weight, bias)
    got = layernorm_backward(dy, x, weight, mean, rstd)
    want = reference.vjp(reference.layernorm, (x, weight, bias), dy)
    for name, a, b, c in zip(
        ("dx", "dweight", "dbias"), got, want, layernorm_vjp(dy, x, weight), strict=True
    ):
        assert_close(a, b, np.float32, name=name)
        assert_close(c, b, np.float32, name=name)


def test_one_channel_gives_the_bias_and_almost_no_gradient(xp):
    """dx is zero in mathematics; what is left is one rounding of dy * weight, times rstd = 1 / sqrt(eps)."""
    x, _, dy, _, weight, bias = inputs(xp, np.float32, 3, 1)
    y, mean, rstd, _ = layernorm_forward(x, weight, bias)
    dx, _, _ = layernorm_backward(dy, x, weight, mean, rstd)
    assert (y == bias).all()
    assert float(abs(dx).max()) < 2.0**-22 * 1e5**0.5 * float(abs(dy * weight).max())


def test_forward_survives_a_large_mean(xp):
    x = xp.asarray(np.float32([[40000, 40001, 40002, 40003]]))
    y, *_ = layernorm_forward(x, xp.ones(4, np.float32), xp.zeros(4, np.float32))
    want = np.array([[-1.34163542, -0.44721181, 0.44721181, 1.34163542]])
    assert_close(y, want, np.float32)


def test_forward_survives_a_small_variance(xp):
    """The inputs 100 + i * 1e-3 are themselves good to 4e-6 of a spread of 1e-3."""
    x = xp.asarray((100 + np.arange(16) * 1e-3).astype(np.float32)[None])
    y, *_ = layernorm_forward(x, xp.ones(16, np.float32), xp.zeros(16, np.float32))
    assert abs(float(y[0, 0]) - -1.34153) < 5e-3


def test_a_constant_row_gives_the_bias_and_a_finite_gradient(xp):
    weight, bias, dy = randn(xp, np.float32, (256,), (256,), (1, 256))
    x = xp.full((1, 256), 1234.0, np.float32)
    y, mean, rstd, _ = layernorm_forward(x, weight, bias)
    dx, _, _ = layernorm_backward(dy, x, weight, mean, rstd)
    assert (y[0] == bias).all()
    assert np.isfinite(reference.f64(dx)).all()


def test_repeated_backward_is_bitwise_equal(xp):
    x, _, dy, _, weight, bias = inputs(xp, np.float32, MANY, 16)
    _, mean, rstd, _ = layernorm_forward(x, weight, bias)
    first, second = (layernorm_backward(dy, x, weight, mean, rstd) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_from_the_total_is_bitwise_equal(xp, dtype):
    x, residual, _, _, weight, bias = inputs(xp, dtype, 3, 24)
    y, mean, rstd, total = layernorm_forward(x, weight, bias, residual=residual)
    again, mean2, rstd2, _ = layernorm_forward(total, weight, bias)
    assert (again == y).all() and (mean2 == mean).all() and (rstd2 == rstd).all()


def test_dx_may_be_written_over_dresidual(xp):
    x, _, dy, dresidual, weight, bias = inputs(xp, np.float32, 5, 40)
    _, mean, rstd, _ = layernorm_forward(x, weight, bias)
    want, dweight, dbias = layernorm_backward(dy, x, weight, mean, rstd, dresidual=dresidual)
    got = dresidual.copy()
    layernorm_backward(dy, x, weight, mean, rstd, dresidual=got, out=(got, dweight, dbias))
    assert (got == want).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    x, _, dy, _, weight, bias = inputs(np, np.float32, 777, 33)
    _, mean, rstd, _ = layernorm_forward(x, weight, bias)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(layernorm_backward(dy, x, weight, mean, rstd))
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(results[0], results[-1], strict=True))


def test_rejects_three_dimensional_x(xp):
    with pytest.raises(InvalidValue, match=r"x \(N, C\).*x float32 \(2, 3, 4\).*reshape"):
        layernorm_forward(xp.zeros((2, 3, 4), np.float32), xp.zeros(4, np.float32), xp.zeros(4, np.float32))


def test_rejects_mixed_and_integer_dtypes(xp):
    x, _, _, _, weight, bias = inputs(xp, np.float32, 3, 4)
    with pytest.raises(InvalidType, match="weight float16"):
        layernorm_forward(x, weight.astype(np.float16), bias)
    with pytest.raises(InvalidType, match="x int32"):
        layernorm_forward(x.astype(np.int32), weight, bias)


def test_a_row_too_long_for_the_gpu_is_refused():
    from nbtrain.device import recording

    x, w, m = np.empty((1, 12_288), np.float32), np.empty(12_288, np.float32), np.empty(1, np.float32)
    with recording() as launches, pytest.raises(InvalidValue, match="at most 12000 channels.*12288"):
        layernorm_backward(x, x, w, m, m)
    assert not launches


def test_rejects_strided_x(xp):
    x, _, _, _, weight, bias = inputs(xp, np.float32, 4, 4)
    with pytest.raises(InvalidValue, match="C-contiguous"):
        layernorm_forward(x.T, weight, bias)


@pytest.mark.gpu
def test_rejects_arrays_of_two_devices():
    import cupy

    x, _, _, _, weight, bias = inputs(np, np.float32, 3, 4)
    with pytest.raises(InvalidType, match="one device"):
        layernorm_forward(cupy.asarray(x), weight, bias)
