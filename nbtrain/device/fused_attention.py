"""Which fused attention, if any, this device has for given arguments."""

from nbtrain.device.arrays import aligned, is_cupy
from nbtrain.device.backend import TARGET


def fused_attention(qkv, H: int, sm_scale: float, dropout: float = 0.0):
    """(module, None) where a vendor's kernels suit, else (None, the reason).

    The module has `flash_forward(qkv, H, sm_scale, out, lse)`, `flash_backward(dout, qkv, out, lse, H, sm_scale, dqkv,
    stats=None)` and `stats_shape(B, T, H)`, as `nbtrain.device.nvidia.flash` describes them. All arrays must begin at multiples
    of 16 bytes, as CuPy's own do.
    """
    if TARGET != "nvidia" or not is_cupy(qkv):
        return None, "there is no fused attention for this device"
    if not sm_scale > 0:
        return None, f"fused attention takes a positive sm_scale, not {sm_scale}"
    if not aligned(8, qkv):
        return None, "fused attention reads 16 bytes at a time, and qkv does not begin at a multiple of 16"
    from nbtrain.device.nvidia import flash

    reason = flash.supported(
        qkv.dtype, qkv.shape[-1] // 3 // H, dropout, flash.device_capability(qkv.device.id)
    )
    return (None, reason) if reason else (flash, None)
