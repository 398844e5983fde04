"""A tree of arrays in one contiguous buffer.

Leaves are views of the buffer, aligned to 256 elements; the padding between them is zero, and neither counted
nor saved. So the optimizer, the norm and a cast are one launch each at any depth, and a layer is one slice.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nbtrain.device import array_module
from nbtrain.device.place import device_of
from nbtrain.errors import InvalidType, InvalidValue

TILE = 256  # elements; a leaf begins at a multiple of it, and has weight decay or not as a whole


class Leaf(NamedTuple):
    name: str  # "blocks.3.qkv_w"
    shape: tuple[int, ...]
    offset: int  # elements from the start of the buffer

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(NamedTuple):
    """Where each leaf lies. Trees of one layout can be combined element by element."""

    leaves: tuple[Leaf, ...]
    size: int  # elements of the buffer, a multiple of TILE

    @classmethod
    def of(cls, items) -> "Layout":
        """Lays out (name, shape) pairs in their order."""
        leaves, offset = [], 0
        for name, shape in items:
            leaves.append(Leaf(name, tuple(shape), offset))
            offset += -(-leaves[-1].size // TILE) * TILE
        return cls(tuple(leaves), offset)

    @property
    def n_params(self) -> int:
        """Elements of all leaves, without padding."""
        return sum(leaf.size for leaf in self.leaves)

    def decay_flags(self) -> np.ndarray:
        """(size / TILE,) uint8: 1 where weight decay applies, in matrices and embeddings."""
        flags = np.zeros(self.size // TILE, np.uint8)
        for leaf in self.leaves:
            first = leaf.offset // TILE
            flags[first : first + -(-leaf.size // TILE)] = len(leaf.shape) >= 2
        return flags


def check_params(params: "Tree", leaves) -> None:
    """Raises unless `params` is a Tree, laid out as a config's `leaves()` are."""
    if not isinstance(params, Tree):
        raise InvalidType(
            f"params must be a Tree, as nbtrain.init and nbtrain.load give it; got {type(params).__name__}."
        )
    if params.layout != Layout.of(leaves):
        raise InvalidValue(
            f"params have {params.n_params:,} elements in another layout than this config's. Pass the config "
            "that they were made with."
        )


class Tree:
    """A buffer and the leaves in it: `tree.wte`, `tree.blocks[3].qkv_w`, `tree["blocks.3.qkv_w"]`.

    A tree given to a donated step is consumed: its memory goes to the result, and using it again is an error.
    """

    def __init__(self, layout: Layout, buffer, _views: dict | None = None):
        if buffer.shape != (layout.size,):
            raise InvalidValue(
                f"the buffer of this layout has {layout.size} elements; got shape {buffer.shape}."
            )
        self.layout = layout
        self._buffer = buffer
        self._views = {} if _views is None else _views

    @property
    def buffer(self):
        """The whole tree as one flat array."""
        if self._buffer is None:
            raise InvalidValue(
                "this tree was donated to an earlier step, which overwrote it. "
                "Pass the trees that the last step returned, or keep a copy: tree.copy()."
            )
        return self._buffer

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.dtype

    @property
    def n_params(self) -> int:
        return self.layout.n_params

    @property
    def device(self) -> str:
        """Where the arrays are: "cpu", "cuda:0", "hip:0"."""
        return device_of(self.buffer)

    def __getitem__(self, name: str):
        buffer = self.buffer
        view = self._views.get(name)
        if view is None:
            leaf = _index(self.layout).get(name)
            if leaf is None:
                names = ", ".join(leaf.name for leaf in self.layout.leaves[:8])
                raise KeyError(f"no leaf {name!r}; leaves are {names} …")
            view = self._views[name] = buffer[leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
        return view

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return _child(self, name, name)

    def __iter__(self):
        """(name, array) of every leaf, in order."""
        return ((leaf.name, self[leaf.name]) for leaf in self.layout.leaves)

    def sections(self, prefix: str) -> list[SimpleNamespace]:
        """The leaves of prefix.0, prefix.1, … as plain namespaces: for loops that run every step."""
        sections = self._views.get(prefix)
        if sections is None:
            found: dict[int, SimpleNamespace] = {}
            for name in _index(self.layout):
                first, _, rest = name.partition(".")
                number, _, leaf = rest.partition(".")
                if first == prefix:
                    setattr(found.setdefault(int(number), SimpleNamespace()), leaf, self[name])
            sections = self._views[prefix] = [found[i] for i in range(len(found))]
        return sections

    def __repr__(self) -> str:
        if self._buffer is None:
            return "Tree(donated)"
        leaves = len(self.layout.leaves)
        return f"Tree({leaves} leaves, {self.n_params:,} elements, {self.dtype} on {self.device})"

    def copy(self) -> "Tree":
        return Tree(self.layout, self.buffer.copy())

    def like(self, dtype=None) -> "Tree":
        """Zeros in this layout, on the same device."""
        return Tree(self.layout, array_module(self.buffer).zeros(self.layout.size, dtype or self.dtype))

    def alias(self) -> "Tree":
        """The same memory as another tree."""
        return Tree(self.layout, self.buffer, self._views)

    def consume(self) -> "Tree":
        """This memory as a new tree; this one refuses further use."""
        fresh = self.alias()
        self._buffer, self._views = None, {}
        return fresh


class _Branch:
    """What `tree.blocks` and `tree.blocks[3]` are: a prefix of leaf names."""

    def __init__(self, tree: Tree, prefix: str):
        self._tree, self._prefix = tree, prefix

    def __getattr__(self, name: str) -> Any:
        return _child(self._tree, f"{self._prefix}.{name}", name)

    def __getitem__(self, i: int) -> Any:
        return _child(self._tree, f"{self._prefix}.{int(i)}", str(i))

    def __len__(self) -> int:
        depth = self._prefix.count(".") + 1
        return len(
            {n.split(".")[depth] for n in _index(self._tree.layout) if n.startswith(self._prefix + ".")}
        )


def _child(tree: Tree, path: str, name: str):
    if path in _index(tree.layout):
        return tree[path]
    if path in _prefixes(tree.layout):
        return _Branch(tree, path)
    raise AttributeError(f"no leaf or branch {path!r} in this tree")


@functools.lru_cache(maxsize=64)
def _index(layout: Layout) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in layout.leaves}


@functools.lru_cache(maxsize=64)
def _prefixes(layout: Layout) -> frozenset[str]:
    parts = (leaf.name.split(".") for leaf in layout.leaves)
    return frozenset(".".join(p[:k]) for p in parts for k in range(1, len(p)))
