import itertools

import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.cast import cast_and_scale
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
BLOCK = 8 * tuned("cast")[0]
LENGTHS = [1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 9]


def rounded(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype,out_dtype", PAIRS)
@pytest.mark.parametrize("n", LENGTHS)
def test_casts_with_one_rounding(xp, n, dtype, out_dtype):
    (x,) = randn(xp, dtype, (n,))
    factor = xp.asarray(np.array([0.37], np.float32))
    out = cast_and_scale(x, factor, out=xp.full(n, np.nan, out_dtype))
    assert out.dtype == out_dtype
    want = rounded(reference.host(x).astype(np.float32) * np.float32(0.37), out_dtype)
    assert (reference.host(out) == want).all()


@pytest.mark.parametrize("dtype,out_dtype", PAIRS)
@pytest.mark.parametrize("n", LENGTHS)
def test_accumulates(xp, n, dtype, out_dtype):
    x, before = randn(xp, dtype, (n,), (n,))
    before = before.astype(out_dtype)
    out = cast_and_scale(x, 0.37, out=before.copy(), accumulate=True)
    want = reference.f64(before) + float(np.float32(0.37)) * reference.f64(x)
    assert_close(out, want, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_a_model_match_float64(dtype):
    import cupy

    (x,) = randn(cupy, dtype, (5_000_003,))
    out = cast_and_scale(x, 0.5, out=cupy.full(x.shape, np.nan, np.float32))
    assert (out == x.astype(np.float32) * np.float32(0.5)).all()


@pytest.mark.parametrize("start", [1, 3])
def test_unaligned_slices(xp, start):
    (x,) = randn(xp, np.float16, (50,))
    out = xp.full(50 + start, np.nan, np.float32)
    cast_and_scale(x[start:], 2.0, out=out[start:-start])
    want = 2 * reference.f64(x[start:])
    assert (reference.f64(out)[start:-start] == want).all()
    outside = np.concatenate([reference.f64(out)[:start], reference.f64(out)[-start:]])
    assert np.isnan(outside).all()


def test_every_form_of_the_factor_gives_the_same_bits(xp):
    (x,) = randn(xp, np.float16, (33,))
    forms = [0.1, np.float32(0.1), xp.asarray(np.float32(0.1)).reshape(()), xp.full(1, 0.1, np.float32)]
    results = [cast_and_scale(x, factor, out=xp.empty(33, np.float32)) for factor in forms]
    assert all((r == results[0]).all() for r in results)
    assert (cast_and_scale(x, 3, out=xp.empty(33, np.float32)) == 3 * x.astype(np.float32)).all()


def test_in_place_scales(xp):
    (x,) = randn(xp, np.float32, (33,))
    want = 2 * x
    assert cast_and_scale(x, 2.0, out=x) is x
    assert (x == want).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_non_finite_values_arrive(xp, dtype, accumulate):
    """The step is skipped for them: a cast must not lose one."""
    x = xp.asarray(np.array([np.nan, np.inf, -np.inf, 1] * 5, dtype))
    out = cast_and_scale(x, 2.0, out=xp.zeros(20, np.float32), accumulate=accumulate)
    np.testing.assert_array_equal(reference.f64(out), [np.nan, np.inf, -np.inf, 2] * 5)


def test_what_does_not_fit_becomes_infinite(xp):
    x = xp.full(9, 60000, np.float32)
    out = cast_and_scale(x, -2.0, out=xp.empty(9, np.float16))
    assert (out == -np.inf).all()


def test_rejects_inputs_that_do_not_fit(xp):
    (x,) = randn(xp, np.float32, (8,))
    with pytest.raises(InvalidValue, match=r"out float32 \(7,\)"):
        cast_and_scale(x, 1.0, out=xp.empty(7, np.float32))
    with pytest.raises(InvalidValue, match=r"x float32 \(2, 4\).*reshape"):
        cast_and_scale(x.reshape(2, 4), 1.0, out=x)
    with pytest.raises(InvalidType, match="x int32"):
        cast_and_scale(x.astype(np.int32), 1.0, out=x)
    with pytest.raises(InvalidType, match="factor float64"):
        cast_and_scale(x, xp.ones(1, np.float64), out=x)
    with pytest.raises(InvalidValue, match=r"factor float32 \(2,\)"):
        cast_and_scale(x, xp.ones(2, np.float32), out=x)
    with pytest.raises(InvalidType, match="got str"):
        cast_and_scale(x, "2", out=x)
    with pytest.raises(InvalidValue, match="C-contiguous"):
        cast_and_scale(x[::2], 1.0, out=xp.empty(4, np.float32))
