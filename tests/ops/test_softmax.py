import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, row_shape
from nbtrain.device.philox import random_bits_cpu
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.softmax import softmax_backward, softmax_forward
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
T, R = row_shape("softmax_forward", 1, vectors=4)  # threads of the shortest rows, rows a block
# The simulator takes about 0.1 s a block and runs Philox in Python.
CAUSAL_LENGTHS = [1, 7, 9, 16] if SIMULATED else [1, 7, 8, 9, 33, 40]
DROPOUT_DTYPES = [ml_dtypes.bfloat16] if SIMULATED else DTYPES
# NumPy warns in the simulator where a GPU just makes infinity or nan.
quiet = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)
LENGTHS = [1, 7, 8, 9, 8 * T - 1, 8 * T, 8 * T + 1, 32 * T, 32 * T + 1]
GPU_LENGTHS = [1000, 1023, 1024, 8191, 8192, 16384, 16392, 32767, 32768]
SEED = 1 << 31 | 5, 7, 3  # seed low, seed high, step


def softmax_vjp(dy, x, sm_scale=1.0, causal=False, keep=1.0):
    """dx in float64, `keep` the factor that dropout puts on y; finite differences check it below."""
    y = reference.softmax(x, sm_scale, causal)
    dy = reference.f64(dy) * keep
    return sm_scale * y * (dy - (dy * y).sum(-1, keepdims=True))


def keep_of(shape, p, site, first):
    """The factor on each probability, 0 or 1 / (1 - p), element by element from the counter."""
    rng = np.array(SEED, np.uint32)
    with np.errstate(over="ignore"):
        bits = [random_bits_cpu(rng, site, first + i) for i in range(int(np.prod(shape)))]
    return (np.array(bits, np.uint64) >= int(p * 2**32)).reshape(shape) / (1 - p)


def nans(xp, like):
    return xp.asarray(np.full(like.shape, np.nan, like.dtype))


def check(xp, dtype, matrices, rows, L, causal, sm_scale=0.7):
    x, dy = randn(xp, dtype, (matrices * rows, L), (matrices * rows, L))
    x64, dy64 = (reference.f64(a).reshape(matrices, rows, L) for a in (x, dy))
    lse = xp.full(matrices * rows, np.nan, np.float32)
    y = softmax_forward(x, sm_scale=sm_scale, causal=causal, lse=lse, out=nans(xp, x))
    want = reference.softmax(x64, sm_scale, causal)
    assert y.dtype == dtype
    assert_close(y, want.reshape(x.shape), dtype)
    scores = np.where(np.tri(rows, L, dtype=bool), x64, -np.inf) if causal else x64
    assert_close(lse, reference.logsumexp(scores.reshape(-1, L) * sm_scale), np.float32, name="lse")
    dx = softmax_backward(dy, y, sm_scale=sm_scale, causal=causal, out=nans(xp, x))
    assert dx.dtype == dtype
    # dy - sum(dy * y) cancels where a row has few terms, and y is good to 4 eps: four times the usual limit.
    scale = 4 if dtype == np.float32 else 1
    assert_close(dx, softmax_vjp(dy64, x64, sm_scale, causal).reshape(x.shape), dtype, name="dx", scale=scale)
    if causal:
        hidden = np.broadcast_to(~np.tri(rows, L, dtype=bool), x64.shape).reshape(x.shape)
        assert not reference.host(y)[hidden].any() and not reference.host(dx)[hidden].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", LENGTHS)
def test_forward_and_backward_match_float64(xp, L, dtype):
    check(xp, dtype, 1, R + 1, L, causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", CAUSAL_LENGTHS)
def test_causal_matrices_match_float64_and_hide_later_columns(xp, L, dtype):
    check(xp, dtype, 2, L, L, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", GPU_LENGTHS)
def test_long_rows_match_float64(L, dtype):
    import cupy

    check(cupy, dtype, 1, 5, L, causal=False)
    if L <= 1024:
        check(cupy, dtype, 3, L, L, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("L", [16384, 32767, 32768])
def test_a_long_causal_matrix_matches_float64_in_its_last_rows(L):
    """The whole matrix in float64 is 8 GB: the last rows are compared; later columns are 0 in all."""
    import cupy

    x = cupy.random.default_rng(0).standard_normal((L, L), np.float32).astype(np.float16)
    y = softmax_forward(x, causal=True)
    rows = slice(L - 3, L)
    hidden = np.where(np.tri(L, dtype=bool)[rows], 0, -np.inf)
    assert_close(y[rows], reference.softmax(reference.f64(x[rows]) + hidden), np.float16)
    assert not cupy.triu(y, 1).any()
    dx = softmax_backward(x, y, causal=True)
    assert_close(
        dx[rows],
        softmax_vjp(x[rows], reference.f64(x[rows]) + hidden),
        np.float16,
        name="dx",
    )
    assert not cupy.triu(dx, 1).any()


@pytest.mark.parametrize("causal", [False, True])
def test_backward_matches_finite_differences(xp, causal):
    x, dy = randn(xp, np.float32, (10, 5), (10, 5))

    def forward(x):
        return reference.softmax(x.reshape(2, 5, 5), 0.7, causal).reshape(10, 5)

    y = softmax_forward(x, sm_scale=0.7, causal=causal)
    got = softmax_backward(dy, y, sm_scale=0.7, causal=causal)
    (want,) = reference.vjp(forward, (x,), dy)
    assert_close(got, want, np.float32)
    square = [reference.f64(a).reshape(2, 5, 5) for a in (dy, x)]
    assert_close(softmax_vjp(*square, 0.7, causal).reshape(10, 5), want, np.float32)


def test_known_rows(xp):
    y = softmax_forward(xp.asarray(np.float16([[12, 11]])))
    assert_close(y, np.array([[0.73105858, 0.26894142]]), np.float16)
    y = softmax_forward(xp.asarray(np.float32([[89, 0]])))
    assert reference.host(y)[0, 0] == 1 and 0 <= reference.host(y)[0, 1] < 1e-37


@quiet
def test_a_row_of_minus_infinity_except_one_gives_it_all(xp):
    x = xp.full((2, 11), -np.inf, np.float32)
    x[0, 3], x[1, 10] = -5.0, 3e38
    y = softmax_forward(x, lse=(lse := xp.empty(2, np.float32)))
    want = np.zeros((2, 11), np.float32)
    want[0, 3] = want[1, 10] = 1
    assert (reference.host(y) == want).all()
    assert_close(lse, [-5.0, np.float32(3e38)], np.float32)
    dx = softmax_backward(xp.ones_like(x), y)
    assert (reference.host(dx) == 0).all()


@quiet
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_largest_numbers_of_a_dtype(xp, dtype):
    """Differences overflow, scaled scores overflow, all scores are the lowest number there is: what stands in
    for columns that are not there must not count as their equal."""
    big = ml_dtypes.finfo(dtype).max
    x = xp.asarray(np.array([[big, -big, big], [-big, -big, -big], [-big, 0, big]], dtype))
    for sm_scale in (1.0, 3.0):
        y = softmax_forward(x, sm_scale=sm_scale)
        assert_close(y, [[0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]], dtype)


@quiet
def test_a_row_that_is_not_a_number_stays_one_and_stays_alone(xp):
    x = xp.zeros((6, 3), np.float32)
    x[1, 1], x[2, :], x[3, 0] = np.nan, -np.inf, np.inf
    bad = np.isnan(reference.host(softmax_forward(x)))
    assert bad[1:4].any(1).all() and not bad[[0, 4, 5]].any()


@quiet
def test_causal_never_reads_later_columns(xp):
    (x,) = randn(xp, np.float32, (9, 9))
    poisoned = x.copy()
    poisoned[~xp.asarray(np.tri(9, dtype=bool))] = np.nan
    y = softmax_forward(x, causal=True)
    assert (softmax_forward(poisoned, causal=True) == y).all()
    assert (
        softmax_backward(poisoned, y + (poisoned - x), causal=True) == softmax_backward(x, y, causal=True)
    ).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_in_place_is_bitwise_equal(xp, causal, dtype):
    x, dy = randn(xp, dtype, (9, 9), (9, 9))
    y = softmax_forward(x, causal=causal)
    assert softmax_forward(x, causal=causal, out=x) is x and (x == y).all()
    dx = softmax_backward(dy, y, causal=causal)
    over_y = softmax_backward(dy, x, causal=causal, out=x)
    assert (over_y == dx).all()
    assert (softmax_backward(dy, y, causal=causal, out=dy) == dx).all()


# ----------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("dtype", DROPOUT_DTYPES)
@pytest.mark.parametrize("first", [0, 5, 1 << 33])
@pytest.mark.parametrize("L", [8, 7, 16])
def test_dropout_follows_the_counter(xp, L, first, dtype):
    """Aligned and unaligned element numbers, and those that pass 32 bits."""
    p, causal = 0.3, L == 16
    N = L if causal else 3
    x, dy = randn(xp, dtype, (N, L), (N, L))
    options = dict(causal=causal, dropout=p, rng=xp.asarray(np.array(SEED, np.uint32)), site=9, first=first)
    keep = keep_of((N, L), p, 9, first)
    assert 0.4 < (keep > 0).mean() < 0.95
    y = softmax_forward(x, causal=causal)
    got = softmax_forward(x, **options, out=nans(xp, x))
    want = reference.softmax(x, 1.0, causal) * keep
    assert_close(got, want, dtype)
    dropped = nans(xp, x)
    dx = softmax_backward(dy, y, **options, dropped=dropped, out=nans(xp, x))
    assert_close(dropped, want, dtype, name="dropped")
    assert_close(dx, softmax_vjp(dy, x, 1.0, causal, keep), dtype, name="dx")
    softmax_backward(dy, y, **options, dropped=y, out=dy)
    assert (y == dropped).all() and (dy == dx).all()


def test_dropped_without_dropout_is_y(xp):
    y, dy = randn(xp, np.float32, (3, 9), (3, 9))
    y = softmax_forward(y)
    dropped = nans(xp, y)
    softmax_backward(dy, y, dropped=dropped)
    assert (dropped == y).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1000, 1023, 16392, 32767])
def test_dropout_on_the_gpu_drops_what_the_cpu_drops(L, dtype):
    import cupy

    x, dy = randn(np, dtype, (5, L), (5, L))
    options = dict(dropout=0.2, site=1, first=3 * L)
    rng = np.array(SEED, np.uint32)
    results = []
    for xp in (np, cupy):
        a, b, r = (xp.asarray(v) for v in (x, dy, rng))
        y = softmax_forward(a)
        dropped = xp.empty_like(y)
        dx = softmax_backward(b, y, rng=r, **options, dropped=dropped)
        results.append([softmax_forward(a, rng=r, **options), dropped, dx])
    for name, want, got in zip(("y", "dropped", "dx"), *results, strict=True):
        assert_close(got, want, dtype, name=name)


# ----------------------------------------------------------------------------
# Bits and bad input


def test_repeated_calls_are_bitwise_equal(xp):
    x, dy = randn(xp, np.float32, (9, 33), (9, 33))
    (y, dx), (y2, dx2) = ((y := softmax_forward(x), softmax_backward(dy, y)) for _ in range(2))
    assert (y == y2).all() and (dx == dx2).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    x, dy = randn(np, np.float32, (777, 333), (777, 333))
    options = dict(dropout=0.1, rng=np.array(SEED, np.uint32))
    results, threads = [], numba.get_num_threads()
    try:
        for n in (1, threads):
            numba.set_num_threads(n)
            y = softmax_forward(x)
            results.append((y, softmax_forward(x, **options), softmax_backward(dy, y, **options)))
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def test_rejects_bad_shapes(xp):
    with pytest.raises(InvalidValue, match=r"x \(N, L\).*x float32 \(2, 3, 4\).*reshape"):
        softmax_forward(xp.zeros((2, 3, 4), np.float32))
    with pytest.raises(InvalidValue, match=r"at most 32768 columns; got 32769"):
        softmax_forward(xp.zeros((1, 32769), np.float32))
    with pytest.raises(InvalidValue, match=r"N = 5, L = 4, 1 rows too many"):
        softmax_forward(xp.zeros((5, 4), np.float32), causal=True)
    with pytest.raises(InvalidValue, match=r"lse float32 \(3,\)"):
        softmax_forward(xp.zeros((2, 4), np.float32), lse=xp.zeros(3, np.float32))


def test_rejects_bad_options(xp):
    x = xp.zeros((4, 4), np.float32)
    with pytest.raises(InvalidValue, match="positive sm_scale; got -1"):
        softmax_forward(x, sm_scale=-1.0)
    with pytest.raises(InvalidValue, match="0 <= dropout < 1; got 1.0"):
        softmax_forward(x, dropout=1.0)
    with pytest.raises(InvalidType, match="rng, uint32.*got None"):
        softmax_backward(x, x, dropout=0.5)
    with pytest.raises(InvalidType, match="rng int64"):
        softmax_forward(x, dropout=0.5, rng=xp.zeros(3, np.int64))
    with pytest.raises(InvalidValue, match="dropped to y or an array of its own"):
        softmax_backward(x.copy(), x, dropped=x, out=x)


def test_rejects_mixed_dtypes(xp):
    x = xp.zeros((4, 4), np.float32)
    with pytest.raises(InvalidType, match="y float16"):
        softmax_backward(x, x.astype(np.float16))
