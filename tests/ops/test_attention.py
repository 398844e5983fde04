import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED
from nbtrain.device.philox import random_bits_cpu
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops import attention
from nbtrain.ops.attention import QUERIES, attention_backward, attention_forward
from nbtrain.ops.softmax import softmax_forward
from tests import reference
from tests.helpers import EPS, assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
HEAD_DIMS = [63, 80, 96, 128]
TIMES = [1, 3, 7, 65, 127, 192, 1000, 1023]
# The simulator takes about 0.1 s a block and runs Philox in Python; the CPU twin's block is QUERIES long.
FEW_TIMES = [1, 3, 7] if SIMULATED else [1, 3, 7, QUERIES - 1, QUERIES, QUERIES + 1, 127, 192]
FEW_DTYPES = [ml_dtypes.bfloat16] if SIMULATED else DTYPES
SEED = 1 << 31 | 5, 7, 3  # seed low, seed high, step


def attention_with_gradient(dy, qkv, H, sm_scale=None, keep=1.0):
    """(y, lse, dqkv) in float64, `keep` (B, H, T, T) the factor that dropout puts on a probability.

    Finite differences check it below."""
    dy, qkv = reference.f64(dy), reference.f64(qkv)
    B, T, C = dy.shape
    D = C // H
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    q, k, v = qkv.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
    do = dy.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) * sm_scale, -np.inf)
    p = reference.softmax(scores)
    y = (p * keep @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
    dp = keep * (do @ v.swapaxes(-1, -2))
    ds = sm_scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    dqkv = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, (p * keep).swapaxes(-1, -2) @ do])
    lse = reference.logsumexp(scores.reshape(-1, T)).reshape(B, H, T)
    return y, lse, dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C)


def keep_of(shape, p, site, first):
    """The factor on each probability, 0 or 1 / (1 - p), element by element from the counter."""
    rng = np.array(SEED, np.uint32)
    with np.errstate(over="ignore"):
        bits = [random_bits_cpu(rng, site, first + i) for i in range(int(np.prod(shape)))]
    return (np.array(bits, np.uint64) >= int(p * 2**32)).reshape(shape) / (1 - p)


def nans(xp, shape, dtype):
    return xp.asarray(np.full(shape, np.nan, dtype))


def run(xp, qkv, dy, H, **options):
    """(y, lse, dqkv), every output full of nan before."""
    B, T, C = dy.shape
    out = nans(xp, dy.shape, dy.dtype), nans(xp, (B, H, T), np.float32)
    y, lse = attention_forward(qkv, H, out=out, **options)
    assert y is out[0] and lse is out[1]
    return y, lse, attention_backward(dy, qkv, y, lse, H, out=nans(xp, qkv.shape, qkv.dtype), **options)


def compare(got, want, dtype):
    """Limits in eps: 8 on the rms error; 32 on the largest, and 256 in fp32.

    A plain fp32 attention in NumPy errs by 5 eps rms, and by 60 at the worst element with T = 1000, D = 128:
    a score is a sum of D products. Where a query has few keys, dp - sum(p * dp) is small beside its terms:
    with the sum taken from y * dy, as flash attention does, dq and dk err by up to 160."""
    (y, lse, dqkv), (y64, lse64, dqkv64) = got, want
    assert y.dtype == dqkv.dtype == dtype and lse.dtype == np.float32
    # The GPU's scores are stored in 16 bits, the twin's are not.
    twin = isinstance(lse, np.ndarray) and not SIMULATED
    assert_close(lse, lse64, np.float32 if twin else dtype, name="lse")
    B, T, C = y.shape
    parts = {"y": (y, y64)}
    for i, name in enumerate(("dq", "dk", "dv")):
        part = slice(i * C, (i + 1) * C)
        parts[name] = dqkv[..., part], dqkv64[..., part]
    eps = EPS[np.dtype(dtype)]
    for name, (a, b) in parts.items():
        if T == 1 and name in ("dq", "dk"):  # zero in mathematics: dp - y * dy, two sums of D products
            assert np.abs(reference.f64(a)).max() <= 16 * eps * C
        else:
            error = np.sqrt(np.mean((reference.f64(a) - b) ** 2) / np.mean(b**2))
            assert error <= 8 * eps, f"{name}: rms error {error / eps:.1f} eps"
            assert_close(a, b, dtype, name=name, scale=16 if dtype == np.float32 else 2)


def check(xp, dtype, B, T, H, D, **options):
    qkv, dy = randn(xp, dtype, (B, T, 3 * H * D), (B, T, H * D))
    compare(run(xp, qkv, dy, H, **options), attention_with_gradient(dy, qkv, H, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", FEW_TIMES)
def test_times_around_a_block_match_float64(xp, T, dtype):
    check(xp, dtype, 2, T, 1 if SIMULATED else 3, 16)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_head_dimensions_match_float64(xp, D, dtype):
    check(xp, dtype, 1, 5 if SIMULATED else 70, 2, D)


@pytest.mark.skipif(SIMULATED, reason="takes minutes in the simulator")
@pytest.mark.parametrize("T", [1000, 1023])
def test_long_times_match_float64(T):
    check(np, np.float32, 1, T, 2, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, *HEAD_DIMS])
@pytest.mark.parametrize("T", TIMES)
def test_every_time_and_head_dimension_matches_float64(T, D, dtype):
    import cupy

    check(cupy, dtype, 2, T, 3, D)


def test_other_scales_match_float64(xp):
    check(xp, np.float32, 1, 7, 2, 4, sm_scale=0.3)


@pytest.mark.parametrize("B,T,H,D", [(2, 3, 2, 1), (1, 5, 1, 4)])
def test_backward_matches_finite_differences(xp, B, T, H, D):
    qkv, dy = randn(xp, np.float32, (B, T, 3 * H * D), (B, T, H * D))
    y, _, got = run(xp, qkv, dy, H)
    assert_close(y, reference.attention(qkv, H), np.float32)
    (want,) = reference.vjp(lambda qkv: reference.attention(qkv, H), (qkv,), dy)
    assert_close(got, want, np.float32)
    assert_close(attention_with_gradient(dy, qkv, H)[2], want, np.float32)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator says where a nan arises
def test_the_scale_is_applied_before_fp16_can_overflow(xp):
    """q.k is 73,984 here, beyond fp16; scaled by 1/8 it fits."""
    T, D = 5, 64
    qkv, dy = randn(xp, np.float16, (1, T, 3 * D), (1, T, D))
    qkv[..., : 2 * D] = 34.0
    qkv[0, 0, D : 2 * D] = 33.9  # 24 less after scaling: more than a rounding of the scores, which is 8
    y, _, dqkv = run(xp, qkv, dy, 1)
    assert_close(y, attention_with_gradient(dy, qkv, 1)[0], np.float16)
    assert np.isfinite(reference.f64(dqkv)).all()
    with np.errstate(over="ignore"):
        unscaled = (reference.f64(qkv)[0, :, :D] @ reference.f64(qkv)[0, :, D : 2 * D].T).astype(np.float16)
    assert np.isnan(reference.f64(softmax_forward(xp.asarray(unscaled), sm_scale=D**-0.5))).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scaling_in_the_product_costs_no_accuracy(xp, dtype):
    """Scores rounded after the scale, or before: the probabilities' errors are alike. D is no power of 4."""
    T, D = 16, 48
    q, k = (reference.f64(a) for a in randn(np, dtype, (T, D), (T, D)))
    raw = q @ k.T
    want = reference.softmax(raw, D**-0.5, causal=True)

    def error(scores, sm_scale):
        p = softmax_forward(xp.asarray(scores.astype(dtype)), sm_scale=sm_scale, causal=True)
        return np.sqrt(np.mean((reference.f64(p) - want) ** 2))

    in_product, in_softmax = error(raw * D**-0.5, 1.0), error(raw, D**-0.5)
    assert 0 < in_product < 1.5 * in_softmax and in_product < EPS[np.dtype(dtype)] / 4


def test_a_query_never_sees_later_tokens(xp):
    T, C = 11, 8
    qkv, dy, other = randn(xp, np.float32, (1, T, 3 * C), (1, T, C), (1, T, 3 * C))
    y, lse, _ = run(xp, qkv, dy, 2)
    changed = qkv.copy()
    changed[:, 6:] = other[:, 6:]
    y2, lse2, _ = run(xp, changed, dy, 2)
    assert (y[:, :6] == y2[:, :6]).all() and (lse[..., :6] == lse2[..., :6]).all()
    assert (y[:, 6:] != y2[:, 6:]).any()


# ----------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("T,first", [(8, 0), (8, 2), (5 if SIMULATED else 65, 1 << 33)])
def test_dropout_counts_over_the_whole_batch(xp, T, first, dtype):
    B, H, D = 2, 2, 8
    qkv, dy = randn(xp, dtype, (B, T, 3 * H * D), (B, T, H * D))
    options = dict(dropout=0.3, rng=xp.asarray(np.array(SEED, np.uint32)), site=9, first=first)
    keep = keep_of((B, H, T, T), 0.3, 9, first)
    compare(run(xp, qkv, dy, H, **options), attention_with_gradient(dy, qkv, H, keep=keep), dtype)


def test_a_part_of_the_batch_sees_the_masks_of_the_whole(xp):
    B, T, H, D = 2, 8, 1, 4
    qkv, dy = randn(xp, np.float32, (B, T, 3 * H * D), (B, T, H * D))
    options = dict(dropout=0.3, rng=xp.asarray(np.array(SEED, np.uint32)), site=2)
    whole = run(xp, qkv, dy, H, **options, first=100)
    part = run(xp, qkv[1:], dy[1:], H, **options, first=100 + H * T * T)
    assert all((a[1:] == b).all() for a, b in zip(whole, part, strict=True))


# ----------------------------------------------------------------------------
# Bits and memory


@pytest.mark.skipif(not SIMULATED, reason="chunks are the GPU's; the gpu test below takes real sizes")
def test_chunks_of_the_batch_do_not_change_the_bits(monkeypatch):
    check_chunks(np, np.float32, 3, 4, 1, 4, 2, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_the_batch_do_not_change_the_bits_on_the_gpu(dtype, monkeypatch):
    import cupy

    check_chunks(cupy, dtype, 5, 128, 4, 64, 2, monkeypatch)


def check_chunks(xp, dtype, B, T, H, D, n, monkeypatch):
    qkv, dy = randn(xp, dtype, (B, T, 3 * H * D), (B, T, H * D))
    options = dict(dropout=0.3, rng=xp.asarray(np.array(SEED, np.uint32)), first=40)
    whole = run(xp, qkv, dy, H, **options)
    for b in (n, 1):
        monkeypatch.setattr(attention, "SCRATCH_BYTES", b * H * T * T * qkv.itemsize + 1)
        assert [len(range(B)[c]) for c, _ in attention._chunks(qkv, H)][0] == b
        assert all((a == c).all() for a, c in zip(whole, run(xp, qkv, dy, H, **options), strict=True))


@pytest.mark.gpu
def test_scratch_stays_within_its_limit():
    """GPT-2's sizes: two arrays of scores below 256 MiB each, and no fp32 copy of a product's operands."""
    import cupy

    B, T, H, D = 32, 1024, 12, 64
    qkv, dy = randn(cupy, np.float16, (B, T, 3 * H * D), (B, T, H * D))
    run(cupy, qkv, dy, H)  # handles and workspaces
    outputs = 2 * qkv.nbytes + dy.nbytes
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.get_default_memory_pool().total_bytes()
    run(cupy, qkv, dy, H)
    rise = cupy.get_default_memory_pool().total_bytes() - before
    assert rise <= outputs + 2 * attention.SCRATCH_BYTES + (16 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls_are_bitwise_equal(xp, dtype):
    T = 3 if SIMULATED else 130
    qkv, dy = randn(xp, dtype, (2, T, 24), (2, T, 8))
    assert all((a == b).all() for a, b in zip(*(run(xp, qkv, dy, 2) for _ in range(2)), strict=True))


@pytest.mark.skipif(SIMULATED, reason="threads and tasks are the CPU twin's")
def test_neither_threads_nor_tasks_change_the_bits(monkeypatch):
    import numba

    qkv, dy = randn(np, np.float32, (3, 150, 3 * 3 * 16), (3, 150, 3 * 16))
    options = dict(dropout=0.1, rng=np.array(SEED, np.uint32))
    results, threads = [run(np, qkv, dy, 3, **options)], numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        results.append(run(np, qkv, dy, 3, **options))
    finally:
        numba.set_num_threads(threads)
    monkeypatch.setattr(attention, "CPU_SCRATCH_BYTES", 1)
    assert attention._scratch_cpu(3, 3, 150, 2, 0.1)[0].shape[0] == 1
    results.append(run(np, qkv, dy, 3, **options))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


# ----------------------------------------------------------------------------
# Bad input


def test_rejects_heads_that_do_not_divide_the_channels(xp):
    for call in (attention_forward, lambda qkv, H: attention_backward(qkv, qkv, qkv, qkv, H)):
        with pytest.raises(InvalidValue, match=r"got qkv \(2, 3, 24\), H = 3: 24 is not a multiple"):
            call(xp.zeros((2, 3, 24), np.float32), 3)
    with pytest.raises(InvalidValue, match="H = 0"):
        attention_forward(xp.zeros((2, 3, 24), np.float32), 0)


def test_rejects_bad_arrays(xp):
    qkv = xp.zeros((2, 3, 24), np.float32)
    y, lse = attention_forward(qkv, 2)
    with pytest.raises(InvalidValue, match=r"qkv \(B, T, 3C\); got qkv float32 \(6, 24\)"):
        attention_forward(qkv.reshape(6, 24), 2)
    with pytest.raises(InvalidValue, match=r"lse \(B, 2, T\).*lse float32 \(2, 3, 2\)"):
        attention_backward(y, qkv, y, xp.zeros((2, 3, 2), np.float32), 2)
    with pytest.raises(InvalidValue, match=r"y \(B, T, 8\).*y float32 \(2, 3, 24\)"):
        attention_forward(qkv, 2, out=(qkv.copy(), lse))
    with pytest.raises(InvalidType, match="dy float16"):
        attention_backward(y.astype(np.float16), qkv, y, lse, 2)
    with pytest.raises(InvalidValue, match="one array for both"):
        attention_backward(y, qkv, y, lse, 2, out=qkv)
    with pytest.raises(InvalidValue, match="at most 32768 columns; got 32769"):
        attention_forward(xp.zeros((1, 32769, 3), np.float32), 1)


def test_rejects_bad_dropout(xp):
    qkv = xp.zeros((2, 3, 24), np.float32)
    with pytest.raises(InvalidValue, match="0 <= dropout < 1; got -0.1"):
        attention_forward(qkv, 2, dropout=-0.1)
    with pytest.raises(InvalidType, match="rng.*got None"):
        attention_forward(qkv, 2, dropout=0.1)
