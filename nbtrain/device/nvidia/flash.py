"""Flash attention on tensor cores (Dao, 2023): causal, forward and backward, without a (T, T) matrix.

    y = softmax(sm_scale Q K^T) V,   lse = log(sum(exp(sm_scale Q K^T))),   a query sees keys up to itself

qkv (B, T, 3C) holds q, k and v one after the other, each with its H heads of D columns side by side, as
the QKV product leaves them; y (B, T, C); lse (B, H, T) fp32, natural logarithm. fp16 and bf16 storage,
fp32 accumulation and statistics; P and dS are rounded to storage before they are multiplied. Any T. No
float atomics: every run gives the same bits.

The same kernels multiply by wgmma where the GPU has it (compute capability 9.0) and by mma.sync from 8.0 on.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from nbtrain.device.arrays import aligned, array_module, bfloat16, expect
from nbtrain.device.capability import capability_of
from nbtrain.device.fused_attention import HEAD_DIMS as HEAD_DIMS
from nbtrain.device.fused_attention import row_groups, stats_shape, sums_shape, supported
from nbtrain.device.launching import launch
from nbtrain.device.nvidia import kernel
from nbtrain.device.nvidia.flash_backward import dkv_body, dq_body
from nbtrain.device.nvidia.flash_forward import forward_body, tall_body
from nbtrain.device.nvidia.ptx import Tiles
from nbtrain.device.reduce import sum_rows
from nbtrain.errors import InvalidValue

LOG2E = math.log2(math.e)
_STORAGE = {np.dtype(np.float16): "f16", bfloat16: "bf16"}
WGMMA, MMA = 90, 80


class Config(NamedTuple):
    """How a kernel is cut: warpgroups a block, columns of the tile that it loops over, blocks on a
    multiprocessor.
    """

    warpgroups: int
    tile: int = 64
    blocks: int = 1
    form: str = "step"  # of the forward kernel: step or tall

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups * (1 + (self.form == "tall"))


# By instruction set, then by the largest head dimension that they suit.
FORWARD = {
    WGMMA: {64: Config(1, 64, 5), 128: Config(1, 64, 2, "tall")},
    MMA: {64: Config(1, 64, 3), 96: Config(1, 64, 2), 128: Config(1, 64, 1)},
}
BACKWARD_DQ = {
    WGMMA: {64: Config(1, 64, 4), 96: Config(1, 64, 2), 128: Config(1, 64, 2)},
    MMA: {64: Config(1, 64, 2), 96: Config(1, 64, 2), 128: Config(1, 64, 1)},
}
BACKWARD_DKV = {
    WGMMA: {64: Config(1, 64, 3), 96: Config(1, 64, 2), 128: Config(1, 64, 2)},
    MMA: {64: Config(1, 64, 2), 96: Config(1, 64, 2), 128: Config(1, 64, 1)},
}
# The heads whose blocks run together are as many as have this much of what is read again and again: K and V,
# or Q and dO.
FORWARD_GROUP, DQ_GROUP, DKV_GROUP = 16 << 20, 8 << 20, 16 << 20


def instruction_set(capability: tuple[int, int] | None) -> int:
    """wgmma belongs to 9.0 alone; 10.0 and later dropped it again."""
    return WGMMA if capability == (9, 0) else MMA


def suited(table, arch: int, D: int) -> Config:
    """The table's choice for a head dimension."""
    return next(config for largest, config in table[arch].items() if D <= largest)


def _compiled(body, storage, arch, D, config: Config, **options):
    function, threads, shared_bytes = body(Tiles(storage, arch), D, **options)
    decorate = kernel(
        launch_bounds=(threads, config.blocks),
        fastmath=False,  # infinities mark what is masked
        shared_bytes=shared_bytes,
        one_architecture=arch == WGMMA,
    )
    return decorate(function), threads


@functools.cache
def forward_kernel(storage: str, arch: int, D: int, config: Config, whole: bool):
    if config.form == "tall":
        return _compiled(tall_body, storage, arch, D, config, whole=whole)
    return _compiled(forward_body, storage, arch, D, config, W=config.warpgroups, BN=config.tile, whole=whole)


@functools.cache
def dq_kernel(storage: str, arch: int, D: int, config: Config, whole: bool, with_sums: bool):
    options = dict(W=config.warpgroups, BN=config.tile, whole=whole, with_sums=with_sums)
    return _compiled(dq_body, storage, arch, D, config, **options)


@functools.cache
def dkv_kernel(storage: str, arch: int, D: int, config: Config, whole: bool, with_sums: bool):
    options = dict(W=config.warpgroups, whole=whole, with_sums=with_sums)
    return _compiled(dkv_body, storage, arch, D, config, **options)


def group_of_heads(heads: int, T: int, D: int, group_bytes: int) -> int:
    """How many heads run together where what they read again may take `group_bytes`."""
    per_head = T * D * 4  # two 16-bit tensors
    return max(1, min(heads, group_bytes // per_head))


def flash_forward(
    qkv, H: int, sm_scale: float, out, lse, *, arch=None, config=None, group_bytes=None
) -> None:
    """Writes y to `out` and `lse`. See the module for shapes; `arch`, `config` and `group_bytes` override
    what is chosen.
    """
    B, T, C, D = _check(
        "flash_forward", "qkv (B, T, C3), out (B, T, C), lse (B, H, T) fp32", H, qkv, out, lse
    )
    arch = arch or instruction_set(capability_of(qkv))
    config = config or suited(FORWARD, arch, D)
    rows, heads = config.rows, B * H
    whole = T % rows == 0 and T % config.tile == 0
    compiled, threads = forward_kernel(_STORAGE[qkv.dtype], arch, D, config, whole)
    launch(
        compiled, heads * -(-T // rows), threads,
        qkv, out, lse, T, H, heads, group_of_heads(heads, T, D, group_bytes or FORWARD_GROUP),
        np.float32(sm_scale * LOG2E),
    )  # fmt: skip


def flash_backward(
    dout,
    qkv,
    out,
    lse,
    H: int,
    sm_scale: float,
    dqkv,
    *,
    dbias=None,
    stats=None,
    arch=None,
    dq=None,
    dkv=None,
    group_bytes=None,
) -> None:
    """Writes the gradient to `dqkv`, given the `out` and `lse` of `flash_forward`, and the sum of its rows,
    before they are rounded, to `dbias` (3C,), if given.

    `stats` is working memory of `stats_shape`; `arch`, `dq`, `dkv` and `group_bytes` override what is chosen.
    """
    B, T, C, D = _check(
        "flash_backward",
        "qkv (B, T, C3), out (B, T, C), lse (B, H, T) fp32, dout (B, T, C), dqkv (B, T, C3)",
        H, qkv, out, lse, dout, dqkv,
    )  # fmt: skip
    if stats is None:
        stats = array_module(qkv).empty(stats_shape(B, T, H), np.float32)
    expect("flash_backward", f"stats {stats_shape(B, T, H)} fp32", stats)
    arch = arch or instruction_set(capability_of(qkv))
    sums = None
    if dbias is not None:
        expect("flash_backward", "dqkv (B, T, C3), dbias (C3,)", dqkv, dbias)
        sums = array_module(qkv).empty(sums_shape(B, T, C), np.float32)
    backward_dq(
        qkv, out, dout, lse, stats, dqkv, H, sm_scale, arch, dq or suited(BACKWARD_DQ, arch, D),
        group_of_heads(B * H, T, D, group_bytes or DQ_GROUP), sums,
    )  # fmt: skip
    backward_dkv(
        qkv, dout, stats, dqkv, H, sm_scale, arch, dkv or suited(BACKWARD_DKV, arch, D),
        group_of_heads(B * H, T, D, group_bytes or DKV_GROUP), sums,
    )  # fmt: skip
    if dbias is not None:
        sum_rows(sums, dbias)


def backward_dq(qkv, out, dout, lse, stats, dqkv, H, sm_scale, arch, config, group, sums=None) -> None:
    """The first half of `flash_backward`: dQ, `stats` and a third of `sums`."""
    (B, T, C), rows = out.shape, config.rows
    whole = T % rows == 0 and T % config.tile == 0
    compiled, threads = dq_kernel(_STORAGE[qkv.dtype], arch, C // H, config, whole, sums is not None)
    launch(
        compiled, B * H * -(-T // rows), threads,
        qkv, out, dout, lse, stats, dqkv, stats if sums is None else sums, T, stats.shape[2], row_groups(T),
        H, B * H, group,
        np.float32(sm_scale * LOG2E), np.float32(sm_scale), np.float32(-1 / sm_scale),
    )  # fmt: skip


def backward_dkv(qkv, dout, stats, dqkv, H, sm_scale, arch, config, group, sums=None) -> None:
    """The second half: dK and dV from `stats`, and the rest of `sums`."""
    (B, T, C), rows = dout.shape, config.rows
    compiled, threads = dkv_kernel(_STORAGE[qkv.dtype], arch, C // H, config, T % rows == 0, sums is not None)
    launch(
        compiled, B * H * -(-T // rows), threads,
        qkv, dout, stats, dqkv, stats if sums is None else sums, T, stats.shape[2], row_groups(T), H, B * H,
        group,
        np.float32(sm_scale * LOG2E), np.float32(sm_scale), np.float32(1),
    )  # fmt: skip


def _check(op, spec, H, qkv, *others):
    B, T, C3, C, heads = expect(op, spec, qkv, *others, hint="qkv is the QKV product, (B, T, 3C).")
    reason = (
        supported(qkv.dtype, C // H, 0.0, (9, 0))
        if C3 == 3 * C and C % H == 0 and heads == H
        else "3C, C and H do not fit"
    )
    if not reason and not aligned(8, qkv, *others):
        reason = "an array does not begin at a multiple of 16 bytes"
    if reason:
        raise InvalidValue(
            f"{op} expects {spec} with C = H * D; got H = {H}, qkv {qkv.shape}: {reason}. "
            "Use the portable path."
        )
    return B, T, C, C // H
