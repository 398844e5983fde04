import numpy as np
import pytest

from nbtrain.device import tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.batch_check import batch_check, nan_if_bad
from tests import reference

THREADS, BLOCKS = tuned("batch_check")
# (A, B, T): fewer tokens than threads, as many, one more, several blocks, and more than the grid holds.
SHAPES = [(1, 1, 1), (1, 1, THREADS - 1), (2, 2, THREADS // 4), (1, 1, THREADS + 1), (3, 2, 3 * THREADS + 1),
          (1, 1, THREADS * BLOCKS + 3)]  # fmt: skip
V = 50


def batch(A, B, T, seed=0):
    """(tokens, targets) without a bad id; a fifth of the targets is ignored."""
    rng = np.random.default_rng(seed)
    tokens, targets = (rng.integers(0, V, (A, B, T)).astype(np.int32) for _ in range(2))
    targets[rng.random((A, B, T)) < 0.2] = -100
    return tokens, targets


def check(xp, tokens, targets, scale=1024.0, **options):
    """(counts, dloss) as host numbers, written over garbage."""
    out = xp.full(3, np.int32(77)), xp.full(1, np.float32(np.nan))
    arrays = (xp.asarray(a) for a in (tokens, targets, np.float32([scale])))
    counts, dloss = batch_check(*arrays, out=out, **options)
    assert counts is out[0] and dloss is out[1]
    return reference.host(counts).tolist(), reference.host(dloss)[0]


@pytest.mark.parametrize("A,B,T", SHAPES)
def test_counts_targets_and_divides_the_scale(xp, A, B, T):
    tokens, targets = batch(A, B, T)
    n = int((targets != -100).sum())
    for options in ({}, {"vocab_size": V}):
        counts, dloss = check(xp, tokens, targets, **options)
        assert counts == [n, -1, -1]
        assert dloss == np.float32(1024) / np.float32(max(n, 1))


@pytest.mark.parametrize("A,B,T", SHAPES)
def test_finds_the_first_bad_id_wherever_it_is(xp, A, B, T):
    tokens, targets = batch(A, B, T)
    targets[...] = 3
    N = tokens.size
    for at in sorted({0, N // 2, N - 1}):
        for bad in (-1, V, -(2**31), 2**31 - 1):
            worse = tokens.copy(), targets.copy()
            worse[0].flat[at:] = bad
            worse[1].flat[N - 1 - at :] = bad
            counts, _ = check(xp, *worse, vocab_size=V)
            assert counts == [N - 1 - at, at, N - 1 - at]


def test_the_two_arrays_are_told_apart(xp):
    tokens, targets = batch(2, 2, 6)
    targets[...] = 0
    tokens[1, 0, 2] = V
    assert check(xp, tokens, targets, vocab_size=V)[0] == [24, 14, -1]
    tokens[1, 0, 2], targets[0, 1, 5] = 0, -3
    assert check(xp, tokens, targets, vocab_size=V)[0] == [23, -1, 11]


def test_a_token_equal_to_ignore_index_is_bad_and_a_target_is_not(xp):
    tokens = np.full((1, 1, 2), -100, np.int32)
    assert check(xp, tokens, tokens, vocab_size=V)[0] == [0, 0, -1]
    assert check(xp, tokens, tokens, vocab_size=V, ignore_index=-1)[0] == [0, 0, 0]
    assert check(xp, tokens, tokens, ignore_index=-1)[0] == [2, -1, -1]


def test_no_counted_target_gives_a_finite_dloss(xp):
    counts, dloss = check(xp, np.zeros((1, 1, 3), np.int32), np.full((1, 1, 3), -100, np.int32), scale=8.0)
    assert counts == [0, -1, -1] and dloss == 8


@pytest.mark.gpu
def test_a_large_batch():
    import cupy

    tokens, targets = batch(16, 32, 1024)
    tokens.flat[-1] = V
    counts, _ = check(cupy, tokens, targets, vocab_size=V)
    assert counts == [int((targets != -100).sum()), tokens.size - 1, -1]


def test_takes_a_scale_without_dimensions(xp):
    tokens, targets = (xp.asarray(a) for a in batch(1, 2, 3))
    scale = xp.asarray(np.float32(6)).reshape(())
    counts, dloss = batch_check(tokens, targets, scale)
    assert counts.dtype == np.int32 and dloss.dtype == np.float32
    assert float(dloss[0]) == np.float32(6) / np.float32(int(counts[0]))


def test_rejects_wrong_shapes_and_dtypes(xp):
    tokens, targets = (xp.asarray(a) for a in batch(1, 2, 3))
    scale = xp.ones(1, np.float32)
    with pytest.raises(InvalidValue, match=r"tokens\[None\]"):
        batch_check(tokens[0], targets[0], scale)
    with pytest.raises(InvalidType, match="targets int64"):
        batch_check(tokens, targets.astype(np.int64), scale)
    with pytest.raises(InvalidType, match="loss_scale float64"):
        batch_check(tokens, targets, scale.astype(np.float64))
    with pytest.raises(InvalidValue, match=r"1\.\.2147483646 tokens; got \(1, 0, 3\)"):
        batch_check(tokens[:, :0], targets[:, :0], scale)


@pytest.mark.parametrize(
    "counts,bad", [((9, -1, -1), False), ((0, -1, -1), False), ((9, 0, -1), True), ((9, -1, 7), True)]
)
def test_a_loss_over_bad_ids_is_nan(xp, counts, bad):
    loss_sum = xp.asarray(np.float32([2.5]))
    assert nan_if_bad(loss_sum, xp.asarray(np.array(counts, np.int32))) is loss_sum
    (got,) = reference.host(loss_sum)
    assert np.isnan(got) if bad else got == 2.5


def test_a_loss_of_several_numbers_is_refused(xp):
    with pytest.raises(InvalidValue, match=r"loss_sum \(1,\)"):
        nan_if_bad(xp.zeros(2, np.float32), xp.zeros(3, np.int32))
