"""Random bits that are a function of where they are used: Philox4x32-10 (Salmon et al., 2011).

    bits = philox(counter = (element // 4, site, step), key = seed)[element % 4]

`rng` is a uint32 array (seed low, seed high, step) on the device; `site` is a number that names the layer and
the place in it; `element` counts elements over all micro-batches and ranks. A recomputed value and a value
computed on another device see the same bits.
"""

from typing import Any, NamedTuple

from numba import int64, uint32, uint64

from nbtrain.device.backend import backend
from nbtrain.device.cpu import njit


class Rng(NamedTuple):
    """Where in the run a micro-batch stands."""

    key: Any  # (3,) uint32 on the device: seed low, seed high, step
    row: int  # its first sequence among all of the step's, over micro-batches and ranks


def _philox(block, site, step, key0, key1):
    """The four words of one block of elements."""
    c0, c1 = uint64(block) & uint64(0xFFFFFFFF), uint64(block) >> uint64(32)
    c2, c3 = uint64(site), uint64(step)
    k0, k1 = uint64(key0), uint64(key1)
    for _ in range(10):
        p0, p1 = c0 * uint64(0xD2511F53), c2 * uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> uint64(32)) ^ c1 ^ k0,
            p1 & uint64(0xFFFFFFFF),
            (p0 >> uint64(32)) ^ c3 ^ k1,
            p0 & uint64(0xFFFFFFFF),
        )
        k0 = (k0 + uint64(0x9E3779B9)) & uint64(0xFFFFFFFF)
        k1 = (k1 + uint64(0xBB67AE85)) & uint64(0xFFFFFFFF)
    return uint32(c0), uint32(c1), uint32(c2), uint32(c3)


def _vocabulary(compile_):
    philox = compile_(_philox)

    @compile_
    def random_bits(rng, site, element):
        """The uint32 of one element."""
        w0, w1, w2, w3 = philox(int64(element) >> int64(2), site, rng[2], rng[0], rng[1])
        lane = int64(element) & int64(3)
        return (w0 if lane == 0 else w1) if lane < 2 else (w2 if lane == 2 else w3)

    @compile_
    def random_bits8(dst, at, rng, site, element):
        """dst[at : at + 8], a uint32 array = the bits of eight elements from `element` on, which is a
        multiple of 4."""
        for half in range(2):
            w0, w1, w2, w3 = philox((int64(element) >> int64(2)) + int64(half), site, rng[2], rng[0], rng[1])
            dst[at + 4 * half] = w0
            dst[at + 4 * half + 1] = w1
            dst[at + 4 * half + 2] = w2
            dst[at + 4 * half + 3] = w3

    return random_bits, random_bits8


random_bits, random_bits8 = _vocabulary(backend.device_function)
random_bits_cpu, _ = _vocabulary(njit)
philox_cpu = njit(_philox)
