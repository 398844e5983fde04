import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, tuned
from nbtrain.device.dropout import dropout_of
from nbtrain.device.philox import random_bits_cpu
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.dropout import dropout_backward, dropout_forward
from tests import reference
from tests.helpers import randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
BLOCK = 8 * tuned("dropout")[0]
SHAPES = [(1, 1), (3, 7), (2, 8), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (3, 50)]
SITE = 7


def key(xp, *words):
    return xp.asarray(np.array(words or (11, 22, 33), np.uint32))


def kept(rng, p, site, first, shape):
    """The mask, element by element, from the scalar form of the generator."""
    rng, threshold = reference.host(rng), int(p * 2**32)
    bits = [random_bits_cpu(rng, site, first + e) for e in range(np.prod(shape))]
    return (np.array(bits, np.uint64) >= threshold).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 4, 5])
@pytest.mark.parametrize("N,C", SHAPES)
def test_each_element_follows_its_own_bits(xp, N, C, first, dtype):
    """CPU and GPU alike: both are compared with the generator's scalar form."""
    (x,) = randn(xp, dtype, (N, C))
    p, rng = 0.4, key(xp)
    y = dropout_forward(x, p, rng, site=SITE, first=first, out=xp.full_like(x, np.nan))
    keep = kept(rng, p, SITE, first, (N, C))
    want = (reference.host(x).astype(np.float32) * np.float32(1 / (1 - p))).astype(dtype)
    assert y.dtype == dtype
    assert (reference.host(y) == np.where(keep, want, np.zeros((), dtype))).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_share_is_one_minus_p(xp, p):
    """Within five standard deviations of a binomial."""
    n = 1024 if SIMULATED else 2**18
    y = dropout_forward(xp.ones((4, n // 4), np.float32), p, key(xp), site=SITE)
    share = float((y != 0).sum()) / n
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert np.unique(reference.host(y)).tolist() == [0, np.float32(1 / (1 - p))]


@pytest.mark.parametrize("C", [24, 9])
def test_the_backward_is_the_forward_on_dy(xp, C):
    """Dropout is linear: with the same mask, its gradient is dropout of dy."""
    x, dy = randn(xp, np.float32, (6, C), (6, C))
    rng = key(xp)
    dx = dropout_backward(dy, 0.3, rng, site=SITE, first=8)
    assert (dx == dropout_forward(dy, 0.3, rng, site=SITE, first=8)).all()
    y = dropout_forward(x, 0.3, rng, site=SITE, first=8)
    assert ((y == 0) == (dx == 0)).all()


@pytest.mark.parametrize("C", [24, 9])
def test_the_mask_does_not_depend_on_how_rows_are_split(xp, C):
    (x,) = randn(xp, np.float32, (8, C))
    rng = key(xp)
    whole = dropout_forward(x, 0.5, rng, site=SITE)
    for top, bottom in ((0, 1), (1, 4), (4, 8)):
        part = dropout_forward(x[top:bottom], 0.5, rng, site=SITE, first=top * C)
        assert (part == whole[top:bottom]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recomputed_value_is_bitwise_the_same(xp, dtype):
    """Case 25 for one operator: whatever ran in between, the mask is drawn again."""
    x, other = randn(xp, dtype, (5, 40), (3, 16))
    rng = key(xp)
    y = dropout_forward(x, 0.1, rng, site=SITE)
    dropout_forward(other, 0.7, rng, site=SITE + 1)
    assert (dropout_forward(x, 0.1, rng, site=SITE) == y).all()


def test_seed_step_and_site_each_change_the_mask(xp):
    x = xp.ones((4, 64), np.float32)
    masks = [dropout_forward(x, 0.5, key(xp), site=SITE), dropout_forward(x, 0.5, key(xp), site=SITE + 1)]
    masks += [
        dropout_forward(x, 0.5, key(xp, *words), site=SITE)
        for words in ((12, 22, 33), (11, 23, 33), (11, 22, 34))
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            agree = float((a == b).mean())
            assert 0.25 < agree < 0.75


def test_in_place_gives_the_same_bits(xp):
    (x,) = randn(xp, np.float32, (5, 24))
    y = dropout_forward(x, 0.3, key(xp), site=SITE)
    assert dropout_forward(x, 0.3, key(xp), site=SITE, out=x) is x
    assert (x == y).all()


def test_without_dropout_values_are_copied_unless_in_place(xp):
    (x,) = randn(xp, np.float32, (5, 24))
    y = dropout_forward(x, 0.0, None, site=SITE)
    assert y is not x and (y == x).all()
    assert dropout_backward(x, 0.0, None, site=SITE, out=x) is x


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_kept_or_dropped(xp, dtype):
    x = xp.asarray(np.array([[np.nan, np.inf] * 8], dtype))
    y = reference.f64(dropout_forward(x, 0.5, key(xp), site=SITE))
    keep = kept(key(xp), 0.5, SITE, 0, x.shape)
    assert 0 < keep.sum() < keep.size
    assert (np.isfinite(y) == ~keep).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    (x,) = randn(np, np.float32, (777, 33))
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(dropout_forward(x, 0.1, key(np), site=SITE))
    finally:
        numba.set_num_threads(threads)
    assert (results[0] == results[-1]).all()


def test_a_share_near_one_still_has_a_threshold_and_a_finite_scale():
    drop = dropout_of("dropout", 1 - 2.0**-53, key(np), SITE, 0)
    assert drop.threshold == 2**32 - 1 and np.isfinite(drop.scale)


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), 2])
def test_rejects_p_outside_zero_to_one(xp, p):
    with pytest.raises(InvalidValue, match=f"0 <= dropout < 1; got {p}"):
        dropout_forward(xp.ones((2, 8), np.float32), p, key(xp), site=SITE)


def test_rejects_inputs_that_do_not_fit(xp):
    x = xp.ones((2, 8), np.float32)
    with pytest.raises(InvalidType, match="got None. Pass rng="):
        dropout_forward(x, 0.1, None, site=SITE)
    with pytest.raises(InvalidType, match="rng int32"):
        dropout_forward(x, 0.1, key(xp).astype(np.int32), site=SITE)
    with pytest.raises(InvalidValue, match=r"x float32 \(1, 2, 8\).*reshape"):
        dropout_forward(x[None], 0.1, key(xp), site=SITE)
    with pytest.raises(InvalidType, match="out float16"):
        dropout_forward(x, 0.1, key(xp), site=SITE, out=x.astype(np.float16))


@pytest.mark.gpu
def test_element_numbers_beyond_32_bits():
    import cupy

    x = np.ones((2, 64), np.float32)
    for first in (2**32 - 8, 2**33 + 3):
        on_cpu = dropout_forward(x, 0.5, key(np), site=SITE, first=first)
        on_gpu = dropout_forward(cupy.asarray(x), 0.5, key(cupy), site=SITE, first=first)
        assert (on_gpu.get() == on_cpu).all()
