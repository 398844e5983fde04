import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, TARGET, recording, tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops import cross_entropy as op
from nbtrain.ops.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_forward_backward,
    sum_losses,
)
from tests import reference
from tests.helpers import EPS, assert_close, forms_asked, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
THREADS, _ = tuned("cross_entropy")
WIDE = 16 * THREADS * (2 if SIMULATED else 1)  # a block reads groups of two eights a thread
# (N, V, vocab_size): around one eight, ragged and padded rows, rows with and without a tail behind the
# groups
SHAPES = [
    (1, 1, 1), (3, 7, 7), (2, 8, 8), (5, 9, 9), (4, 16, 9), (3, 24, 8), (3, 65, 65),
    (2, WIDE, WIDE), (2, WIDE + 8, WIDE + 1), (2, WIDE - 1, WIDE - 2),
    (2, 5 * WIDE + 8, 5 * WIDE + 5),
]  # fmt: skip
GPT2_SHAPES = [
    (300, 50304, 50257),
    (300, 50304, 50304),
    (64, 24576, 24570),  # 48 KB of dynamic shared memory, beside static
    (65, 50257, 50257),
    (7, 32768, 32768),
    (4096, 65, 65),
]


def inputs(xp, dtype, N, V, vocab_size, seed=0):
    """logits with a spread of 3, targets of which every third is ignored, dlosses."""
    logits, dlosses = randn(xp, np.float32, (N, V), (N,), seed=seed)
    targets = np.random.default_rng(seed).integers(0, vocab_size, N).astype(np.int32)
    targets[2::3] = -100
    return (3 * logits).astype(dtype), xp.asarray(targets), dlosses


def cross_entropy_vjp(dlosses, logits, targets, vocab_size):
    """dlogits in float64; `test_backward_matches_finite_differences` ties it to the forward reference."""
    dlosses, x, targets = reference.f64(dlosses), reference.f64(logits), reference.host(targets)
    dlogits = np.zeros_like(x)
    dlogits[:, :vocab_size] = reference.softmax(x[:, :vocab_size])
    counted = targets != -100
    dlogits[np.arange(len(x))[counted], targets[counted]] -= 1
    return dlogits * np.where(counted, dlosses, 0)[:, None]


def check(xp, dtype, N, V, vocab_size):
    logits, targets, dlosses = inputs(xp, dtype, N, V, vocab_size)
    losses, lse = cross_entropy_forward(logits, targets, vocab_size=vocab_size)
    assert losses.dtype == lse.dtype == np.float32
    assert_close(
        losses, reference.cross_entropy(logits, targets, vocab_size), np.float32, name="losses", floor=1
    )
    assert_close(lse, reference.logsumexp(logits, vocab_size), np.float32, name="lse")

    got = cross_entropy_backward(dlosses, logits, targets, lse, vocab_size=vocab_size)
    assert got.dtype == dtype
    want = cross_entropy_vjp(dlosses, logits, targets, vocab_size)
    # Over 50257 classes lse * log2(e) is about 22, where a ulp is 2**-19: its rounding, lse's own (there a
    # ulp is 2**-20) and exp2's two ulps add up to 2.4e-6 in fp32, 20 eps.
    scale = 2 if dtype == np.float32 and vocab_size > 2**15 else 1
    assert_close(got, want, dtype, name="dlogits", scale=scale, floor=1e-3)  # softmax - 1 at the target
    assert not got[:, vocab_size:].any()

    dloss = xp.asarray(np.float32([0.37]))
    fused = logits.copy()
    again = cross_entropy_forward_backward(fused, targets, dloss, vocab_size=vocab_size)
    assert (again == losses).all()
    want = cross_entropy_vjp(np.full(N, 0.37), logits, targets, vocab_size)
    assert_close(fused, want, dtype, name="fused dlogits", scale=scale, floor=1e-3)
    assert not fused[:, vocab_size:].any() and not fused[2::3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,V,vocab_size", SHAPES)
def test_losses_and_gradients_match_float64(xp, N, V, vocab_size, dtype):
    check(xp, dtype, N, V, vocab_size)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("N,V,vocab_size", [shape for shape in SHAPES if shape[1] >= WIDE])
def test_rows_that_shared_memory_does_not_hold(kernel_xp, N, V, vocab_size, dtype, monkeypatch):
    asked = forms_asked(monkeypatch, op, "_forward_kernel", 2 * (2 * V + 2048) - 1)
    check(kernel_xp, dtype, N, V, vocab_size)
    assert asked and not any(asked)


@pytest.mark.skipif(SIMULATED, reason="the simulator has one size of shared memory")
@pytest.mark.skipif(TARGET == "hip", reason="AMD's memory does not copy by itself")
@pytest.mark.parametrize(
    "capability,V,dtype,ahead",
    [
        ((9, 0), 50304, np.float16, True),
        ((9, 0), 50304, np.float32, False),
        ((9, 0), 50257, np.float16, False),  # rows that do not begin at 16 bytes
        ((8, 0), 50304, np.float16, False),
        ((8, 0), 32768, np.float16, True),
        ((9, 0), 57344, np.float16, True),  # twice 2 V + 2048 bytes are 228 KB
        ((9, 0), 57352, np.float16, False),
        ((9, 0), 8192, np.float16, True),
        ((9, 0), 8184, np.float16, False),  # fewer than two eights a thread
        ((7, 5), 8192, np.float16, False),
        (None, 50304, np.float16, False),
    ],
)
def test_a_row_waits_in_shared_memory_where_two_blocks_fit(capability, V, dtype, ahead, monkeypatch):
    asked = []
    monkeypatch.setattr(op, "_forward_kernel", lambda *key: asked.append(key) or (None, THREADS))
    with recording(capability):
        logits, targets = np.empty((600, V), dtype), np.zeros(600, np.int32)
        cross_entropy_forward_backward(logits, targets, np.ones(1, np.float32))
    assert asked[0][-1] == ahead


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,V,vocab_size", GPT2_SHAPES)
def test_gpt2_sizes_match_float64(N, V, vocab_size, dtype):
    import cupy

    check(cupy, dtype, N, V, vocab_size)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(free_bytes=9 << 30):
    """42,700 rows of 50,304 are 2.148e9 elements, in 16 bits 4.3 GB; the last rows lie behind 2**31."""
    import cupy

    if cupy.cuda.Device().mem_info[0] < free_bytes:
        pytest.skip("needs 9 GB of GPU memory")
    N, V = 42_700, 50_304
    last, targets, _ = inputs(cupy, np.float16, 5, V, V)
    logits = cupy.zeros((N, V), np.float16)
    logits[-5:] = last
    all_targets = cupy.zeros(N, np.int32)
    all_targets[-5:] = targets
    losses = cross_entropy_forward_backward(logits, all_targets, cupy.ones(1, np.float32))
    assert_close(losses[-5:], reference.cross_entropy(last, targets), np.float32)
    assert_close(logits[-5:], cross_entropy_vjp(np.ones(5), last, targets, V), np.float16)
    assert_close(losses[:9], np.full(9, np.log(V)), np.float32)


@pytest.mark.parametrize("N,V,vocab_size", [(4, 7, 7), (4, 12, 9)])
def test_backward_matches_finite_differences(xp, N, V, vocab_size):
    logits, targets, dlosses = inputs(xp, np.float32, N, V, vocab_size)
    (want,) = reference.vjp(lambda x: reference.cross_entropy(x, targets, vocab_size), (logits,), dlosses)
    _, lse = cross_entropy_forward(logits, targets, vocab_size=vocab_size)
    got = cross_entropy_backward(dlosses, logits, targets, lse, vocab_size=vocab_size)
    assert_close(got, want, np.float32)
    assert_close(cross_entropy_vjp(dlosses, logits, targets, vocab_size), want, np.float32)


def test_padded_gpt2_vocabulary_counts_for_nothing(xp):
    """-20 everywhere and -10 at the target; what stands in the padding, here 30, must not be seen."""
    logits = xp.full((1, 50304), -20.0, np.float32)
    logits[0, 0], logits[0, 50257:] = -10, 30
    losses, lse = cross_entropy_forward(logits, xp.zeros(1, np.int32), vocab_size=50257)
    limit = 1e-4 if SIMULATED else 1e-5  # each of 8 threads adds 6282 numbers one after the other
    assert abs(float(lse[0]) - -8.81166) < limit and abs(float(losses[0]) - 1.18834) < limit
    same = cross_entropy_forward_backward(
        logits, xp.zeros(1, np.int32), xp.ones(1, np.float32), vocab_size=50257
    )
    assert (same == losses).all()
    assert not logits[0, 50257:].any()
    assert abs(float(logits[0, 0]) - (np.exp(-1.18834) - 1)) < limit


def test_ignored_rows_give_zeros_even_over_nan(xp):
    logits = xp.asarray(np.float32([[1, 2, 3], [np.nan, 2, 3]]))
    targets = xp.full(2, -100, np.int32)
    losses = cross_entropy_forward_backward(logits, targets, xp.full(1, np.float32(np.inf)))
    assert not losses.any() and not logits.any()
    logits = xp.asarray(np.float32([[1, 2, 3]]))
    losses, lse = cross_entropy_forward(logits, targets[:1])
    assert float(losses[0]) == 0 and abs(float(lse[0]) - 3.407606) < 1e-5
    dlogits = cross_entropy_backward(xp.ones(1, np.float32), logits, targets[:1], lse)
    assert not dlogits.any()


def test_an_ignore_index_inside_the_vocabulary_is_ignored(xp):
    logits, _, _ = inputs(xp, np.float32, 2, 9, 9)
    losses, _ = cross_entropy_forward(logits, xp.asarray(np.int32([4, 5])), ignore_index=4)
    assert float(losses[0]) == 0 and float(losses[1]) > 0


@pytest.mark.parametrize("bad,at", [([0, 1, -4], r"targets\[2\] = -4"), ([0, 7, 1], r"targets\[1\] = 7")])
def test_rejects_host_targets_outside_the_vocabulary(bad, at):
    logits, targets, ones = np.zeros((3, 8), np.float32), np.int32(bad), np.ones(3, np.float32)
    for call in (
        lambda: cross_entropy_forward(logits, targets, vocab_size=7),
        lambda: cross_entropy_forward_backward(logits, targets, ones[:1], vocab_size=7),
        lambda: cross_entropy_backward(ones, logits, targets, ones, vocab_size=7),
    ):
        with pytest.raises(InvalidValue, match=rf"0\.\.6 or ignore_index = -100; got {at}"):
            call()


@pytest.mark.parametrize("bad", [-1, 7, -(2**31), 2**31 - 1])
def test_kernels_take_bad_targets_for_ignored(xp, bad, monkeypatch):
    monkeypatch.setattr(op, "expect_ids", lambda *args, **options: None)
    logits, _, dlosses = inputs(xp, np.float32, 2, 8, 7)
    targets = xp.asarray(np.int32([bad, 3]))
    losses, lse = cross_entropy_forward(logits, targets, vocab_size=7)
    dlogits = cross_entropy_backward(dlosses, logits, targets, lse, vocab_size=7)
    again = cross_entropy_forward_backward(logits, targets, dlosses[:1], vocab_size=7)
    assert float(losses[0]) == float(again[0]) == 0 and float(losses[1]) == float(again[1]) > 0
    assert not dlogits[0].any() and not logits[0].any() and dlogits[1, :7].all() and logits[1, :7].all()


def test_an_improbable_target_keeps_a_finite_loss(xp):
    losses, _ = cross_entropy_forward(xp.asarray(np.float32([[0, -120]])), xp.asarray(np.int32([1])))
    assert float(losses[0]) == pytest.approx(120, rel=1e-6)


@pytest.mark.parametrize(
    "dtype,row", [(np.float16, [12, 11]), (np.float32, [89, 0]), (np.float32, [-3e4, 3e4])]
)
def test_large_logits_do_not_overflow(xp, dtype, row):
    logits = xp.asarray(np.array([row], dtype))
    want = reference.softmax(logits) - [1, 0]
    losses = cross_entropy_forward_backward(logits, xp.zeros(1, np.int32), xp.ones(1, np.float32))
    assert_close(logits, want, dtype, floor=1)
    assert_close(losses, reference.cross_entropy(np.array([row]), np.zeros(1, np.int32)), np.float32, floor=1)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no fused multiply-add")
def test_a_large_common_offset_costs_no_accuracy(xp):
    """Logits near 4096 are spaced 2**-11 apart; with that spacing given, the loss is good to fp32."""
    logits, targets, _ = inputs(xp, np.float32, 5, 33, 33)
    logits += 4096
    losses, _ = cross_entropy_forward(logits, targets)
    assert_close(losses, reference.cross_entropy(logits, targets), np.float32)


def test_masked_logits_have_no_probability(xp):
    logits, targets, _ = inputs(xp, np.float32, 1, 40, 40)
    logits[0, :20] = -np.inf
    targets[0] = 30
    losses = cross_entropy_forward_backward(logits, targets, xp.ones(1, np.float32))
    assert np.isfinite(reference.f64(losses)).all()
    assert not logits[0, :20].any() and logits[0, 20:].all()


def test_nan_reaches_the_loss_and_the_gradient(xp):
    """The non-finite check of a step relies on it."""
    logits, targets, _ = inputs(xp, np.float32, 2, 40, 40)
    logits[1, 3] = np.nan
    losses, _ = cross_entropy_forward(logits, targets)
    again = cross_entropy_forward_backward(logits, targets, xp.ones(1, np.float32))
    for x in (losses, again, logits[:, 0]):
        assert np.isnan(reference.f64(x)).tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_is_written_in_place_and_repeats_bitwise(xp, dtype):
    N, V, vocab_size = 4, 21, 18
    logits, targets, dlosses = inputs(xp, dtype, N, V, vocab_size)
    first = cross_entropy_forward(logits, targets, vocab_size=vocab_size)
    out = xp.full(N, np.float32(np.nan)), xp.full(N, np.float32(np.nan))
    second = cross_entropy_forward(logits, targets, vocab_size=vocab_size, out=out)
    assert second[0] is out[0] and second[1] is out[1]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))

    dlogits = xp.empty_like(logits)
    dlogits[...] = np.nan
    cross_entropy_backward(dlosses, logits, targets, first[1], vocab_size=vocab_size, out=dlogits)
    over = logits.copy()
    assert cross_entropy_backward(dlosses, over, targets, first[1], vocab_size=vocab_size, out=over) is over
    assert (over == dlogits).all()

    fused = [logits.copy(), logits.copy()]
    for x in fused:
        losses = xp.full(N, np.float32(np.nan))
        cross_entropy_forward_backward(x, targets, dlosses[:1], vocab_size=vocab_size, losses=losses)
        assert (losses == first[0]).all()
    assert (fused[0] == fused[1]).all()


def test_chunks_of_rows_give_the_bits_of_the_whole(xp):
    logits, targets, dlosses = inputs(xp, np.float32, 7, 33, 33)
    whole = logits.copy()
    losses = cross_entropy_forward_backward(whole, targets, dlosses[:1])
    for rows in (slice(0, 3), slice(3, 7)):
        part = cross_entropy_forward_backward(logits[rows], targets[rows], dlosses[:1])
        assert (part == losses[rows]).all()
    assert (logits == whole).all()


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    logits, targets, dlosses = inputs(np, np.float32, 133, 1000, 999)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            dlogits = logits.copy()
            fused = cross_entropy_forward_backward(dlogits, targets, dlosses[:1], vocab_size=999)
            losses, lse = cross_entropy_forward(logits, targets, vocab_size=999)
            results.append((fused, losses, lse, dlogits))
    finally:
        numba.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(results[0], results[-1], strict=True))


def check_sum(xp, N):
    (random,) = randn(xp, np.float32, (N,))
    for losses in (abs(random) + 3, xp.full(N, 3.1, np.float32)):  # equal terms round one way: errors add up
        total, again = sum_losses(losses), sum_losses(losses, out=xp.full(1, np.float32(np.nan)))
        assert total.shape == (1,) and (total == again).all()
        want = reference.f64(losses).sum()
        assert abs(float(total[0]) - want) <= 4 * EPS[np.dtype(np.float32)] * want


@pytest.mark.parametrize("N", [1, 7, 8, 9, 4096])
def test_sum_is_good_to_a_few_eps(xp, N):
    check_sum(xp, N)


@pytest.mark.gpu
def test_sum_of_many_losses_is_good_to_a_few_eps():
    import cupy

    check_sum(cupy, 1 << 22)


def test_rejects_wrong_shapes_dtypes_and_vocabularies(xp):
    logits, targets, dlosses = inputs(xp, np.float32, 3, 8, 8)
    with pytest.raises(InvalidValue, match=r"logits \(N, V\).*Flatten"):
        cross_entropy_forward(logits[None], targets)
    with pytest.raises(InvalidValue, match=r"targets int32 \(2,\)"):
        cross_entropy_forward_backward(logits, targets[:2], dlosses[:1])
    with pytest.raises(InvalidType, match="targets int64"):
        cross_entropy_forward(logits, targets.astype(np.int64))
    with pytest.raises(InvalidType, match="logits int32"):
        cross_entropy_forward(logits.astype(np.int32), targets)
    for vocab_size in (0, 9):
        with pytest.raises(InvalidValue, match=rf"vocab_size in 1\.\.8.*got {vocab_size}"):
            cross_entropy_forward(logits, targets, vocab_size=vocab_size)
