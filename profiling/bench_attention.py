"""Flash attention beside PyTorch's, on one GPU: us a call, TFLOP/s, error, repeatability.

    python profiling/bench_attention.py                  everything, under 2 minutes; rows in attention.jsonl
    python profiling/bench_attention.py --part backward  one part of what PARTS names

12 heads (6 of 128), T = 1024, causal; TFLOP/s count half the square, and 2.5 times the forward for the
backward. Times are CUDA events around each call of a full queue, the median of 20. Every part is a
process of its own with a time limit: a part that hangs or crashes does not stop the others. Needs PyTorch
with CUDA.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PARTS = {
    "peers": 60,
    "in_step": 60,
    "pipelines": 60,
    "backward": 60,
    "accuracy": 90,
    "old": 60,
}  # seconds each may take
MB = 1 << 20
GROUPS = {"8M": 8 * MB, "16M": 16 * MB, "32M": 32 * MB, "all": 1 << 60}
T = 1024
HEADS = {64: 12, 128: 6, 32: 24, 80: 10, 96: 8}
DTYPES = ("bf16", "fp16")


def forward_configs(D):
    """({name: Config} without mbarriers, {name: Config} with)."""
    from nbtrain.device.nvidia.flash import Config

    if D == 64:
        plain = [
            Config(1, 64, 4), Config(2, 64, 2), Config(1, 64, 4, in_registers=True),
            Config(2, 64, 2, in_registers=True),
            Config(2, 128, 1), Config(1, 128, 3), Config(4, 64, 1),
        ]  # fmt: skip
        piped = [
            Config(2, 64, 2, 3, True), Config(3, 64, 1, 4, True), Config(3, 64, 1, 4, True, overlap=True),
            Config(4, 64, 1, 4, True), Config(2, 128, 1, 3, True), Config(2, 128, 1, 2, True, overlap=True),
            Config(2, 64, 2, 4), Config(2, 64, 2, 4, overlap=True), Config(2, 64, 2, 3, overlap=True),
            Config(2, 64, 2, 5, overlap=True), Config(4, 64, 1, 4), Config(4, 64, 1, 4, overlap=True),
            Config(4, 64, 1, 6, overlap=True), Config(1, 64, 3, 3, overlap=True), Config(2, 128, 1, 3),
            Config(2, 128, 1, 3, overlap=True), Config(2, 64, 2, 4, in_registers=True),
        ]  # fmt: skip
    else:
        plain = [Config(1, 64, 2), Config(2, 64, 1), Config(2, 128, 1), Config(1, 64, 2, in_registers=True)]
        piped = [
            Config(2, 64, 1, 3, True), Config(3, 64, 1, 3, True), Config(2, 128, 1, 2, True),
            Config(2, 64, 1, 3),
            Config(1, 64, 2, 3), Config(2, 64, 1, 3, True, overlap=True), Config(2, 64, 1, 4, overlap=True),
            Config(1, 64, 2, 3, overlap=True),
        ]  # fmt: skip
    return plain, piped


def backward_configs(D):
    """([Config] of dQ, [Config] of dK dV)."""
    from nbtrain.device.nvidia.flash import Config

    if D == 64:
        dq = [
            Config(1, 64, 4), Config(2, 64, 2), Config(1, 64, 3), Config(1, 64, 3, in_registers=True),
            Config(2, 64, 1, in_registers=True), Config(1, 128, 2), Config(2, 128, 1),
            Config(2, 64, 2, 4), Config(1, 64, 3, 4), Config(2, 64, 1, 4, in_registers=True),
        ]  # fmt: skip
        dkv = [
            Config(1, 64, 3), Config(2, 64, 1), Config(1, 64, 2), Config(1, 64, 2, in_registers=True),
            Config(2, 64, 1, in_registers=True), Config(2, 64, 1, 4), Config(2, 64, 1, 4, in_registers=True),
            Config(1, 64, 2, 4, in_registers=True),
        ]  # fmt: skip
    else:
        dq = [
            Config(1, 64, 2), Config(2, 64, 1), Config(1, 64, 2, in_registers=True), Config(2, 64, 1, 3),
            Config(2, 64, 1, 4),
        ]  # fmt: skip
        dkv = [Config(1, 64, 2), Config(2, 64, 1), Config(2, 64, 1, 3), Config(2, 64, 1, 4)]
    return dq, dkv


def label(config) -> str:
    how = "warp" if config.copying_warp else "drift" if config.stages else "step"
    extra = f" {config.stages}st" if config.stages else ""
    return (
        f"{how}({config.warpgroups},{config.tile},{config.blocks}){extra}"
        f"{' regs' if config.in_registers else ''}{' overlap' if config.overlap else ''}"
    )


# ----------------------------------------------------------------------------
# Compiling ahead, on all cores


def compile_one(job):
    """Compiles one kernel into the cache on disk. job: (kind, storage, arch, D, config, whole)."""
    from numba import typeof

    from nbtrain.device import nvidia, recording
    from nbtrain.device.arrays import bfloat16
    from nbtrain.device.binaries import cached_binary
    from nbtrain.device.nvidia import flash

    kind, storage, arch, D, config, whole = job
    dtype = np.dtype(np.float16) if storage == "f16" else bfloat16
    t = 1536 if whole else 1000
    qkv, out = np.empty((1, t, 3 * D), dtype), np.empty((1, t, D), dtype)
    lse, stats = np.empty((1, 1, t), np.float32), np.empty(flash.stats_shape(1, t, 1), np.float32)
    with recording() as records:
        if kind == "forward":
            flash.flash_forward(qkv, 1, 0.125, out, lse, arch=arch, config=config)
        elif kind == "dq":
            flash.backward_dq(qkv, out, out, lse, stats, qkv, 1, 0.125, arch, config, 1)
        else:
            flash.backward_dkv(qkv, out, stats, qkv, 1, 0.125, arch, config, 1)
    ((kernel, args, _, _),) = records
    types = tuple(typeof(x) for x in args)
    entry, binary = cached_binary(
        kernel, types, nvidia._architecture(), lambda: nvidia._compile_binary(kernel, types)
    )
    return len(binary)


def all_jobs():
    from nbtrain.device.nvidia import flash

    jobs = {}

    def add(kind, storage, arch, D, config, whole):
        jobs[kind, storage, arch, D, config, whole] = None

    for D in (64, 128):
        plain, piped = forward_configs(D)
        for config in plain + piped:
            add("forward", "bf16", 90, D, config, T % (64 * config.warpgroups) == 0)
        dq, dkv = backward_configs(D)
        for config in dq:
            add("dq", "bf16", 90, D, config, True)
        for config in dkv:
            add("dkv", "bf16", 90, D, config, True)
    for arch in (90, 80):
        for D in HEADS:
            for storage in ("f16", "bf16"):
                for whole in (True, False):
                    if arch == 80 and (D not in (64, 128) or storage == "f16"):
                        continue
                    add("forward", storage, arch, D, flash._suited(flash.FORWARD, arch, D), whole)
                    add("dq", storage, arch, D, flash._suited(flash.BACKWARD_DQ, arch, D), whole)
                    add("dkv", storage, arch, D, flash._suited(flash.BACKWARD_DKV, arch, D), whole)
    return list(jobs)


def compile_ahead(limit_s=75):
    begin, failed = time.time(), 0
    jobs = all_jobs()
    workers = min(os.cpu_count() or 1, 14)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    futures = {pool.submit(compile_one, job): job for job in jobs}
    done, late = wait(futures, timeout=limit_s)
    for future in done:
        if error := future.exception():
            failed += 1
            print("!! compile", futures[future], repr(error)[:600], flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    print(
        f"{len(done) - failed} of {len(jobs)} kernels compiled by {workers} processes",
        f"in {time.time() - begin:.0f} s",
        flush=True,
    )


# ----------------------------------------------------------------------------
# Measuring


class Case:
    """Inputs and outputs of one size, as torch tensors and as the CuPy arrays that share their memory."""

    def __init__(self, B, t, H, D, dtype, seed=0):
        import torch

        from nbtrain.device.nvidia import flash

        self.B, self.T, self.H, self.D, self.dtype = B, t, H, D, dtype
        self.torch_dtype = torch.float16 if dtype == "fp16" else torch.bfloat16
        generator = torch.Generator(device="cuda").manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)  # noqa: E731
        self.qkv = (1.2 * normal(B, t, 3 * H * D)).to(self.torch_dtype)
        self.dout = normal(B, t, H * D).to(self.torch_dtype)
        self.out, self.dqkv = torch.empty_like(self.dout), torch.empty_like(self.qkv)
        self.lse = torch.empty(B, H, t, device="cuda")
        self.stats = torch.empty(flash.stats_shape(B, t, H), device="cuda")
        self.sm_scale = 1 / math.sqrt(D)
        self.poison()
        names = ("qkv", "dout", "out", "dqkv", "lse", "stats")
        self.c = {name: self.cupy(getattr(self, name)) for name in names}

    def cupy(self, x):
        import cupy
        import torch

        from nbtrain.device.arrays import FLOATS

        if x.dtype == torch.float32:
            return cupy.from_dlpack(x)
        return cupy.from_dlpack(x.view(torch.int16)).view(FLOATS[self.dtype])

    def poison(self):
        for x in (self.out, self.dqkv, self.lse, self.stats):
            x.fill_(float("nan"))

    def forward(self, **options):
        from nbtrain.device.nvidia import flash

        c = self.c
        flash.flash_forward(c["qkv"], self.H, self.sm_scale, c["out"], c["lse"], **options)

    def backward(self, **options):
        from nbtrain.device.nvidia import flash

        c = self.c
        flash.flash_backward(
            c["dout"],
            c["qkv"],
            c["out"],
            c["lse"],
            self.H,
            self.sm_scale,
            c["dqkv"],
            stats=c["stats"],
            **options,
        )

    def dq(self, config, group_bytes, arch=90):
        from nbtrain.device.nvidia import flash

        c, group = self.c, flash._group(self.B * self.H, self.T, self.D, group_bytes or 16 * MB)
        flash.backward_dq(
            c["qkv"],
            c["out"],
            c["dout"],
            c["lse"],
            c["stats"],
            c["dqkv"],
            self.H,
            self.sm_scale,
            arch,
            config,
            group,
        )

    def dkv(self, config, group_bytes, arch=90):
        from nbtrain.device.nvidia import flash

        c, group = self.c, flash._group(self.B * self.H, self.T, self.D, group_bytes or 16 * MB)
        flash.backward_dkv(
            c["qkv"], c["dout"], c["stats"], c["dqkv"], self.H, self.sm_scale, arch, config, group
        )

    def heads(self, qkv=None):
        """q, k, v (B, H, T, D), views of the packed tensor."""
        x = (self.qkv if qkv is None else qkv).view(self.B, self.T, 3, self.H, self.D)
        return [x[:, :, i].transpose(1, 2) for i in range(3)]

    def reference(self):
        """(out, lse, dqkv) in float64, a few sequences at a time."""
        import torch

        outs, lses, grads = [], [], []
        mask = torch.ones(self.T, self.T, dtype=torch.bool, device="cuda").tril()
        for b in range(self.B):
            x = self.qkv[b : b + 1].double().requires_grad_(True)
            q, k, v = [y.transpose(1, 2) for y in x.view(1, self.T, 3, self.H, self.D).unbind(2)]
            s = (q @ k.transpose(-1, -2) * self.sm_scale).masked_fill(~mask, -math.inf)
            o = (s.softmax(-1) @ v).transpose(1, 2).reshape(1, self.T, -1)
            (g,) = torch.autograd.grad(o, x, self.dout[b : b + 1].double())
            outs.append(o.detach())
            lses.append(s.logsumexp(-1).detach())
            grads.append(g)
        return torch.cat(outs), torch.cat(lses), torch.cat(grads)

    def peer(self, backend):
        """(out, dqkv) of PyTorch's attention."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        x = self.qkv.detach().clone().requires_grad_(True)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            o = torch.nn.functional.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        o = o.transpose(1, 2).reshape(self.B, self.T, -1)
        (g,) = torch.autograd.grad(o, x, self.dout)
        return o.detach(), g


def relative(a, b) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def time_us(call, n=20) -> float:
    """Median over CUDA events; the queue is filled behind a spin first, so that launches cost nothing."""
    import torch

    call()
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    torch.cuda._sleep(int(min(0.1, 2 * host * n + 0.001) * 1.8e9))
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in events])) * 1e3


def tflops(us, B, H, D, backward=False) -> float:
    return 4 * B * H * T * T * D / 2 * (2.5 if backward else 1) / us / 1e6


def guarded(function, *args):
    try:
        return function(*args)
    except Exception:
        print(
            f"!! {getattr(function, '__name__', function)}{args[:3]}:\n{traceback.format_exc()[-1800:]}",
            flush=True,
        )
        return None


class Rows:
    def __init__(self, path):
        self.path = path

    def add(self, **row):
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        us = row.get("us")
        text = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("us",))
        print(f"   {text}" + (f"  {us:8.1f} us" if us else ""), flush=True)


# ----------------------------------------------------------------------------
# Parts


def part_peers(rows):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    for D in (64, 128):
        for B in (16, 32, 64):
            for dtype in DTYPES:
                for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):

                    def one(D=D, B=B, dtype=dtype, backend=backend):
                        case = Case(B, T, HEADS[D], D, dtype)
                        q, k, v = [x.detach().requires_grad_(True) for x in case.heads()]
                        do = case.dout.view(B, T, HEADS[D], D).transpose(1, 2)
                        with sdpa_kernel(getattr(SDPBackend, backend)):
                            with torch.no_grad():
                                forward = time_us(lambda: attention(q, k, v, is_causal=True))
                            o = attention(q, k, v, is_causal=True)
                            backward = time_us(
                                lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
                            )
                        who = backend.split("_")[0].lower()
                        rows.add(what="forward", who=who, D=D, B=B, dtype=dtype, us=forward)
                        rows.add(what="backward", who=who, D=D, B=B, dtype=dtype, us=backward)

                    guarded(one)


def repeats(call, outputs, n=8) -> bool:
    import torch

    call()
    first = [x.clone() for x in outputs]
    same = True
    for _ in range(n):
        call()
        same = same and all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))
    return same


def by_group(call) -> dict[str, float]:
    """us for each way of grouping heads; `call` takes the group's bytes."""
    return {name: time_us(functools.partial(call, n)) for name, n in GROUPS.items()}


def add_sweep(rows, what, case, config, us):
    best = min(us, key=us.get)
    rows.add(
        what=what, who="nbtrain", D=case.D, B=case.B, dtype=case.dtype, config=label(config), group=best,
        us=us[best],        groups=" ".join(f"{name}:{t:.1f}" for name, t in us.items()),
    )  # fmt: skip


def forward_is_right(case, want, want_lse, config) -> bool:
    case.poison()
    same = repeats(lambda: case.forward(config=config), (case.out, case.lse))
    error, error_lse = relative(case.out, want), relative(case.lse, want_lse)
    right = error < 4e-3 and error_lse < 1e-5 and same
    if not right:
        print(
            f"!! {label(config)} D={case.D} WRONG: {error:.2e}, lse {error_lse:.2e}, repeats {same}",
            flush=True,
        )
    return right


def sweep_forward(rows, case, config):
    us = by_group(lambda n: case.forward(config=config, group_bytes=n))
    add_sweep(rows, "forward", case, config, us)


def forward_sweep(rows, which):
    for D in (64, 128):
        case = Case(2, T, HEADS[D], D, "bf16", seed=1)
        want, want_lse, _ = case.reference()
        good = [c for c in forward_configs(D)[which] if guarded(forward_is_right, case, want, want_lse, c)]
        for B in (16, 32, 64):
            case = Case(B, T, HEADS[D], D, "bf16")
            for config in good:
                guarded(sweep_forward, rows, case, config)


def part_in_step(rows):
    forward_sweep(rows, 0)


def part_pipelines(rows):
    forward_sweep(rows, 1)


def backward_is_right(case, want, kind, config, dq_config) -> bool:
    case.dqkv.zero_()
    case.dq(dq_config, None)
    call = getattr(case, kind)
    same = repeats(lambda: call(config, None), (case.dqkv, case.stats))
    got = case.dqkv.view(case.B, T, 3, -1)
    errors = [relative(got[:, :, i], want[:, :, i]) for i in ((0,) if kind == "dq" else (1, 2))]
    right = max(errors) < 5e-3 and same
    if not right:
        print(f"!! {kind} {label(config)} D={case.D} WRONG: {errors}, repeats {same}", flush=True)
    return right


def sweep_backward(rows, case, kind, config):
    call = getattr(case, kind)
    add_sweep(rows, kind, case, config, by_group(lambda n: call(config, n)))


def part_backward(rows):
    for D in (64, 128):
        case = Case(2, T, HEADS[D], D, "bf16", seed=1)
        want = case.reference()[2].view(2, T, 3, -1)
        case.forward()
        configs = dict(zip(("dq", "dkv"), backward_configs(D), strict=True))
        dq_config = configs["dq"][0]
        good = [
            (kind, config)
            for kind in configs
            for config in configs[kind]
            if guarded(backward_is_right, case, want, kind, config, dq_config)
        ]
        for B in (16, 32, 64):
            case = Case(B, T, HEADS[D], D, "bf16")
            case.forward()
            case.dq(dq_config, None)
            for kind, config in good:
                guarded(sweep_backward, rows, case, kind, config)


def accuracy(rows, arch, D, dtype, B, t, H):
    import torch

    case = Case(B, t, H, D, dtype, seed=t + D)
    out, lse, grad = case.reference()
    case.forward(arch=arch)
    case.backward(arch=arch)
    torch.cuda.synchronize()

    def errors(y, dqkv):
        parts = zip(dqkv.view(B, t, 3, -1).unbind(2), grad.view(B, t, 3, -1).unbind(2), strict=True)
        return [relative(y, out), *(relative(x, want) for x, want in parts)]

    def both():
        case.forward(arch=arch)
        case.backward(arch=arch)

    ours, theirs = errors(case.out, case.dqkv), guarded(case.peer, "FLASH_ATTENTION")
    peers = [float("nan")] * 4 if theirs is None else errors(*theirs)
    same = repeats(both, (case.out, case.lse, case.dqkv), 5)
    # the gradients of q and k vanish at T = 1: there is nothing to be relative to
    counted = [(ours[i], peers[i]) for i in ((0, 3) if t == 1 else range(4))]
    ok = (
        same
        and relative(case.lse, lse) < 1e-5
        and all(a <= 2 * b if b == b else a < 1e-2 for a, b in counted)
    )
    rows.add(
        what="accuracy", who="nbtrain", arch=arch, D=D, dtype=dtype, T=t, ok=ok, repeats=same,
        ours=" ".join(f"{x:.1e}" for x in ours), flash=" ".join(f"{x:.1e}" for x in peers),
    )  # fmt: skip


def part_accuracy(rows):
    for D in HEADS:
        for dtype in DTYPES:
            for t in (1024, 1000, 65, 1):
                guarded(accuracy, rows, 90, D, dtype, 2, t, 4)
    for t in (3, 7, 127, 192, 1023):
        guarded(accuracy, rows, 90, 64, "bf16", 2, t, 4)
    for D in (64, 128):  # the launchers as they choose now
        for B in (16, 32):
            for dtype in DTYPES:

                def one(D=D, B=B, dtype=dtype):
                    case = Case(B, T, HEADS[D], D, dtype)
                    case.forward()
                    rows.add(
                        what="chosen forward", who="nbtrain", D=D, B=B, dtype=dtype, us=time_us(case.forward)
                    )
                    rows.add(
                        what="chosen backward",
                        who="nbtrain",
                        D=D,
                        B=B,
                        dtype=dtype,
                        us=time_us(case.backward),
                    )

                guarded(one)


def part_old(rows):
    """mma.sync, what GPUs from compute capability 8.0 on run."""
    for D in (64, 128):
        for t in (1024, 1000, 65):
            guarded(accuracy, rows, 80, D, "bf16", 2, t, 4)

        def one(D=D):
            case = Case(16, T, HEADS[D], D, "bf16")
            case.forward(arch=80)
            for what, call in (("forward", case.forward), ("backward", case.backward)):
                rows.add(
                    what=f"mma.sync {what}",
                    who="nbtrain",
                    D=D,
                    B=16,
                    dtype="bf16",
                    us=time_us(lambda c=call: c(arch=80)),
                )

        guarded(one)


# ----------------------------------------------------------------------------


def summary(rows):
    print("\n== best of nbtrain (bf16) against PyTorch; x = their time / ours")
    peers = {
        (r["what"], r["D"], r["B"], r["dtype"], r["who"]): r["us"]
        for r in rows
        if r["who"] in ("cudnn", "flash")
    }
    for D in (64, 128):
        for B in (16, 32, 64):
            best = {}
            for r in rows:
                if r["who"] == "nbtrain" and "config" in r and (r["D"], r["B"]) == (D, B):
                    if r["what"] not in best or r["us"] < best[r["what"]]["us"]:
                        best[r["what"]] = r
            lines = []
            if "forward" in best:
                r = best["forward"]
                lines.append(("forward", r["us"], f"{r['config']} {r['group']}"))
            if "dq" in best and "dkv" in best:
                a, b = best["dq"], best["dkv"]
                lines.append(
                    (
                        "backward", a["us"] + b["us"],
                        f"dq {a['us']:.1f} {a['config']} {a['group']} + "
                        f"dkv {b['us']:.1f} {b['config']} {b['group']}",
                    )
                )  # fmt: skip
            for what, us, how in lines:
                ratio = " ".join(
                    f"{who} {theirs:7.1f} us {theirs / us:5.2f}x"
                    for who in ("cudnn", "flash")
                    if (theirs := peers.get((what, D, B, "bf16", who)))
                )
                speed = tflops(us, B, HEADS[D], D, what == "backward")
                print(f"D={D:3} B={B:2} {what:8} {us:7.1f} us {speed:5.0f} TFLOP/s | {ratio} | {how}")
    bad = [r for r in rows if r["what"] == "accuracy" and not r["ok"]]
    good = sum(r["what"] == "accuracy" for r in rows) - len(bad)
    print(f"accuracy: {good} right, {len(bad)} wrong", *(f"\n   {r}" for r in bad))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--out", default="attention.jsonl", help="where rows go, one JSON object a line")
    options = parser.parse_args()
    rows = Rows(options.out)
    if options.part:
        import torch

        torch.cuda.init()
        print(f"== {options.part}: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
              f"cuDNN {torch.backends.cudnn.version()}", flush=True)  # fmt: skip
        globals()[f"part_{options.part}"](rows)
        return
    begin = time.time()
    Path(options.out).unlink(missing_ok=True)
    guarded(compile_ahead)
    for part, limit in PARTS.items():
        command = [sys.executable, "-u", os.path.abspath(__file__), "--part", part, "--out", options.out]
        try:
            code = subprocess.run(command, timeout=limit).returncode
            print(f"-- {part}: exit {code}, {time.time() - begin:.0f} s so far", flush=True)
        except subprocess.TimeoutExpired:
            print(f"-- {part}: stopped after {limit} s", flush=True)
    if os.path.exists(options.out):
        summary([json.loads(line) for line in Path(options.out).read_text().splitlines()])
    print(f"done in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
