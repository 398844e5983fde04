import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, tuned
from nbtrain.device.philox import random_bits_cpu
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.sample import bad_logit, sample
from tests import reference

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
TILE = 8 * tuned("sample")[0]
SEED = np.array([3, 5, 0], np.uint32)
OPTIONS = [
    dict(temperature=0),
    dict(),
    dict(temperature=0.5),
    dict(top_k=3),
    dict(top_k=7, temperature=2.0),
    dict(top_p=0.6),
    dict(top_k=9, top_p=0.8, temperature=1.3),
]


def uniform(row, site=0):
    """The number that the operator draws for a row."""
    return (int(random_bits_cpu(SEED, site, row)) >> 8) / 2**24


def logits_of(N, V, dtype, seed=0, scale=2.0):
    return (scale * np.random.default_rng(seed).standard_normal((N, V))).astype(dtype)


def check(xp, logits, V=None, **options):
    """Tokens are the reference's, or its neighbours' where u lies within the rounding of the sums."""
    tokens = sample(xp.asarray(logits), xp.asarray(SEED), vocab_size=V, **options)
    assert tokens.dtype == np.int32
    for row, token in enumerate(reference.host(tokens)):
        u = uniform(row, options.get("site", 0))
        few = {k: v for k, v in options.items() if k != "site"}
        near = [reference.sample(logits[row, :V], min(max(v, 0), 1 - 2**-24), **few)
                for v in (u, u - 1e-5, u + 1e-5)]  # fmt: skip
        assert token in near, (row, token, near)


# The simulator is slow: there 16-bit storage takes the last options only.
CASES = [(o, d) for o in OPTIONS for d in DTYPES if not SIMULATED or d is np.float32 or o is OPTIONS[-1]]


@pytest.mark.parametrize("options,dtype", CASES, ids=str)
def test_tokens_are_those_of_a_sort(xp, options, dtype):
    check(xp, logits_of(1 if SIMULATED else 40, 20, dtype), **options)


@pytest.mark.parametrize("V", [1, 7, 8, TILE - 1, TILE, TILE + 1, 2 * TILE + 9])
def test_rows_of_every_length(xp, V):
    check(xp, logits_of(1 if SIMULATED else 5, V, np.float32), site=2)
    check(xp, logits_of(1 if SIMULATED else 5, V, np.float32), temperature=0)
    if not SIMULATED:
        check(xp, logits_of(5, V, np.float16), top_k=V // 2 + 1, top_p=0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [*OPTIONS, dict(top_k=200, top_p=0.95, temperature=0.8)], ids=str)
def test_gpt2_vocabulary(options, dtype):
    import cupy

    check(cupy, logits_of(64, 50304, dtype), V=50257, **options)


def test_padding_is_never_drawn(xp):
    logits = np.zeros((8, 24), np.float32)
    logits[:, 13:] = 1e4
    logits[:, 20:] = np.nan
    got = sample(xp.asarray(logits), xp.asarray(SEED), vocab_size=13, temperature=100.0)
    assert int(got.max()) < 13 and len(set(reference.host(got).tolist())) > 2


def drawn(xp, logits, draws, **options):
    """The share of each token among `draws` rows."""
    rows = xp.asarray(np.tile(np.asarray(logits, np.float32), (draws, 1)))
    tokens = reference.host(sample(rows, xp.asarray(SEED), **options))
    return np.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.skipif(SIMULATED, reason="takes thousands of rows")
def test_shares_are_the_probabilities(xp):
    """The largest deviation of 20,000 draws from p is below 5 sqrt(p (1 - p) / 20,000) < 0.018."""
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    for temperature in (0.5, 1.0, 3.0):
        want = np.exp(logits / temperature)
        got = drawn(xp, logits, 20_000, temperature=temperature)
        assert np.abs(got - want / want.sum()).max() < 0.018
    for p, kept in ((0.3, [1]), (0.51, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        want = np.where(np.isin(np.arange(4), kept), np.exp(logits), 0)
        assert np.abs(drawn(xp, logits, 20_000, top_p=p) - want / want.sum()).max() < 0.018, p


@pytest.mark.parametrize(
    "logits, options, kept",
    [
        ([1.0, 2.0, 2.0, 2.0, 0.0], dict(top_k=2), [1, 2]),
        ([2.0] * 9, dict(top_k=1), [0]),
        ([5.0] * 20, dict(top_p=0.25), [0, 1, 2, 3, 4]),
        ([5.0] * 20, dict(top_k=8, top_p=0.5), [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_exactly_k_tokens_are_kept_where_logits_are_equal(xp, logits, options, kept):
    if SIMULATED:  # one draw, by a u so near 1 that it gives the last token kept
        site = next(site for site in range(100) if uniform(0, site) > 0.97)
        tokens = sample(np.float32([logits]), SEED, site=site, **options)
        assert tokens.tolist() == kept[-1:]
    else:
        assert np.flatnonzero(drawn(xp, logits, 300, **options)).tolist() == kept


def test_the_first_of_equal_largest_logits_is_the_greedy_one(xp):
    assert sample(xp.asarray(np.float32([[1, 3, 3, 2], [0, 0, 0, 0]])), temperature=0).tolist() == [1, 0]


def test_extreme_logits_and_temperatures(xp):
    huge = xp.asarray(np.float32([[-3e38, 3e38, 2.9e38], [-3e38, -3e38, -3.1e38]]))
    assert sample(huge, xp.asarray(SEED), top_p=0.4).tolist() == [1, 0]
    assert sample(huge, xp.asarray(SEED), top_k=1).tolist() == [1, 0]
    assert sample(huge, xp.asarray(SEED), temperature=1e-40, top_p=0.5).tolist() == [1, 0]
    got = drawn(xp, [1.0, 1.001, -1e30], 1, temperature=1e-30)
    assert got.tolist() == [0, 1, 0]
    rows = np.tile(np.float32([5, -5]), (6, 1))
    got = sample(xp.asarray(rows), xp.asarray(SEED), temperature=1e300)  # the coin is fair
    assert got.tolist() == [int(uniform(row) >= 0.5) for row in range(6)] and 0 < got.sum() < 6


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_a_logit_that_is_not_finite_is_told_and_spares_other_rows(xp, value, options):
    logits = logits_of(3, 20, np.float32)
    logits[1, 13] = logits[1, 17] = value
    tokens = sample(xp.asarray(logits), xp.asarray(SEED), **options)
    at, found = bad_logit(int(tokens[1]))
    assert at == 13 and (found == value or np.isnan(value) and np.isnan(found))
    assert bad_logit(int(tokens[0])) is None and int(tokens[2]) >= 0


def test_draws_depend_on_seed_site_and_row_alone(xp):
    logits = xp.asarray(np.zeros((6, 40), np.float32))
    rng = xp.asarray(SEED)
    first = sample(logits, rng).tolist()
    assert sample(logits, rng).tolist() == first == sample(logits[:2].copy(), rng).tolist() + first[2:]
    assert sample(logits, rng, site=1).tolist() != first != sample(logits, rng + np.uint32(1)).tolist()


def test_the_result_may_go_to_an_array(xp):
    out = xp.full(2, -7, np.int32)
    assert sample(xp.asarray(np.float32([[0, 1], [1, 0]])), temperature=0, out=out) is out
    assert out.tolist() == [1, 0]


def test_rejects_what_it_cannot_take(xp):
    logits, rng = xp.zeros((2, 5), np.float32), xp.asarray(SEED)
    with pytest.raises(InvalidValue, match="vocab_size in 1 … 5.*got 6"):
        sample(logits, rng, vocab_size=6)
    with pytest.raises(InvalidValue, match="rng .* got None"):
        sample(logits)
    with pytest.raises(InvalidType, match="logits int32"):
        sample(logits.astype(np.int32), rng)
    with pytest.raises(InvalidType, match="rng int64"):
        sample(logits, rng.astype(np.int64))
    for option, values in {
        "temperature": (-1.0, np.nan, np.float16("inf"), "1", None, True, np.ones(1)),
        "top_k": (0, np.int64(0), 2.0, np.float32(2), "2", True),
        "top_p": (0.0, 1.5, np.float32(1.5), "0.5", True),
    }.items():
        for value in values:
            with pytest.raises(InvalidValue, match=f"{option} must be"):
                sample(logits, rng, **{option: value})


def test_numbers_of_numpy_are_those_of_python(xp):
    rows = np.random.default_rng(4).normal(size=(9, 50)) * 2**-17
    logits, rng = xp.asarray(rows.astype(np.float32)), xp.asarray(SEED)
    want = sample(logits, rng, temperature=2**-17, top_k=40, top_p=0.75).tolist()
    assert want != rows.argmax(1).tolist()
    for kind in (np.float16, np.float32, np.float64):  # 1 / temperature is beyond fp16
        options = dict(temperature=kind(2**-17), top_k=np.int64(40), top_p=kind(0.75))
        assert sample(logits, rng, **options).tolist() == want
    largest = (sample(logits, rng, temperature=t).tolist() for t in (10**400, 1e300))
    assert next(largest) == next(largest)
