"""Arrays without memory: a step walked through on them tells what it will take of a card.

An `Outline` has all that an array on a GPU has, but for its values: shape, dtype, strides, an address.
Operators take it as they take CuPy's, and what they would launch, multiply or copy is left out. A `Card`
stands for the GPU: it hands out addresses by the rules of CuPy's memory pool, so that at the end it holds
what the pool would hold, whatever code was walked.
"""

import contextlib
import math
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbtrain.errors import InvalidValue

ROUND = 512  # CuPy's pool gives out multiples of this many bytes
GRAIN = 2 << 20  # and a driver gives large blocks in multiples of this many
_card: ContextVar[Any] = ContextVar("card", default=None)


@contextlib.contextmanager
def planning(card: "Card"):
    """Inside, new arrays of the device "plan" are outlines on `card`."""
    token = _card.set(card)
    try:
        yield card
    finally:
        _card.reset(token)


def planned_card() -> "Card | None":
    """The card of the `planning` under way, else None."""
    return _card.get()


class _Block:
    """A stretch of addresses, next to others from the same request to the driver."""

    __slots__ = ("address", "size", "before", "after", "free")

    def __init__(self, address: int, size: int, before=None, after=None):
        self.address, self.size, self.before, self.after = address, size, before, after
        self.free = False

    @property
    def whole(self) -> bool:
        return self.before is None and self.after is None


class Pool:
    """CuPy's pool: the smallest free block that is large enough, cut to size, else a new one from the card;
    what comes back grows together with its free neighbours."""

    def __init__(self, card: "Card"):
        self._card = card
        self._free: set[_Block] = set()

    def take(self, n_bytes: int) -> _Block:
        size = -(-n_bytes // ROUND) * ROUND
        fitting = [b for b in self._free if b.size >= size]
        if not fitting:
            return _Block(self._card.driver_take(size), size)
        block = min(fitting, key=lambda b: (b.size, b.address))
        self._free.remove(block)
        block.free = False
        if block.size > size:
            rest = _Block(block.address + size, block.size - size, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._give(rest)
        return block

    def give_back(self, block: _Block) -> None:
        after, before = block.after, block.before
        if after is not None and after.free:
            self._free.remove(after)
            self._join(block, after)
        if before is not None and before.free:
            self._free.remove(before)
            self._join(before, block)
            block = before
        self._give(block)

    def free_all_blocks(self) -> None:
        """Gives the card back what is free as a whole."""
        for block in [b for b in self._free if b.whole]:
            self._free.remove(block)
            self._card.driver_give_back(block.size)

    def _give(self, block):
        block.free = True
        self._free.add(block)

    @staticmethod
    def _join(first, second):
        first.size, first.after = first.size + second.size, second.after
        if first.after is not None:
            first.after.before = first


class _Allocation:
    """What NumPy's views of an outline hold on to; the pool gets its block back with the last of them."""

    def __init__(self, pool: Pool, n_bytes: int):
        self._pool, self._block = pool, pool.take(n_bytes)
        # NumPy reads and writes through views alone, and `Outline` lets nobody have one.
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (n_bytes,), "data": (self._block.address, False),
        }  # fmt: skip

    def __del__(self):
        self._pool.give_back(self._block)


class Card:
    """A GPU that is not there, and the module (`empty`, `zeros`, …) that allocates outlines on it.

    capability: of an NVIDIA GPU, as (8, 0); None for others. workspace: bytes that products keep for each
    pool, where they go through a library that is given its working memory; 0 elsewhere.
    """

    def __init__(self, capability: tuple[int, int] | None = None, workspace: int = 0):
        self.capability, self.workspace_bytes = capability, workspace
        self.id = 0
        self.large = self.small = 0  # bytes that the driver holds
        self.peak = 0
        self._next = GRAIN
        self._workspaces: dict[Pool, Outline] = {}
        # (kernel, `signature_of` its arguments) in the order of first launches, for whoever puts a dict here.
        self.launches: dict[tuple, None] | None = None
        self._measured: set[tuple] = set()
        self.pool = Pool(self)

    @property
    def bytes(self) -> int:
        """What the driver has given, now."""
        return self.large + -(-self.small // GRAIN) * GRAIN

    @contextlib.contextmanager
    def using(self, pool: Pool):
        """Inside, arrays come from `pool`."""
        before, self.pool = self.pool, pool
        try:
            yield pool
        finally:
            self.pool = before

    @property
    def workspaces(self) -> int:
        """Bytes of the products' working memory."""
        return sum(x.nbytes for x in self._workspaces.values())

    def driver_take(self, size: int) -> int:
        if size >= GRAIN // 2:
            self.large += -(-size // GRAIN) * GRAIN
        else:
            self.small += size
        self.peak = max(self.peak, self.bytes)
        address, self._next = self._next, self._next + -(-size // GRAIN) * GRAIN
        return address

    def driver_give_back(self, size: int) -> None:
        if size >= GRAIN // 2:
            self.large -= -(-size // GRAIN) * GRAIN
        else:
            self.small -= size

    def product(self, a, b, out, beta: float) -> None:
        """What a product takes: its library's working memory, and where it adds to `out`, while its algorithm
        is measured for the first time, memory like `out`'s to try on."""
        if not self.workspace_bytes:
            return
        if self.pool not in self._workspaces:
            self._workspaces[self.pool] = self.empty(self.workspace_bytes, np.uint8)
        key = a.shape, a.strides, b.shape, b.strides, out.strides, out.dtype
        if beta and key not in self._measured:
            self._measured.add(key)
            self.empty(out.nbytes, np.uint8)

    # The module's functions. Values do not count.

    def empty(self, shape, dtype=np.float64) -> "Outline":
        shape, dtype = (shape,) if isinstance(shape, int | np.integer) else tuple(shape), np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        memory = np.asarray(_Allocation(self.pool, n_bytes)) if n_bytes else np.empty(0, np.uint8)
        return Outline(self, memory.view(dtype).reshape(shape))

    zeros = ones = empty

    def full(self, shape, value, dtype) -> "Outline":
        return self.empty(shape, dtype)

    def empty_like(self, x) -> "Outline":
        return self.empty(x.shape, x.dtype)

    def asarray(self, x) -> "Outline":
        return x if isinstance(x, Outline) else self.empty(x.shape, x.dtype)


class Outline:
    """An array on a `Card`: everything but values. Views share its memory, which lives as long as the last of
    them."""

    __slots__ = ("card", "_view")
    __array_ufunc__ = None  # arithmetic on it is a mistake, and says so

    def __init__(self, card: Card, view: np.ndarray):
        self.card, self._view = card, view

    shape = property(lambda self: self._view.shape)
    dtype = property(lambda self: self._view.dtype)
    strides = property(lambda self: self._view.strides)
    flags = property(lambda self: self._view.flags)
    size = property(lambda self: self._view.size)
    ndim = property(lambda self: self._view.ndim)
    nbytes = property(lambda self: self._view.nbytes)
    itemsize = property(lambda self: self._view.itemsize)
    T = property(lambda self: Outline(self.card, self._view.T))

    @property
    def data(self):
        return SimpleNamespace(ptr=self._view.__array_interface__["data"][0])

    @property
    def device(self) -> Card:
        return self.card

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        return f"Outline({self.shape}, {self.dtype})"

    def __getitem__(self, key) -> "Outline":
        return Outline(self.card, self._view[key])

    def __setitem__(self, key, value) -> None:
        target = self._view[key].shape
        given = np.shape(getattr(value, "_view", value))
        # As NumPy has it: each of the last dimensions is the target's or 1.
        if len(given) > len(target) or any(
            n not in (1, m) for n, m in zip(given[::-1], target[::-1], strict=False)
        ):
            raise InvalidValue(f"an array of shape {target} cannot be written from one of shape {given}.")

    def reshape(self, *shape) -> "Outline":
        if not self._view.flags.c_contiguous:
            raise InvalidValue("an outline that is not contiguous cannot be reshaped without a copy.")
        return Outline(self.card, self._view.reshape(*shape))

    def view(self, dtype) -> "Outline":
        return Outline(self.card, self._view.view(dtype))

    def transpose(self, *axes) -> "Outline":
        return Outline(self.card, self._view.transpose(*axes))

    def fill(self, value) -> None:
        pass

    def copy(self) -> "Outline":
        return self.card.empty_like(self)

    def astype(self, dtype) -> "Outline":
        return self.card.empty(self.shape, dtype)
