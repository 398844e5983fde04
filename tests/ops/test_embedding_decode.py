import ml_dtypes
import numpy as np
import pytest

from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.embedding import embedding_forward
from nbtrain.ops.embedding_decode import embedding_decode
from tests import reference
from tests.helpers import assert_close, randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
V, P = 11, 7


def inputs(xp, dtype, B, C):
    wte, wpe = randn(xp, dtype, (V, C), (P, C))
    rng = np.random.default_rng(0)
    tokens, positions = (xp.asarray(rng.integers(0, n, B).astype(np.int32)) for n in (V, P))
    return tokens, positions, wte, wpe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,C", [(1, 3), (5, 8), (3, 33), (2, 136), (40, 16)])
def test_rows_are_the_sum_of_two_rows(xp, B, C, dtype):
    tokens, positions, wte, wpe = inputs(xp, dtype, B, C)
    out = xp.full((B, C), np.nan, dtype)
    assert embedding_decode(tokens, positions, wte, wpe, out=out) is out
    want = reference.f64(wte)[reference.host(tokens)] + reference.f64(wpe)[reference.host(positions)]
    assert_close(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_in_a_row_give_the_bits_of_the_embedding_of_a_sequence(xp, dtype):
    tokens, _, wte, wpe = inputs(xp, dtype, P, 24)
    x = embedding_decode(tokens, xp.arange(P, dtype=np.int32), wte, wpe)
    assert (x == embedding_forward(tokens[None], wte, wpe)[0]).all()


@pytest.mark.gpu
def test_gpt2_sizes_match_the_cpu():
    import cupy

    wte, wpe = randn(np, np.float16, (5000, 768), (1024, 768))
    rng = np.random.default_rng(0)
    tokens, positions = (rng.integers(0, n, 64).astype(np.int32) for n in (5000, 1024))
    got = embedding_decode(*map(cupy.asarray, (tokens, positions, wte, wpe)))
    assert (got.get() == embedding_decode(tokens, positions, wte, wpe)).all()


def test_rejects_wrong_ids_shapes_and_dtypes(xp):
    tokens, positions, wte, wpe = inputs(xp, np.float32, 3, 8)
    with pytest.raises(InvalidType, match="positions int64"):
        embedding_decode(tokens, positions.astype(np.int64), wte, wpe)
    with pytest.raises(InvalidValue, match=r"positions int32 \(2,\)"):
        embedding_decode(tokens, positions[:2], wte, wpe)
    with pytest.raises(InvalidValue, match=r"wpe float32 \(7, 4\)"):
        embedding_decode(tokens, positions, wte, xp.ascontiguousarray(wpe[:, :4]))


def test_ids_and_positions_out_of_range_are_named_on_the_host():
    tokens, positions, wte, wpe = inputs(np, np.float32, 3, 8)
    positions[2] = P
    with pytest.raises(InvalidValue, match=r"positions\[2\] = 7"):
        embedding_decode(tokens, positions, wte, wpe)
    positions[2], tokens[0] = 0, -1
    with pytest.raises(InvalidValue, match=r"tokens\[0\] = -1"):
        embedding_decode(tokens, positions, wte, wpe)
