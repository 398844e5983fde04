"""Flash attention's kernels, warp by warp on NumPy, against float64; on a GPU, the launchers."""

import math

import ml_dtypes
import numpy as np
import pytest

from nbtrain.device import FLOATS
from nbtrain.device.fused_attention import fused_attention
from nbtrain.device.nvidia import flash
from nbtrain.device.nvidia.flash_backward import dkv_body, dq_body
from nbtrain.device.nvidia.flash_forward import forward_body, tall_body
from nbtrain.errors import InvalidValue
from tests.helpers import EPS
from tests.nvidia.warps import STORAGE, Memory, WarpTiles, run
from tests.reference import attention, f64

LOG2E = math.log2(math.e)


def exact(qkv, H, sm_scale, dout):
    """(out, lse, dqkv) in float64."""
    B, T, C3 = qkv.shape
    D = C3 // 3 // H
    q, k, v = f64(qkv).reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) * sm_scale, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = e / total
    do = f64(dout).reshape(B, T, H, D).transpose(0, 2, 1, 3)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * sm_scale
    grads = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do])
    out = (p @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D)
    return out, (top + np.log(total))[..., 0], grads.transpose(1, 3, 0, 2, 4).reshape(B, T, C3)


def relative(got, want):
    got = f64(got)
    return np.sqrt(((got - want) ** 2).sum() / (want**2).sum())  # nan if anything was left unwritten


def inputs(storage, B, T, H, D, seed=0):
    rng = np.random.default_rng(seed)
    qkv = (1.5 * rng.standard_normal((B, T, 3 * H * D))).astype(STORAGE[storage])
    return qkv, rng.standard_normal((B, T, H * D)).astype(STORAGE[storage])


# Relative errors in units of the storage's epsilon: three times what correct kernels show.
LIMIT = {"f16": 2.0**-10, "bf16": 2.0**-7}


def run_forward(body, storage, arch, B, T, H, D, group=3, **options):
    qkv, dout = inputs(storage, B, T, H, D)
    sm_scale = 1 / math.sqrt(D)
    tiles = WarpTiles(storage, arch)
    kernel, threads, shared = body(tiles, D, **options)
    rows = 128 if body is tall_body else 64 * options.get("W", 1)
    memory = Memory()
    at_qkv = memory.add(qkv)
    at_out = memory.add(np.full_like(dout, np.nan))
    at_lse = memory.add(np.full((B, H, T), np.nan, np.float32))
    run(
        kernel, threads, shared, B * H * -(-T // rows), tiles, memory,
        at_qkv, at_out, at_lse, T, H, B * H, group, np.float32(sm_scale * LOG2E),
    )  # fmt: skip
    out, lse, _ = exact(qkv, H, sm_scale, dout)
    assert relative(memory.get(at_out, STORAGE[storage], out.shape), out) < LIMIT[storage]
    assert np.abs(memory.get(at_lse, np.float32, lse.shape) - lse).max() < 1e-4


@pytest.mark.parametrize(
    "body, storage, arch, B, T, H, D, options",
    [
        (forward_body, "bf16", 90, 1, 128, 2, 64, {"W": 1, "whole": True}),
        (forward_body, "f16", 90, 1, 197, 2, 64, {"W": 2}),
        (forward_body, "f16", 90, 2, 65, 2, 128, {"W": 1, "BN": 128}),
        (forward_body, "bf16", 90, 1, 70, 2, 80, {"W": 1}),
        (forward_body, "f16", 90, 1, 1, 1, 32, {"W": 1}),
        (forward_body, "f16", 80, 1, 130, 2, 64, {"W": 2}),
        (forward_body, "bf16", 80, 1, 67, 2, 96, {"W": 1}),
        (tall_body, "bf16", 90, 1, 384, 2, 128, {"whole": True}),
        (tall_body, "f16", 90, 1, 261, 1, 64, {}),
        (tall_body, "f16", 90, 1, 193, 1, 96, {}),
        (tall_body, "bf16", 90, 2, 63, 2, 80, {}),
    ],
)  # fmt: skip
def test_forward_is_exact_attention(body, storage, arch, B, T, H, D, options):
    run_forward(body, storage, arch, B, T, H, D, **options)


@pytest.mark.parametrize(
    "storage, arch, B, T, H, D, dq, dkv, whole",
    [
        ("bf16", 90, 1, 256, 1, 64, 2, 2, True),
        ("f16", 90, 1, 130, 1, 96, 1, 1, False),
        ("bf16", 90, 1, 128, 2, 64, 1, 1, True),
        ("f16", 90, 1, 197, 2, 64, 2, 2, False),
        ("f16", 90, 2, 65, 1, 128, 1, 1, False),
        ("bf16", 90, 1, 70, 2, 80, 1, 1, False),
        ("f16", 90, 1, 1, 1, 32, 1, 1, False),
        ("f16", 80, 1, 130, 1, 64, 1, 2, False),
        ("bf16", 80, 1, 67, 1, 96, 1, 1, False),
    ],
)
def test_backward_is_the_gradient(storage, arch, B, T, H, D, dq, dkv, whole):
    qkv, dout = inputs(storage, B, T, H, D)
    sm_scale = 1 / math.sqrt(D)
    out, lse, want = exact(qkv, H, sm_scale, dout)
    tiles, padded, sl = WarpTiles(storage, arch), -(-T // 128) * 128, np.float32(sm_scale * LOG2E)
    memory = Memory()
    at_qkv, at_dout = memory.add(qkv), memory.add(dout)
    at_out, at_lse = memory.add(out.astype(STORAGE[storage])), memory.add(lse.astype(np.float32))
    at_stats = memory.add(np.full((2, B * H, padded), np.nan, np.float32))
    at_dqkv = memory.add(np.full_like(qkv, np.nan))
    sums_like = np.full(flash.sums_shape(B, T, H * D), np.nan, np.float32)
    at_sums = memory.add(sums_like)
    groups = flash.row_groups(T)
    kernel, threads, shared = dq_body(tiles, D, W=dq, whole=whole, with_sums=True)
    run(
        kernel, threads, shared, B * H * -(-T // (64 * dq)), tiles, memory,
        at_qkv, at_out, at_dout, at_lse, at_stats, at_dqkv, at_sums, T, padded, groups, H, B * H, 3, sl,
        np.float32(sm_scale), np.float32(-1 / sm_scale),
    )  # fmt: skip
    kernel, threads, shared = dkv_body(tiles, D, W=dkv, whole=whole, with_sums=True)
    run(
        kernel, threads, shared, B * H * -(-T // (64 * dkv)), tiles, memory,
        at_qkv, at_dout, at_stats, at_dqkv, at_sums, T, padded, groups, H, B * H, 3, sl, np.float32(sm_scale),
        np.float32(1),
    )  # fmt: skip
    got = f64(memory.get(at_dqkv, STORAGE[storage], qkv.shape)).reshape(B, T, 3, -1)
    want = want.reshape(got.shape)
    assert np.isfinite(got).all()
    for i, name in enumerate("qkv"):
        if T > 1 or name == "v":
            assert relative(got[:, :, i], want[:, :, i]) < LIMIT[storage], f"d{name}"
    sums = f64(memory.get(at_sums, np.float32, sums_like.shape)).reshape(B, groups, 3, -1)
    rows = np.zeros((B, 16 * groups, 3, H * D))
    rows[:, :T] = got
    # Sums of 16 numbers that were rounded to storage in `got`, and not in `sums`.
    exact_sums = rows.reshape(B, groups, 16, 3, -1).sum(2)
    assert np.abs(sums - exact_sums).max() < 4 * EPS[STORAGE[storage]] * np.abs(rows).max()


def test_the_float64_reference_agrees_with_the_shared_one():
    qkv, dout = inputs("f16", 2, 5, 2, 4)
    np.testing.assert_allclose(exact(qkv, 2, 0.5, dout)[0], attention(qkv, 2, 0.5), rtol=1e-12)


def test_what_is_not_supported_has_a_reason():
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert flash.supported(bf16, 64, 0.0, (8, 0)) is None
    assert "fp16 and bf16" in flash.supported(np.dtype(np.float32), 64, 0.0, (9, 0))
    assert "63" in flash.supported(bf16, 63, 0.0, (9, 0))
    assert "dropout" in flash.supported(bf16, 64, 0.1, (9, 0))
    assert "7.5" in flash.supported(bf16, 64, 0.0, (7, 5))
    assert fused_attention(np.zeros((1, 2, 192), np.float16), 1, 0.125) is None


def test_wgmma_is_chosen_for_hopper_alone():
    chosen = [flash.instruction_set(cc) for cc in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert chosen == [flash.MMA, flash.MMA, flash.WGMMA, flash.MMA, flash.MMA]


def test_launchers_refuse_what_does_not_fit():
    qkv, out, lse = (
        np.zeros((1, 4, 192), np.float16),
        np.zeros((1, 4, 64), np.float16),
        np.zeros((1, 1, 4), np.float32),
    )
    with pytest.raises(InvalidValue, match="head dimensions"):
        flash.flash_forward(qkv[..., :189].copy(), 1, 0.1, out[..., :63].copy(), lse, arch=flash.MMA)
    with pytest.raises(InvalidValue, match="do not fit"):
        flash.flash_forward(qkv, 2, 0.1, out, lse, arch=flash.MMA)
    shifted = np.zeros(4 * 192 + 1, np.float16)[1:].reshape(1, 4, 192)
    with pytest.raises(InvalidValue, match="16 bytes"):
        flash.flash_forward(shifted, 1, 0.1, out, lse, arch=flash.MMA)
    with pytest.raises(InvalidValue, match="stats"):
        flash.flash_backward(out, qkv, out, lse, 1, 0.1, qkv, stats=lse, arch=flash.MMA)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("D", flash.HEAD_DIMS)
@pytest.mark.parametrize("T", [1, 65, 192, 1000, 1024])
def test_launchers_on_a_gpu(dtype, D, T):
    import cupy

    B, H, sm_scale = 2, 3, D**-0.5
    host_qkv, host_dout = inputs({"fp16": "f16", "bf16": "bf16"}[dtype], B, T, H, D, seed=T + D)
    qkv, dout = cupy.asarray(host_qkv), cupy.asarray(host_dout)
    module = fused_attention(qkv, H, sm_scale)
    if module is None:
        pytest.skip("this GPU has no fused attention; what was said names the reason")
    nan = {
        name: cupy.full(x.shape, np.nan, np.float32).astype(FLOATS[dtype])
        for name, x in (("y", dout), ("d", qkv))
    }
    results = []
    for _ in range(3):
        out, dqkv, lse = nan["y"].copy(), nan["d"].copy(), cupy.full((B, H, T), np.nan, np.float32)
        stats = cupy.full(module.stats_shape(B, T, H), np.nan, np.float32)
        module.flash_forward(qkv, H, sm_scale, out, lse)
        dbias = cupy.full(qkv.shape[-1], np.nan, np.float32).astype(FLOATS[dtype])
        module.flash_backward(dout, qkv, out, lse, H, sm_scale, dqkv, dbias=dbias, stats=stats)
        results.append([x.get() for x in (out, lse, dqkv, dbias)])
    for again in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results[0], again, strict=True))
    want, want_lse, want_grads = exact(host_qkv, H, sm_scale, host_dout)
    limit = LIMIT[{"fp16": "f16", "bf16": "bf16"}[dtype]]
    assert relative(results[0][0], want) < limit
    assert np.abs(results[0][1] - want_lse).max() < 1e-4
    got = f64(results[0][2]).reshape(B, T, 3, -1)
    assert np.isfinite(got).all()
    for i, name in enumerate("qkv"):
        if T > 1 or name == "v":
            assert relative(got[:, :, i], want_grads.reshape(got.shape)[:, :, i]) < limit, f"d{name}"
    # A sum of N rounded numbers, of which dk's cancel altogether, against one of the numbers themselves.
    flat = got.reshape(B * T, -1)
    error = np.abs(f64(results[0][3]) - flat.sum(0)).max()
    assert error < EPS[FLOATS[dtype]] * (np.sqrt(len(flat)) * np.abs(flat).max() + np.abs(flat.sum(0)).max())
