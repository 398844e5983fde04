import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.adamw import TILE, adamw
from tests import onnx_cases, reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
# One tile; more elements than one block takes; an odd number of tiles over several tasks of the twin.
SIZES = [TILE, max(8 * tuned("adamw")[0], TILE) + TILE, 5 * TILE if SIMULATED else 517 * TILE]
BETAS, EPS = (0.9, 0.95), 1e-8


def state(xp, dtype, n, seed=0):
    """master, m, v, params, decay: v positive, tiles with and without decay."""
    master, m, v = randn(xp, np.float32, (n,), (n,), (n,), seed=seed)
    decay = xp.asarray((np.arange(n // TILE) % 3 != 1).astype(np.uint8))
    params = master if dtype == np.float32 else master.astype(dtype)
    return master, m, abs(v), params, decay


def hyper(xp, lr=1e-2, factor=0.25, skip=0.0, updates=1, betas=BETAS):
    corrections = [1 / (1 - b**updates) for b in betas]
    return xp.asarray(np.array([lr, factor, skip, *corrections, np.nan, np.nan, np.nan], np.float32))


def poisoned(xp, dtype, n):
    """Fresh arrays for `out`, all NaN: whatever is not written shows."""
    master, m, v = (xp.full(n, np.nan, np.float32) for _ in range(3))
    return master, m, v, master if dtype == np.float32 else master.astype(dtype)


def equal(got, want):
    return all((a == b).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_five_steps_match_float64(xp, n, dtype):
    master, m, v, params, decay = state(xp, dtype, n)
    m, v = 0 * m, 0 * v
    want = [reference.f64(x) for x in (master, m, v)]
    decays = np.repeat(reference.host(decay), TILE)
    for t in range(1, 6):
        (g,) = randn(xp, dtype, (n,), seed=t)
        h = hyper(xp, updates=t)
        master, m, v, params = adamw(
            g, master, m, v, params, decay, h, betas=BETAS, weight_decay=0.3, out=poisoned(xp, dtype, n)
        )
        want = reference.adamw(
            want[0],
            0.25 * reference.f64(g),
            *want[1:],
            t,
            lr=1e-2,
            betas=BETAS,
            weight_decay=0.3,
            decay=decays,
        )
        assert params.dtype == dtype and (params == master.astype(dtype)).all()
    for name, a, b in zip(("master", "m", "v"), (master, m, v), want, strict=True):
        assert_close(a, b, np.float32, name=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt2_size_matches_float64(dtype):
    import cupy

    n = 124_475_904
    master, m, v, params, decay = state(cupy, dtype, n)
    (g,) = randn(cupy, dtype, (n,), seed=1)
    decays = np.repeat(reference.host(decay), TILE)
    want = reference.adamw(master, 0.25 * reference.f64(g), m, v, 3, lr=1e-2, decay=decays)
    got = adamw(g, master, m, v, params, decay, hyper(cupy, updates=3), out=(master, m, v, params))
    assert (params == master.astype(dtype)).all()
    for name, a, b in zip(("master", "m", "v"), got[:3], want, strict=True):
        assert_close(a, b, np.float32, name=name)


@pytest.mark.parametrize("g_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_may_have_a_dtype_of_their_own(xp, dtype, g_dtype):
    master, m, v, params, decay = state(xp, dtype, TILE)
    (g,) = randn(xp, g_dtype, (TILE,), seed=1)
    got = adamw(g, master, m, v, params, decay, hyper(xp))
    want = reference.adamw(master, 0.25 * reference.f64(g), m, v, 1, lr=1e-2)
    for name, a, b in zip(("master", "m", "v"), got[:3], want, strict=True):
        assert_close(a, b, np.float32, name=name)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_gives_the_bits_of_fresh_arrays(xp, dtype, skip):
    n = SIZES[-1]
    master, m, v, params, decay = state(xp, dtype, n)
    (g,) = randn(xp, dtype, (n,), seed=1)
    before = [x.copy() for x in (g, master, m, v, params)]
    want = adamw(g, master, m, v, params, decay, hyper(xp, skip=skip), out=poisoned(xp, dtype, n))
    assert equal((g, master, m, v, params), before)  # pure
    got = adamw(g, master, m, v, params, decay, hyper(xp, skip=skip), out=(master, m, v, params))
    assert got[0] is master and got[3] is params
    assert equal(got, want) and (g == before[0]).all()
    assert (master == before[1]).all() == bool(skip)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_update_copies_and_never_reads_the_gradient(xp, dtype):
    master, m, v, params, decay = state(xp, dtype, TILE)
    g = xp.full(TILE, np.nan, np.float32).astype(dtype)
    h = xp.asarray(np.array([np.nan, np.inf, 1, np.nan, np.nan, 0, 0, 0], np.float32))
    got = adamw(g, master, m, v, params, decay, h, out=poisoned(xp, dtype, TILE))
    assert equal(got, (master, m, v, master.astype(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_update_in_place_writes_nothing(xp, dtype):
    master, m, v, params, decay = state(xp, dtype, TILE)
    if dtype != np.float32:
        params = (params + params).astype(dtype)  # not the cast of master: a write would show
    before = [x.copy() for x in (master, m, v, params)]
    (g,) = randn(xp, dtype, (TILE,), seed=1)
    adamw(g, master, m, v, params, decay, hyper(xp, skip=1.0), out=(master, m, v, params))
    assert equal((master, m, v, params), before)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_grad_clears_the_gradient_after_its_use(xp, dtype, in_place, skip):
    master, m, v, params, decay = state(xp, dtype, SIZES[1])
    (g,) = randn(xp, dtype, (SIZES[1],), seed=1)
    h = hyper(xp, skip=skip)
    want = adamw(g, master, m, v, params, decay, h)
    assert (g != 0).any()
    out = (master, m, v, params) if in_place else None
    got = adamw(g, master, m, v, params, decay, h, zero_grad=True, out=out)
    assert equal(got, want) and (g == 0).all()


def test_zero_gradients_only_decay(xp):
    """Weight decay 0.1, lr 1: biases and LayerNorm stay as they are, matrices shrink to 0.9."""
    master, _, _, params, decay = state(xp, np.float16, 3 * TILE)
    m, v, g = (xp.zeros(3 * TILE, np.float32) for _ in range(3))
    new, *moments, _ = adamw(g, master, m, v, params, decay, hyper(xp, lr=1.0), weight_decay=0.1)
    assert (new[TILE : 2 * TILE] == master[TILE : 2 * TILE]).all()
    for part in (slice(0, TILE), slice(2 * TILE, None)):
        assert_close(new[part], 0.9 * reference.f64(master[part]), np.float32)
    assert not any(x.any() for x in moments)


def test_padding_stays_zero(xp):
    zeros = xp.zeros(TILE, np.float32)
    decay = xp.ones(1, np.uint8)
    for x in adamw(zeros, zeros, zeros, zeros, zeros.astype(np.float16), decay, hyper(xp)):
        assert not x.any()


def test_a_small_decay_keeps_its_digits(xp):
    """lr * weight_decay = 1e-6, on average to 0.4%: roundings of master cancel; that of 1 - 1e-6 is 1.3%."""
    n = 10 * TILE
    master = xp.asarray(np.linspace(1, 2, n, endpoint=False, dtype=np.float32))
    m, v, g = (xp.zeros(n, np.float32) for _ in range(3))
    new, *_ = adamw(g, master, m, v, master, xp.ones(10, np.uint8), hyper(xp, lr=1e-5))
    before = reference.f64(master)
    assert abs(np.mean((before - reference.f64(new)) / before) - 1e-6) < 4e-9


@onnx_cases.each(onnx_cases.adam_cases)
def test_matches_onnx_adam(xp, case):
    i, n = case.inputs, case.inputs.p.size
    p, g, m, v = (xp.asarray(np.pad(x, (0, TILE - n))) for x in (i.p, i.g, i.m, i.v))
    h = hyper(xp, lr=i.lr, factor=1.0, updates=i.updates, betas=i.betas)
    got = adamw(g, p, m, v, p, xp.zeros(1, np.uint8), h, betas=i.betas, eps=i.eps)
    for name, a in zip("pmv", got, strict=False):
        assert_close(a[:n], getattr(case.outputs, name), np.float32, name=name)


def test_a_view_at_an_odd_offset_gives_the_same_bits(xp):
    master, m, v, params, decay = state(xp, np.float16, 2 * TILE)
    (g,) = randn(xp, np.float16, (2 * TILE,), seed=1)
    want = adamw(g, master, m, v, params, decay, hyper(xp))
    shifted = xp.zeros(2 * TILE + 1, np.float16)
    shifted[1:] = g
    assert equal(adamw(shifted[1:], master, m, v, params, decay, hyper(xp)), want)


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    master, m, v, params, decay = state(np, np.float32, SIZES[-1])
    (g,) = randn(np, np.float32, (SIZES[-1],), seed=1)
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(adamw(g, master, m, v, params, decay, hyper(np)))
    finally:
        numba.set_num_threads(threads)
    assert equal(results[0], results[-1])


def test_rejects_sizes_that_do_not_fit(xp):
    master, m, v, params, decay = state(xp, np.float16, 2 * TILE)
    g, h = master, hyper(xp)
    with pytest.raises(InvalidValue, match="n = 512 and 1 flags"):
        adamw(g, master, m, v, params, decay[:1], h)
    with pytest.raises(InvalidValue, match=r"m float32 \(256,\)"):
        adamw(g, master, m[:TILE], v, params, decay, h)
    with pytest.raises(InvalidValue, match=r"hyper float32 \(5,\)"):
        adamw(g, master, m, v, params, decay, h[:5])
    with pytest.raises(InvalidType, match="m float16"):
        adamw(g, master, m.astype(np.float16), v, params, decay, h)
    with pytest.raises(InvalidType, match="params float32"):
        adamw(g, master, m, v, params, decay, h, out=(master, m, v, master))


@pytest.mark.parametrize(
    "options", [dict(betas=(1.0, 0.95)), dict(betas=(0.9, -0.1)), dict(eps=0.0), dict(weight_decay=np.nan)]
)
def test_rejects_numbers_that_cannot_be_right(options):
    master, m, v, params, decay = state(np, np.float32, TILE)
    with pytest.raises(InvalidValue, match="betas in"):
        adamw(master, master, m, v, params, decay, hyper(np), **options)
