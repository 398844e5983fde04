"""Dropout's mask (Srivastava et al., 2014), for every operator that drops.

An element is kept, and scaled by 1 / (1 - p), where its random bits reach p * 2**32. The bits are a function
of where the element is (see `nbtrain.device.philox`), so masks are not stored: who needs one draws it again.
"""

from typing import NamedTuple

import numpy as np
from numba import uint32

from nbtrain.device.backend import backend, cuda
from nbtrain.device.cpu import routine
from nbtrain.device.philox import philox_cpu, random_bits8
from nbtrain.errors import InvalidType, InvalidValue

BITS_ROOM = 6  # what `draw_bits` may write around the bits that were asked for


class Dropout(NamedTuple):
    rng: object  # uint32 (3,) on the device: seed low, seed high, step
    site: int
    first: int  # the element number of row 0, column 0
    threshold: np.uint32  # an element is kept where its bits reach it
    scale: np.float32  # 1 / (1 - p), of what is kept


NO_DROPOUT = Dropout(None, 0, 0, np.uint32(0), np.float32(1))


def dropout_of(op: str, p: float, rng, site: int, first: int) -> Dropout:
    """What kernels and twins need to draw a mask; checked."""
    if not 0 <= p < 1:
        raise InvalidValue(f"{op} expects 0 <= dropout < 1; got {p}. 0 drops nothing.")
    if p == 0:
        return NO_DROPOUT
    if rng is None:
        raise InvalidType(
            f"{op} with dropout={p} expects rng, uint32 (seed low, seed high, step); got None. Pass rng=."
        )
    return Dropout(rng, site, first, np.uint32(int(p * 2**32)), np.float32(1 / (1 - p)))


@routine
def draw_bits(buf, rng, site, element, count):
    """For CPU twins: the bits of `count` elements from `element` on, in buf, uint32 (count + BITS_ROOM,)."""
    skip = element & 3
    block, step, key0, key1 = (element - skip) >> 2, rng[2], rng[0], rng[1]
    for k in range((skip + count + 3) >> 2):  # LLVM vectorizes this loop, not one over eights
        w0, w1, w2, w3 = philox_cpu(block + k, site, step, key0, key1)
        buf[4 * k] = w0
        buf[4 * k + 1] = w1
        buf[4 * k + 2] = w2
        buf[4 * k + 3] = w3
    return buf[skip : skip + count]


@backend.device_function
def _random_bits8_anywhere(dst, at, rng, site, element):
    """`random_bits8` for any element: of sixteen, the eight from there on.

    Indices are constants, so that the words stay in registers.
    """
    skip = element & 3
    words = cuda.local.array(16, uint32)
    random_bits8(words, 0, rng, site, element - skip)
    random_bits8(words, 8, rng, site, element - skip + 8)
    for j in range(8):
        low = words[j] if skip == 0 else words[j + 1]
        high = words[j + 2] if skip == 2 else words[j + 3]
        dst[at + j] = low if skip < 2 else high


# How a kernel draws: not at all; eights that begin at multiples of 4, as random_bits8 wants them; any eights.
KEEP_ALL, DROP_ALIGNED, DROP_ANYWHERE = range(3)


def drop_mode(dropout: Dropout, row_length: int) -> int:
    if dropout.rng is None:
        return KEEP_ALL
    return DROP_ALIGNED if row_length % 4 == 0 and dropout.first % 4 == 0 else DROP_ANYWHERE


def bits8_of(mode: int):
    """The device function `bits8(dst, at, rng, site, element)` of a mode that drops."""
    return random_bits8 if mode == DROP_ALIGNED else _random_bits8_anywhere
