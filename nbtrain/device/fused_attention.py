"""Which fused attention, if any, this device has for given arguments."""

import os

import numpy as np

from nbtrain.device.arrays import aligned, bfloat16, is_cupy
from nbtrain.device.backend import TARGET
from nbtrain.device.capability import capability_of
from nbtrain.device.outline import Outline
from nbtrain.device.place import say_once
from nbtrain.device.reduce import sum_rows
from nbtrain.errors import InvalidValue, Unavailable

HEAD_DIMS = (32, 64, 80, 96, 128)
STATS_ROWS = 128  # what the backward pass works in is padded to a multiple of this many rows


def fused_attention(qkv, H: int, sm_scale, dropout: float = 0.0):
    """The module with a vendor's kernels where they suit these arguments, else None.

    It has `flash_forward(qkv, H, sm_scale, out, lse)`, `flash_backward(dout, qkv, out, lse, H, sm_scale,
    dqkv, dbias=None)`. What was chosen on a GPU is said once, with the reason; NBTRAIN_ATTENTION = fused or
    portable takes one by name.
    """
    if not is_cupy(qkv):
        return None
    asked = os.environ.get("NBTRAIN_ATTENTION", "auto")
    if asked not in ("auto", "fused", "portable"):
        raise InvalidValue(f"NBTRAIN_ATTENTION is fused, portable or auto; got {asked!r}.")
    reason = "asked for" if asked == "portable" else _why_not(qkv, H, sm_scale, dropout)
    if isinstance(qkv, Outline) and (reason or TARGET != "nvidia"):
        return None if reason else _Planned
    if reason and asked == "fused":
        raise Unavailable(
            f"NBTRAIN_ATTENTION=fused, but {reason}. Unset it to take products and softmax kernels."
        )
    if reason:
        say_once(f"attention of products and softmax kernels: {reason}")
        return None
    from nbtrain.device.nvidia import flash

    if not isinstance(qkv, Outline):
        say_once("fused attention kernels: they suit this device, dtype and head dimension")
    return flash


def supported(dtype, D: int, dropout: float, capability: tuple[int, int] | None) -> str | None:
    """None where fused kernels can do the job, else the reason why not.

    capability: an NVIDIA GPU's, as (9, 0); None for any other device.
    """
    if capability is None:
        return "there are no fused kernels for this device"
    if dtype not in (np.float16, bfloat16):
        return f"fused attention takes fp16 and bf16, not {np.dtype(dtype)}"
    if D not in HEAD_DIMS:
        return f"fused attention takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {D}"
    if dropout:
        return "fused attention has no dropout"
    if capability < (8, 0):
        return f"fused attention needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return None


def stats_shape(B: int, T: int, H: int) -> tuple[int, int, int]:
    """Of the fp32 array that the backward pass works in."""
    return 2, B * H, -(-T // STATS_ROWS) * STATS_ROWS


def row_groups(T: int) -> int:
    """Groups of 16 rows, in whole 64, of a sequence."""
    return -(-T // 64) * 4


def sums_shape(B: int, T: int, C: int) -> tuple[int, int]:
    """Of the fp32 array that the backward pass leaves the sums of 16 rows of dqkv in, where asked for."""
    return B * row_groups(T), 3 * C


class _Planned:
    """The fused kernels where they cannot be written down, for want of numba-cuda: what they allocate."""

    @staticmethod
    def flash_forward(qkv, H, sm_scale, out, lse) -> None:
        pass

    @staticmethod
    def flash_backward(dout, qkv, out, lse, H, sm_scale, dqkv, *, dbias=None) -> None:
        B, T, C3 = qkv.shape
        stats = qkv.card.empty(stats_shape(B, T, H), np.float32)  # alive, as in flash_backward
        if dbias is not None:
            sum_rows(qkv.card.empty(sums_shape(B, T, C3 // 3), np.float32), dbias)
        del stats


def _why_not(qkv, H, sm_scale, dropout) -> str | None:
    if not sm_scale > 0:
        return f"fused kernels take a positive sm_scale, not {sm_scale}"
    if not aligned(8, qkv):
        return "fused kernels read 16 bytes at a time, and qkv does not begin at a multiple of 16"
    return supported(qkv.dtype, qkv.shape[-1] // 3 // H, dropout, capability_of(qkv))
