import numpy as np
import pytest

from nbtrain.errors import InvalidValue
from nbtrain.tree import TILE, Layout, Tree

ITEMS = [
    ("wte", (5, 7)),
    ("blocks.0.w", (3, 100)),
    ("blocks.0.b", (100,)),
    ("blocks.1.w", (3, 100)),
    ("blocks.1.b", (100,)),
]


def tree():
    layout = Layout.of(ITEMS)
    return Tree(layout, np.zeros(layout.size, np.float32))


def test_leaves_are_aligned_and_padding_is_not_counted():
    t = tree()
    assert [leaf.offset % TILE for leaf in t.layout.leaves] == [0] * 5
    assert t.layout.size == TILE * (1 + 2 + 1 + 2 + 1)
    assert t.n_params == 35 + 2 * 400


def test_leaves_are_views_of_one_buffer():
    t = tree()
    t.blocks[1].w[2, 99] = 7
    assert t["blocks.1.w"][2, 99] == 7 and np.count_nonzero(t.buffer) == 1
    assert len(t.blocks) == 2 and t.sections("blocks")[1].w is t.blocks[1].w
    assert [name for name, _ in t] == [name for name, _ in ITEMS]


def test_decay_is_for_matrices():
    assert tree().layout.decay_flags().tolist() == [1, 1, 1, 0, 1, 1, 0]


def test_a_missing_leaf_is_named():
    with pytest.raises(AttributeError, match=r"blocks\.0\.nope"):
        tree().blocks[0].nope  # noqa: B018
    with pytest.raises(KeyError, match="wte"):
        tree()["nope"]


def test_a_consumed_tree_refuses_use_and_its_heir_has_the_memory():
    t = tree()
    buffer = t.buffer
    heir = t.consume()
    assert heir.buffer is buffer
    for use in (lambda: t.buffer, lambda: t.wte, lambda: t.copy(), lambda: t["wte"]):
        with pytest.raises(InvalidValue, match="donated"):
            use()
    assert "donated" in repr(t)


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(InvalidValue, match="elements"):
        Tree(Layout.of(ITEMS), np.zeros(7, np.float32))
