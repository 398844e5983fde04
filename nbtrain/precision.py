"""Dtypes of training, and loss scaling (Micikevicius et al., 2018).

fp16 gradients below 6e-8 are zero. Multiplying the loss by a scale lifts them; the update divides it out. A
dynamic scale is as large as the gradients allow: it halves when they overflow and doubles after a run of good
steps. `nbtrain.ops.control` moves it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nbtrain.device import FLOATS, bfloat16, dtype_name
from nbtrain.device.capability import compute_capability
from nbtrain.device.place import resolve_device, say_once
from nbtrain.errors import InvalidType, InvalidValue, Unavailable

Array = Any  # numpy.ndarray or cupy.ndarray
INITIAL_DYNAMIC = 2.0**16
LARGEST = 2.0**24  # a dynamic scale grows no further


class LossScale(NamedTuple):
    value: Array  # (1,) fp32, what the loss is multiplied by
    good_steps: Array  # (1,) int32, steps in a row without overflow since the value last changed


@dataclass(frozen=True)
class LossScaling:
    """How the loss scale moves."""

    initial: float = 1.0  # a power of two, so that scaling rounds nothing
    growth_interval: int = 0  # good steps before it doubles; 0: it never moves

    def __post_init__(self):
        if isinstance(self.initial, bool) or not isinstance(self.initial, int | float):
            raise InvalidType(
                f"the loss scale must be a number; got {self.initial!r} ({type(self.initial).__name__})."
            )
        if not 0 < self.initial < math.inf or math.frexp(self.initial)[0] != 0.5:
            raise InvalidValue(
                f"the loss scale must be a power of two, so that scaling rounds nothing; got {self.initial}."
            )
        if isinstance(self.growth_interval, bool) or not isinstance(self.growth_interval, int):
            raise InvalidType(f"growth_interval counts steps, an int; got {self.growth_interval!r}.")
        if not 0 <= self.growth_interval < 2**31:
            raise InvalidValue(f"growth_interval must be in 0 … 2**31 - 1; got {self.growth_interval}.")
        if self.dynamic and not 1 <= self.initial <= LARGEST:
            raise InvalidValue(f"a dynamic loss scale moves between 1 and 2**24; got initial={self.initial}.")

    @classmethod
    def of(cls, loss_scale: float | str, dtype, growth_interval: int = 2000) -> "LossScaling":
        """From a number (static), "dynamic", or "auto": dynamic where gradients are fp16, else none (1)."""
        if loss_scale not in ("auto", "dynamic"):
            if isinstance(loss_scale, str):
                raise InvalidValue(f'the loss scale is a number, "dynamic" or "auto"; got {loss_scale!r}.')
            return cls(loss_scale)
        if loss_scale == "dynamic" or np.dtype(dtype) == np.float16:
            return cls(INITIAL_DYNAMIC, growth_interval)
        return cls()

    @property
    def dynamic(self) -> bool:
        return self.growth_interval > 0

    def init(self, xp=np) -> LossScale:
        """The state before the first step, in arrays of `xp`, numpy or cupy."""
        return LossScale(xp.full(1, self.initial, np.float32), xp.zeros(1, np.int32))


def resolve_dtype(dtype: str, device: str, capability: tuple[int, int] | None = None) -> tuple[np.dtype, str]:
    """(storage dtype, reason) for "fp32", "fp16", "bf16" or "auto" on a device "cpu", "cuda:0" or "hip:0".

    `capability` is the compute capability of an NVIDIA GPU, as (9, 0). "auto" takes bf16 from 8.0 (Ampere)
    on, fp16 with dynamic loss scaling on older and on AMD GPUs, and fp32 on the CPU.
    """
    names = ", ".join(map(repr, FLOATS))
    if not isinstance(dtype, str):
        raise InvalidType(f"dtype is a name, {names} or 'auto'; got {dtype!r} ({type(dtype).__name__}).")
    if dtype != "auto" and dtype not in FLOATS:
        raise InvalidValue(f"dtype must be {names} or 'auto'; got {dtype!r}.")
    kind = device.partition(":")[0]
    why_not_bf16 = None
    if kind in ("cpu", "hip"):
        pass
    elif capability is None:
        raise InvalidValue(f"resolve_dtype needs the compute capability of {device}, as (9, 0); got None.")
    else:
        old = tuple(capability) < (8, 0)
        version = ".".join(map(str, capability))
        why_not_bf16 = f"compute capability {version} has no bf16, which begins at 8.0" if old else None
    if dtype != "auto":
        if FLOATS[dtype] == bfloat16 and why_not_bf16:
            raise Unavailable(f"bf16 was asked for, but on {device} {why_not_bf16}. Use dtype='fp16'.")
        return FLOATS[dtype], "asked for"
    if kind == "cpu":
        return FLOATS["fp32"], "the CPU computes in fp32"
    if kind == "hip":
        return FLOATS["fp16"], "its products need nothing beside CuPy; the loss is scaled dynamically"
    if why_not_bf16:
        return FLOATS["fp16"], f"{why_not_bf16}; the loss is scaled dynamically"
    return FLOATS["bf16"], f"compute capability {version} has bf16, which needs no loss scaling"


def choose(dtype: str, device: str, say: Callable[[str], object] = say_once) -> tuple[str, np.dtype]:
    """(device, storage dtype) that these names mean here; what "auto" chose is said, with the reason."""
    place, why_device = resolve_device(device)
    storage, why_dtype = resolve_dtype(dtype, place, compute_capability(place))
    if device == "auto":
        say(f"device {place}: {why_device}")
    if dtype == "auto":
        say(f"dtype {dtype_name(storage)}: {why_dtype}")
    return place, storage
