"""Learning-rate schedules and clipping. The update itself is `nbtrain.ops.adamw`."""

import math
from dataclasses import dataclass

import numpy as np

from nbtrain.device import array_module, as_array
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.global_norm import global_norm

KINDS = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """The learning rate at every step s, counted from 0, with W = warmup, T = total and D = decay steps:

        s < W       lr (s + 1) / W
        constant    lr
        linear      min_lr + (lr - min_lr) (T - s) / (T - W)
        cosine      min_lr + (lr - min_lr) (1 + cos(pi (s - W) / (T - W))) / 2
        wsd         lr until T - D, then min_lr + (lr - min_lr) (T - s) / D

    From T on all but constant stay at min_lr. Cosine: (Loshchilov and Hutter, 2017), wsd: (Hu et al., 2024).
    """

    kind: str = "constant"
    lr: float = 6e-4
    min_lr: float = 0.0
    warmup: int = 0
    total: int = 0  # every kind but constant needs it
    decay: int = 0  # wsd alone

    def __post_init__(self):
        if self.kind not in KINDS:
            raise InvalidValue(f"a schedule is one of {', '.join(KINDS)}; got {self.kind!r}.")
        for name in ("lr", "min_lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidType(f"{name} must be a number; got {value!r} ({type(value).__name__}).")
            if not 0 <= value < math.inf:
                raise InvalidValue(f"{name} must be 0 or more, and finite; got {value}.")
        for name in ("warmup", "total", "decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidType(f"{name} counts steps, an int; got {value!r} ({type(value).__name__}).")
            if not 0 <= value < 2**31:
                raise InvalidValue(f"{name} must be in 0 … 2**31 - 1; got {value}.")
        if self.kind == "constant":
            return
        if self.min_lr > self.lr:
            raise InvalidValue(
                f"a {self.kind} schedule falls from lr to min_lr; got lr={self.lr}, min_lr={self.min_lr}. "
                "Lower min_lr."
            )
        if self.total <= self.warmup:
            raise InvalidValue(
                f"a {self.kind} schedule needs total, its steps, above warmup; got total={self.total}, "
                f"warmup={self.warmup}. Set total to the steps of the whole run."
            )
        if self.kind == "wsd" and not 1 <= self.decay <= self.total - self.warmup:
            raise InvalidValue(
                f"wsd needs decay, its last steps, in 1 … total - warmup; got decay={self.decay}, "
                f"total={self.total}, warmup={self.warmup}. A tenth of total is usual."
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        fall = self.lr - self.min_lr
        left = max(self.total - step, 0)
        if self.kind == "wsd":
            return self.min_lr + fall * min(1.0, left / self.decay)
        share = left / (self.total - self.warmup)
        if self.kind == "linear":
            return self.min_lr + fall * share
        return self.min_lr + fall * (1 + math.cos(math.pi * (1 - share))) / 2


def clip_by_global_norm(g, max_norm: float):
    """Returns `(clipped, norm)`: g * min(1, max_norm / (norm + 1e-6)) in g's dtype, and g's L2 norm.

    g: (n,) flat, unscaled. norm: (1,) fp32. A gradient that is not finite stays so: check the norm.
    """
    if not max_norm > 0:
        raise InvalidValue(
            f"max_norm must be above 0; got {max_norm}. Leave out clipping to keep every gradient."
        )
    g = as_array(g)
    norm = global_norm(g)
    factor = array_module(g).minimum(np.float32(1), np.float32(max_norm) / (norm + np.float32(1e-6)))
    return (g.astype(np.float32) * factor).astype(g.dtype), norm
