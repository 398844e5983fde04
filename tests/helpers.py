"""Shared by every op test: seeded inputs and one tolerance rule."""

import ml_dtypes
import numpy as np

from nbtrain.device import capability
from tests.reference import f64

# The spacing of each dtype just above 1.
EPS = {np.dtype(np.float32): 2.0**-23, np.dtype(np.float16): 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2.0**-7}


def randn(xp, dtype, *shapes, seed=0):
    """One standard normal array of `dtype` a shape; the same values for xp = numpy and xp = cupy."""
    rng = np.random.default_rng(seed)
    return [xp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes]


def forms_asked(monkeypatch, op, factory: str, shared_memory: int) -> list[bool]:
    """Whether each kernel that the module `op` will ask its `factory` for reads ahead, on a GPU of so many
    bytes of shared memory."""
    asked: list[bool] = []
    make = getattr(op, factory)
    monkeypatch.setattr(op, factory, lambda *key: asked.append(key[-1]) or make(*key))
    monkeypatch.setattr(capability, "shared_memory_of", lambda x: shared_memory)
    return asked


def assert_close(got, want, dtype, *, name="y", scale=1.0, floor=1e-30):
    """Max error <= scale * 16 * eps(dtype), relative to max(|want|, rms(want), floor); a nan fails.

    `floor` is the size of what `want` is a difference of, where it may cancel to nothing.
    """
    got, want = f64(got), f64(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    if not want.size:
        return
    denom = np.maximum(np.abs(want), max(np.sqrt(np.mean(want**2)), floor))
    err = np.abs(got - want) / denom
    worst = np.unravel_index(err.argmax(), err.shape)  # argmax finds a nan first
    limit = scale * 16 * EPS[np.dtype(dtype)]
    assert err.max() <= limit, (
        f"{name}[{', '.join(map(str, worst))}] = {got[worst]:.9g}, want {want[worst]:.9g}: "
        f"relative error {err.max():.2e} > {limit:.2e}; {np.mean(~(err <= limit)):.1%} of elements are off"
    )
