import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, row_shape
from nbtrain.device.reduce import column_block, column_grid
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.gelu import gelu_backward, gelu_forward
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
# Columns around one eight and a block of eights; rows around a block and beyond the whole grid.
X, Y = column_block("gelu_backward")
_, R = row_shape("gelu_forward", 16, vectors=1)
WIDE = 8 * X
MANY = column_grid("gelu_backward", 2**20, 16)[1] * Y + 3
SHAPES = [(1, 1), (3, 7), (2 * R + 1, 8), (Y - 1, 9), (Y, WIDE), (Y + 1, WIDE + 1), (MANY, 16)]
GPT2_SHAPES = [(2048, 3072), (300, 6400), (65, 32768), (5, 3071)]


def inputs(xp, dtype, N, C):
    x, bias, dy = randn(xp, dtype, (N, C), (C,), (N, C))
    return (2 * x).astype(dtype), bias, dy


def key(xp, *words):
    return xp.asarray(np.array(words or (11, 22, 33), np.uint32))


def slope(x, bias):
    """d gelu(x + bias) in float64; `test_backward_matches_finite_differences` ties it to the reference."""
    u = reference.f64(x) if bias is None else reference.f64(x) + reference.f64(bias)
    k = np.sqrt(2 / np.pi)
    t = np.tanh(k * (u + 0.044715 * u**3))
    return 0.5 * (1 + t) + 0.5 * u * (1 - t**2) * k * (1 + 3 * 0.044715 * u**2)


def check_forward_and_backward(xp, dtype, N, C):
    """The slope is good to about 5 eps of fp32; dy, up to 5 times its rms, multiplies that: gradients in fp32
    get four times the usual limit."""
    scale = 4 if dtype == np.float32 else 1
    x, bias, dy = inputs(xp, dtype, N, C)
    for b in (None, bias):
        y = gelu_forward(x, b, out=xp.full_like(x, np.nan))
        assert y.dtype == dtype
        assert_close(y, reference.gelu(x, b), dtype)
        again = xp.full_like(x, np.nan)
        out = xp.full_like(x, np.nan), xp.full_like(bias, np.nan) if b is not None else None
        dx, dbias = gelu_backward(dy, x, b, recompute_out=again, out=out)
        assert (again == y).all()
        want = reference.f64(dy) * slope(x, b)
        assert_close(dx, want, dtype, name="dx", scale=scale)
        if b is None:
            assert dbias is None
        else:
            assert_close(dbias, want.sum(0), dtype, name="dbias", scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,C", SHAPES)
def test_forward_and_backward_match_float64(xp, N, C, dtype):
    check_forward_and_backward(xp, dtype, N, C)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,C", GPT2_SHAPES)
def test_gpt2_sizes_match_float64(N, C, dtype):
    import cupy

    check_forward_and_backward(cupy, dtype, N, C)


@pytest.mark.parametrize("N,C", [(3, 7), (2, 16)])
def test_backward_matches_finite_differences(xp, N, C):
    x, bias, dy = inputs(xp, np.float32, N, C)
    got = gelu_backward(dy, x, bias)
    for name, a, b in zip(("dx", "dbias"), got, reference.vjp(reference.gelu, (x, bias), dy), strict=True):
        assert_close(a, b, np.float32, name=name)
    assert_close(slope(x, bias) * reference.f64(dy), got[0], np.float32)


def test_large_fp16_inputs_have_slope_one(xp):
    x = xp.asarray(np.array([[256, 65504, -256, -65504]], np.float16))
    dx, dbias = gelu_backward(xp.ones_like(x), x, xp.zeros(4, np.float16))
    assert dx.tolist() == [[1, 1, 0, 0]] and dbias.tolist() == [1, 1, 0, 0]
    assert gelu_forward(x).tolist() == [[256, 65504, 0, 0]]


def test_no_finite_input_overflows(xp):
    values = [13.24, -13.24, 100.0, -100.0, 1e15, -1e15, 0.0]
    x = xp.asarray(np.array([values], np.float32))
    assert_close(gelu_forward(x), np.maximum(reference.f64(x), 0), np.float32)
    dx, _ = gelu_backward(xp.ones_like(x), x)
    assert_close(dx, np.array([[1, 0, 1, 0, 1, 0, 0.5]]), np.float32)


@pytest.mark.skipif(SIMULATED, reason="NumPy warns where u**2 overflows")
def test_the_largest_inputs_stay_finite(xp):
    x = xp.asarray(np.array([[3e38, -3e38] * 8], np.float32))
    assert_close(gelu_forward(x), np.maximum(reference.f64(x), 0), np.float32)
    dx, _ = gelu_backward(xp.ones_like(x), x)
    assert_close(dx, np.array([[1.0, 0.0] * 8]), np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(xp, dtype):
    x = xp.full((2, 16), np.nan, dtype)
    assert np.isnan(reference.f64(gelu_forward(x))).all()
    dx, _ = gelu_backward(xp.ones_like(x), x)
    assert np.isnan(reference.f64(dx)).all()


def test_in_place_gives_the_same_bits(xp):
    x, bias, dy = inputs(xp, np.float32, 5, 24)
    y = gelu_forward(x, bias)
    want, dbias = gelu_backward(dy, x, bias)
    dx, a = dy.copy(), x.copy()
    gelu_backward(dx, a, bias, recompute_out=a, out=(dx, dbias))
    assert (dx == want).all() and (a == y).all()
    a = x.copy()
    assert gelu_forward(a, bias, out=a) is a
    assert (a == y).all()


def test_repeated_backward_is_bitwise_equal(xp):
    x, bias, dy = inputs(xp, np.float32, MANY, 16)
    first, second = (gelu_backward(dy, x, bias) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C,first", [(16, 0), (9, 0), (16, 3), (20, 4)])
def test_dropout_scales_what_it_keeps_and_its_gradient(xp, dtype, C, first):
    x, bias, dy = inputs(xp, dtype, 6, C)
    options = dict(dropout=0.3, rng=key(xp), site=5, first=first)
    y, plain = gelu_forward(x, bias, **options), gelu_forward(x, bias)
    keep = reference.f64(y) != 0
    assert 0 < keep.mean() < 1
    assert_close(y, keep / 0.7 * reference.gelu(x, bias), dtype)
    assert not np.array_equal(reference.f64(y), reference.f64(plain))
    again = xp.full_like(x, np.nan)
    dx, dbias = gelu_backward(dy, x, bias, recompute_out=again, **options)
    assert (again == y).all()
    want = keep / 0.7 * reference.f64(dy) * slope(x, bias)
    assert_close(dx, want, dtype, name="dx")
    assert_close(dbias, want.sum(0), dtype, name="dbias")


@pytest.mark.parametrize("C", [16, 9])
def test_dropout_does_not_depend_on_how_rows_are_split(xp, C):
    x, bias, dy = inputs(xp, np.float32, 8, C)
    options = dict(dropout=0.5, rng=key(xp), site=1)
    whole = gelu_forward(x, bias, **options)
    whole_dx, _ = gelu_backward(dy, x, bias, **options)
    for top, bottom in ((0, 3), (3, 8)):
        part = gelu_forward(x[top:bottom], bias, first=top * C, **options)
        part_dx, _ = gelu_backward(dy[top:bottom], x[top:bottom], bias, first=top * C, **options)
        assert (part == whole[top:bottom]).all() and (part_dx == whole_dx[top:bottom]).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    x, bias, dy = inputs(np, np.float32, 777, 33)
    options = dict(dropout=0.1, rng=key(np))
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append([gelu_forward(x, bias, **options), *gelu_backward(dy, x, bias, **options)])
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(results[0], results[-1], strict=True))


def test_rejects_inputs_that_do_not_fit(xp):
    x, bias, dy = inputs(xp, np.float32, 3, 8)
    with pytest.raises(InvalidValue, match=r"x float32 \(1, 3, 8\).*reshape"):
        gelu_forward(x[None], bias)
    with pytest.raises(InvalidValue, match=r"bias float32 \(3,\)"):
        gelu_forward(x, bias[:3])
    with pytest.raises(InvalidType, match="dy float16"):
        gelu_backward(dy.astype(np.float16), x, bias)
    with pytest.raises(InvalidValue, match="C-contiguous"):
        gelu_backward(dy.T, x.T, None)
    with pytest.raises(InvalidValue, match=r"recompute_out float32 \(2, 8\)"):
        gelu_backward(dy, x, bias, recompute_out=x[:2])
    with pytest.raises(InvalidValue, match="0 <= dropout < 1; got 1"):
        gelu_forward(x, bias, dropout=1.0, rng=key(xp))
    with pytest.raises(InvalidType, match="got None. Pass rng="):
        gelu_forward(x, bias, dropout=0.1)
    with pytest.raises(InvalidType, match="rng int64"):
        gelu_forward(x, bias, dropout=0.1, rng=key(xp).astype(np.int64))
