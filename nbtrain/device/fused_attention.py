"""Which fused attention, if any, this device has for given arguments."""

import os

from nbtrain.device.arrays import aligned, is_cupy
from nbtrain.device.backend import TARGET
from nbtrain.device.place import say_once
from nbtrain.errors import InvalidValue, Unavailable


def fused_attention(qkv, H: int, sm_scale, dropout: float = 0.0):
    """The module with a vendor's kernels where they suit these arguments, else None.

    It has `flash_forward(qkv, H, sm_scale, out, lse)`, `flash_backward(dout, qkv, out, lse, H, sm_scale,
    dqkv)`. What was chosen on a GPU is said once, with the reason; NBTRAIN_ATTENTION = fused or portable
    takes one by name.
    """
    if not is_cupy(qkv):
        return None
    asked = os.environ.get("NBTRAIN_ATTENTION", "auto")
    if asked not in ("auto", "fused", "portable"):
        raise InvalidValue(f"NBTRAIN_ATTENTION is fused, portable or auto; got {asked!r}.")
    reason = "asked for" if asked == "portable" else _why_not(qkv, H, sm_scale, dropout)
    if reason and asked == "fused":
        raise Unavailable(
            f"NBTRAIN_ATTENTION=fused, but {reason}. Unset it to take products and softmax kernels."
        )
    if reason:
        say_once(f"attention of products and softmax kernels: {reason}")
        return None
    from nbtrain.device.nvidia import flash

    say_once("fused attention kernels: they suit this device, dtype and head dimension")
    return flash


def _why_not(qkv, H, sm_scale, dropout) -> str | None:
    if TARGET != "nvidia":
        return "there are no fused kernels for this device"
    if not sm_scale > 0:
        return f"fused kernels take a positive sm_scale, not {sm_scale}"
    if not aligned(8, qkv):
        return "fused kernels read 16 bytes at a time, and qkv does not begin at a multiple of 16"
    from nbtrain.device.nvidia import flash

    return flash.supported(
        qkv.dtype, qkv.shape[-1] // 3 // H, dropout, flash.device_capability(qkv.device.id)
    )
