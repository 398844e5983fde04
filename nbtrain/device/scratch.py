"""Named working memory that is made once and used again by every step."""

import math
from typing import Any

import numpy as np

from nbtrain.device.arrays import array_module


class Scratch:
    """`scratch(name, shape, dtype)` returns the same memory for the same name; it grows to the largest shape
    asked for.

    `at` is an offset in bytes, so that arrays which are not needed at the same time can lie over others.
    Contents are whatever the last user left. `like` is an array of the device that the memory shall be on.
    """

    def __init__(self, like):
        self._xp = array_module(like)
        self._buffers: dict[str, Any] = {}
        self._views: dict[tuple, Any] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype, at: int = 0):
        view = self._views.get((name, shape, dtype, at))
        if view is None:
            end = at + math.prod(shape) * np.dtype(dtype).itemsize
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < end:
                self._views = {k: v for k, v in self._views.items() if k[0] != name}
                self._buffers.pop(name, None)
                buffer = self._buffers[name] = self._xp.empty(end, np.uint8)
            view = self._views[name, shape, dtype, at] = buffer[at:end].view(dtype).reshape(shape)
        return view

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes held now, by name."""
        return {name: buffer.nbytes for name, buffer in self._buffers.items()}

    @property
    def bytes(self) -> int:
        """Memory held now."""
        return sum(self.sizes.values())
