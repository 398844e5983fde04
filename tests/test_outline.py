"""Arrays without memory: the pool's rules, and views that say what NumPy's would."""

import numpy as np
import pytest

from nbtrain.device import FLOATS, array_module, expect, launch, on_gpu
from nbtrain.device.blas import gemm
from nbtrain.device.outline import GRAIN, ROUND, Card, Pool, planned_card, planning
from nbtrain.device.place import device_of, to_device
from nbtrain.errors import InvalidValue

MB = 1 << 20


def test_a_block_given_back_is_taken_again_by_the_next_that_fits():
    card = Card()
    first = card.empty(8 * MB, np.uint8)
    address = first.data.ptr
    del first
    again = card.empty(8 * MB - 100, np.uint8)
    assert again.data.ptr == address and card.bytes == 8 * MB


def test_the_smallest_free_block_that_is_large_enough_is_cut():
    card = Card()
    blocks = [card.empty(n * MB, np.uint8) for n in (32, 8, 16)]
    addresses = [x.data.ptr for x in blocks]
    del blocks
    a, b = card.empty(6 * MB, np.uint8), card.empty(2 * MB, np.uint8)
    assert a.data.ptr == addresses[1] and b.data.ptr == addresses[1] + 6 * MB  # both from the 8
    c = card.empty(10 * MB, np.uint8)
    assert c.data.ptr == addresses[2] and card.bytes == 56 * MB


def test_neighbours_that_are_free_grow_together():
    card = Card()
    whole = card.empty(12 * MB, np.uint8)
    address = whole.data.ptr
    del whole
    parts = [card.empty(4 * MB, np.uint8) for _ in range(3)]
    for i in (0, 2, 1):  # the middle one joins both
        parts[i] = None
    assert card.empty(12 * MB, np.uint8).data.ptr == address and card.bytes == 12 * MB


def test_the_pool_gives_back_whole_blocks_alone():
    card = Card()
    kept, free = card.empty(4 * MB, np.uint8), card.empty(8 * MB, np.uint8)
    del free
    part = card.empty(2 * MB, np.uint8)  # cut from the 8
    free = card.empty(16 * MB, np.uint8)
    del free
    card.pool.free_all_blocks()
    assert card.bytes == 12 * MB and card.peak == 28 * MB and kept.nbytes + part.nbytes == 6 * MB


def test_memory_lives_as_long_as_the_last_view():
    card = Card()
    x = card.empty((4, MB), np.float32)
    address, row = x.data.ptr, x[1:].reshape(-1)
    del x
    other = card.empty((4, MB), np.float32)
    assert other.data.ptr != address and row.data.ptr == address + 4 * MB
    del row
    assert card.empty((4, MB), np.float32).data.ptr == address


def test_small_arrays_share_what_the_driver_gives():
    card = Card()
    small = [card.empty(3, np.float32) for _ in range(100)]
    assert card.small == 100 * ROUND and card.bytes == GRAIN and small[0].nbytes == 12


def test_pools_do_not_share():
    card = Card()
    x = card.empty(4 * MB, np.uint8)
    del x
    with card.using(Pool(card)):
        y = card.empty(4 * MB, np.uint8)
    assert card.bytes == 8 * MB and y.nbytes == 4 * MB


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_views_are_those_of_numpy(dtype):
    card, like = Card(), np.zeros((6, 4, 8), dtype)
    x = card.empty(like.shape, dtype)
    for view in (
        lambda a: a, lambda a: a[2], lambda a: a[1:3, ..., :5], lambda a: a[0].T, lambda a: a[None],
        lambda a: a.reshape(6, -1), lambda a: a.transpose(2, 0, 1), lambda a: a.view(np.uint8),
    ):  # fmt: skip
        got, want = view(x), view(like)
        assert got.data.ptr - x.data.ptr == want.ctypes.data - like.ctypes.data
        for name in ("shape", "dtype", "strides", "size", "ndim", "nbytes", "itemsize"):
            assert getattr(got, name) == getattr(want, name), name
        assert got.flags.c_contiguous == want.flags.c_contiguous and len(got) == len(want)


def test_what_an_array_would_refuse_an_outline_refuses():
    x = Card().empty((4, 6), np.float32)
    x[1:3] = 0
    x[...] = x[0]
    for value in (x[:2], x[0, :5], x[None]):
        with pytest.raises(InvalidValue, match=r"shape \(4, 6\)"):
            x[...] = value
    with pytest.raises(InvalidValue, match="contiguous"):
        x.T.reshape(-1)
    with pytest.raises(TypeError):
        np.add(x, x)
    with pytest.raises(IndexError):
        x[4]


def test_launchers_take_an_outline_for_an_array_on_a_gpu():
    card = Card()
    x, w = card.empty((8, 16), np.float32), card.empty((16, 4), np.float32)
    assert on_gpu(x) and array_module(x) is card and expect("op", "x (N, C), w (C, M)", x, w) == (8, 16, 4)
    launch(None, 1, 1, x)
    gemm(x, w, card.empty((8, 4), np.float32))
    with pytest.raises(InvalidValue, match="a product expects"):
        gemm(x, w, card.empty((8, 5), np.float32))


def test_a_product_keeps_its_working_memory_and_gives_back_what_measuring_took():
    card = Card((9, 0), workspace=32 * MB)
    a, b, out = (card.empty((1024, 1024), np.float32) for _ in range(3))
    gemm(a, b, out)
    assert card.bytes == (12 + 32) * MB  # it is measured on `out` itself
    for _ in range(2):
        gemm(a, b, out, beta=1.0)
    assert card.workspaces == 32 * MB and card.bytes == (12 + 32 + 4) * MB
    assert card.empty((1024, 1024), np.float32).nbytes == 4 * MB and card.bytes == 48 * MB


def test_planning_ends_with_its_block():
    card = Card()
    with planning(card):
        x = to_device(np.zeros(3, np.float32), "plan")
        assert planned_card() is card and device_of(x) == "plan" and x.shape == (3,)
    assert planned_card() is None
