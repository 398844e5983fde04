import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import SIMULATED, tuned
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.global_norm import LOADS, RUN, global_norm
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
THREADS, BLOCKS = tuned("global_norm")
PIECE = THREADS * LOADS * 8  # what a block reads at once
SIZES = [1, 7, 8, 9, 256, PIECE - 1, PIECE, PIECE + 1, PIECE + 8]
BIG = (
    BLOCKS if SIMULATED else 40
) * PIECE + 264  # a second round of the persistent grid; several tasks of the twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [*SIZES, BIG])
def test_matches_float64(xp, n, dtype):
    (g,) = randn(xp, dtype, (n,))
    norm = global_norm(g)
    assert norm.dtype == np.float32
    assert_close(norm, [reference.global_norm([g])], np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt2_size_matches_float64(dtype):
    """124,475,904 elements: sums of 58 squares a thread, then trees, stay below 2 eps."""
    import cupy

    g = cupy.random.default_rng(0).standard_normal(124_475_904, np.float32).astype(dtype)
    assert_close(global_norm(g), [reference.global_norm([g])], np.float32, scale=1 / 8)


def test_many_equal_elements_do_not_drift(xp):
    """A running fp32 sum of 0.01 stops growing in step with n; trees of short sums do not."""
    n = BIG if SIMULATED else 4_000_000
    g = xp.full(n, 0.1, np.float32)
    assert_close(global_norm(g), [np.sqrt(n) * np.float64(np.float32(0.1))], np.float32, scale=1 / 4)


def test_arrays_of_different_dtypes_count_as_one(xp):
    """More of them, too, than a block of the simulator has threads."""
    parts = [randn(xp, dtype, (n,), seed=n)[0] for n in (300, 17, PIECE + 5) for dtype in DTYPES]
    parts.append(xp.empty(0, np.float32))
    assert_close(global_norm(*parts), [reference.global_norm(parts)], np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 511, -1])
def test_one_value_that_is_not_finite_shows(xp, value, where, dtype):
    (g,) = randn(np, dtype, (1031,))
    g[where] = value
    norm = float(global_norm(xp.asarray(g))[0])
    assert np.isnan(norm) if np.isnan(value) else norm == np.inf


def test_fp16_squares_do_not_overflow(xp):
    g = xp.asarray(np.array([300, -65504], np.float16))
    assert_close(global_norm(g[:1]), [300.0], np.float32)
    assert_close(global_norm(g), [np.hypot(300.0, 65504.0)], np.float32)


def test_fp16_subnormals_count(xp):
    g = xp.full(1000, 2.0**-24, np.float16)
    assert_close(global_norm(g), [np.sqrt(1000) * 2.0**-24], np.float32)


@pytest.mark.parametrize("offset", [1, 8])
def test_a_view_at_any_offset_is_read_whole(xp, offset):
    (base,) = randn(xp, np.float16, (1032,))
    g = base[offset : offset + 1016]
    assert_close(global_norm(g), [reference.global_norm([g])], np.float32)


def test_writes_out_and_nothing_else(xp):
    (g,) = randn(xp, np.float32, (777,))
    before, out = g.copy(), xp.full(1, np.nan, np.float32)
    assert global_norm(g, out=out) is out
    assert_close(out, [reference.global_norm([g])], np.float32)
    assert (g == before).all()


def test_repeated_norms_are_bitwise_equal(xp):
    (g,) = randn(xp, np.float32, (BIG,))
    assert global_norm(g) == global_norm(g)


@pytest.mark.skipif(SIMULATED, reason="threads are the CPU twin's")
def test_the_thread_count_does_not_change_the_bits():
    import numba

    (g,) = randn(np, np.float32, (100 * RUN + 3,))
    results, threads = [], numba.get_num_threads()
    try:
        for n in {1, threads}:
            numba.set_num_threads(n)
            results.append(global_norm(g))
    finally:
        numba.set_num_threads(threads)
    assert results[0] == results[-1]


def test_rejects_what_is_not_flat_or_not_float(xp):
    with pytest.raises(InvalidValue, match=r"g \(n,\).*\(3, 4\).*reshape\(-1\)"):
        global_norm(xp.zeros((3, 4), np.float32))
    with pytest.raises(InvalidType, match="g int32"):
        global_norm(xp.zeros(8, np.int32))
    with pytest.raises(InvalidValue, match="C-contiguous"):
        global_norm(xp.zeros(16, np.float32)[::2])
    with pytest.raises(InvalidType, match="out float16"):
        global_norm(xp.zeros(8, np.float32), out=xp.zeros(1, np.float16))


@pytest.mark.parametrize("gs", [(), (np.zeros(0, np.float32),)])
def test_rejects_no_elements(gs):
    with pytest.raises(InvalidValue, match="at least one element"):
        global_norm(*gs)
