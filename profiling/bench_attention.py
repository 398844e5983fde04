"""Flash attention beside PyTorch's on one GPU: us a call, TFLOP/s, errors against float64, repeatability.

    python -m profiling.bench_attention [--out FOLDER]
    python -m profiling.bench_attention --variants [--part forward dq dkv] [--head-dim 64 128]

12 heads of 64 columns or 6 of 128, T = 1024, causal. Operations count half the square, and 2.5 times the
forward for the backward. A time is the median of 20 calls, each between two events in a queue that is full.
`--variants` times each way to cut a kernel, for every size of the groups in which heads run. Needs PyTorch.
"""

import argparse
import functools
import math
import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from nbtrain.device import FLOATS
from nbtrain.device.capability import compute_capability
from nbtrain.device.nvidia import flash
from nbtrain.device.nvidia.flash import Config
from profiling.timing import RESULTS, machine, write_results

T, HEADS = 1024, {64: 12, 80: 10, 96: 8, 128: 6}
GROUPS = {"8M": 8 << 20, "16M": 16 << 20, "32M": 32 << 20, "all": 1 << 60}
PARTS = ("forward", "dq", "dkv")
TABLES = {"forward": flash.FORWARD, "dq": flash.BACKWARD_DQ, "dkv": flash.BACKWARD_DKV}
# Beside those of TABLES, by part and head dimension
VARIANTS = {
    ("forward", 64): [Config(2, 64, 2), Config(1, 64, 4), Config(1, 64, 2, "tall")],
    ("forward", 80): [Config(1, 64, 2)],
    ("forward", 96): [Config(1, 64, 2)],
    ("forward", 128): [Config(2, 64, 1), Config(1, 64, 2)],
    ("dq", 64): [Config(2, 64, 2), Config(1, 64, 3)],
    ("dq", 128): [Config(2, 64, 1)],
    ("dkv", 64): [Config(2, 64, 1), Config(1, 64, 2)],
    ("dkv", 128): [Config(2, 64, 1)],
}  # fmt: skip


def variants(part, D, arch) -> list[Config]:
    return [
        flash.suited(TABLES[part], arch, D),
        *(VARIANTS.get((part, D), []) if arch == flash.WGMMA else []),
    ]


class Case:
    """Inputs and outputs of one size: torch tensors, and in `c` the CuPy arrays that share their memory."""

    def __init__(self, B, t, D, dtype):
        import cupy
        import torch

        self.B, self.T, self.H, self.D = B, t, HEADS[D], D
        self.sm_scale, self.arch = 1 / math.sqrt(D), flash.instruction_set(compute_capability("cuda:0"))
        float16 = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        generator = torch.Generator(device="cuda").manual_seed(t + D)
        C = self.H * D

        def normal(*shape):
            return torch.randn(*shape, device="cuda", generator=generator)

        self.qkv, self.dout = (1.2 * normal(B, t, 3 * C)).to(float16), normal(B, t, C).to(float16)
        self.out, self.dqkv = torch.empty_like(self.dout), torch.empty_like(self.qkv)
        self.lse = torch.empty(B, self.H, t, device="cuda")
        self.stats = torch.empty(flash.stats_shape(B, t, self.H), device="cuda")
        for x in (self.out, self.dqkv, self.lse, self.stats):
            x.fill_(math.nan)
        self.c = {name: cupy.from_dlpack(getattr(self, name)) for name in ("lse", "stats")}
        for name in ("qkv", "dout", "out", "dqkv"):
            bits = cupy.from_dlpack(getattr(self, name).view(torch.int16))
            self.c[name] = bits.view(FLOATS[dtype])

    def forward(self, config=None, group_bytes=None):
        c = self.c
        flash.flash_forward(
            c["qkv"], self.H, self.sm_scale, c["out"], c["lse"], config=config, group_bytes=group_bytes
        )

    def backward(self):
        c = self.c
        flash.flash_backward(
            c["dout"], c["qkv"], c["out"], c["lse"], self.H, self.sm_scale, c["dqkv"], stats=c["stats"]
        )

    def dq(self, config, group_bytes=flash.DQ_GROUP):
        c, group = self.c, flash.group_of_heads(self.B * self.H, self.T, self.D, group_bytes)
        flash.backward_dq(
            c["qkv"], c["out"], c["dout"], c["lse"], c["stats"], c["dqkv"], self.H, self.sm_scale, self.arch,
            config, group,
        )  # fmt: skip

    def dkv(self, config, group_bytes=flash.DKV_GROUP):
        c, group = self.c, flash.group_of_heads(self.B * self.H, self.T, self.D, group_bytes)
        flash.backward_dkv(
            c["qkv"], c["dout"], c["stats"], c["dqkv"], self.H, self.sm_scale, self.arch, config, group
        )

    def heads(self, x):
        """q, k, v (B, H, T, D), views of a packed tensor."""
        return x.view(self.B, self.T, 3, self.H, self.D).permute(2, 0, 3, 1, 4).unbind()

    def exact(self):
        """(out, lse, dqkv) in float64."""
        import torch

        x = self.qkv.double().requires_grad_(True)
        q, k, v = self.heads(x)
        visible = torch.ones(self.T, self.T, dtype=torch.bool, device="cuda").tril()
        s = (q @ k.transpose(-1, -2) * self.sm_scale).masked_fill(~visible, -math.inf)
        out = (s.softmax(-1) @ v).transpose(1, 2).reshape(self.out.shape)
        (gradient,) = torch.autograd.grad(out, x, self.dout.double())
        return out.detach(), s.logsumexp(-1).detach(), gradient

    def peer(self, backend):
        """(forward, backward) of PyTorch's attention, to be called: o, and dqkv or (dq, dk, dv)."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attention

        x = [y.detach().requires_grad_(True) for y in self.heads(self.qkv)]
        dout = self.dout.view(self.B, self.T, self.H, self.D).transpose(1, 2)

        def forward():
            with sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION")):
                return attention(*x, is_causal=True)

        out = forward()
        return torch.no_grad()(forward), lambda: torch.autograd.grad(out, x, dout, retain_graph=True)


def time_us(call, n=20) -> float:
    """The queue is filled behind a pause, so that what a call costs the host is not counted."""
    import torch

    for _ in range(3):
        begin = time.perf_counter()
        call()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
    torch.cuda._sleep(int(min(0.1, 2 * host * n + 0.001) * 1.8e9))
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in events])) * 1e3


def relative(got, want) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def repeats(call, outputs, n=8) -> bool:
    """Whether n more calls give the same bits."""
    import torch

    first = [x.clone() for x in outputs]
    same = True
    for _ in range(n):
        call()
        same &= all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))
    return same


# ----------------------------------------------------------------------------


def compile_one(job) -> None:
    """Fills the cache of machine code: job is (part or None for what is chosen, D, dtype, T, config)."""
    import cupy

    part, D, dtype, t, config = job
    qkv, dqkv, out = (cupy.zeros((1, t, n * D), np.int16).view(FLOATS[dtype]) for n in (3, 3, 1))
    lse, stats = cupy.zeros((1, 1, t), np.float32), cupy.zeros(flash.stats_shape(1, t, 1), np.float32)
    arch = flash.instruction_set(compute_capability("cuda:0"))
    if part in (None, "forward"):
        flash.flash_forward(qkv, 1, 0.125, out, lse, config=config)
    if part is None:
        flash.flash_backward(out, qkv, out, lse, 1, 0.125, dqkv, stats=stats)
    if part == "dq":
        flash.backward_dq(qkv, out, out, lse, stats, dqkv, 1, 0.125, arch, config, 1)
    if part == "dkv":
        flash.backward_dkv(qkv, out, stats, dqkv, 1, 0.125, arch, config, 1)
    cupy.cuda.Device().synchronize()


def compile_ahead(jobs) -> None:
    begin = time.time()
    workers = min(os.cpu_count() or 1, len(jobs), 12)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for job, future in [(job, pool.submit(compile_one, job)) for job in jobs]:
            if error := future.exception():
                print(f"!! {job}: {error!r}"[:600])
    print(f"{len(jobs)} kinds of kernels compiled by {workers} processes in {time.time() - begin:.0f} s")


def tflop_s(us, B, D, backward) -> float:
    return 2 * B * HEADS[D] * T * T * D * (2.5 if backward else 1) / us / 1e6


def compare(rows, B, D, dtype) -> None:
    """nbtrain as it chooses, against PyTorch's two kernels."""
    case = Case(B, T, D, dtype)
    case.forward()
    ours = {"forward": time_us(case.forward), "backward": time_us(case.backward)}
    peers = {}
    for backend in ("cudnn", "flash"):
        peers[backend] = dict(zip(ours, map(time_us, case.peer(backend)), strict=True))
    for what, us in ours.items():
        speed = tflop_s(us, B, D, what == "backward")
        line = "".join(f"{who:>8} {p[what]:7.1f} us {p[what] / us:5.2f}x" for who, p in peers.items())
        print(f"D={D:3} B={B:2} {dtype} {what:8} {us:7.1f} us {speed:4.0f} TFLOP/s{line}", flush=True)
        theirs = {f"{who}_us": p[what] for who, p in peers.items()}
        rows.append(dict(what=what, D=D, B=B, dtype=dtype, us=us, tflop_s=speed, **theirs))


def check(rows, D, dtype, t) -> None:
    """Relative errors of y, dq, dk, dv beside PyTorch's; an error twice theirs is wrong."""
    case = Case(2, t, D, dtype)
    out, lse, gradient = case.exact()

    def both():
        case.forward()
        case.backward()

    both()
    want = [out, *case.heads(gradient)]
    ours = [relative(*pair) for pair in zip([case.out, *case.heads(case.dqkv)], want, strict=True)]
    peer_forward, peer_backward = case.peer("flash")
    peer_out = peer_forward().transpose(1, 2).reshape(out.shape)
    theirs = [relative(*pair) for pair in zip([peer_out, *peer_backward()], want, strict=True)]
    same, lse_error = repeats(both, (case.out, case.lse, case.dqkv)), relative(case.lse, lse)
    right = same and lse_error < 1e-5 and all(a <= 2 * b for a, b in zip(ours, theirs, strict=True))
    print(
        f"D={D:3} T={t} {dtype} {'right' if right else 'WRONG'}, {'repeats' if same else 'DOES NOT REPEAT'}",
        "| y dq dk dv:", *(f"{x:.1e}" for x in ours), "| flash:", *(f"{x:.1e}" for x in theirs),
        flush=True,
    )  # fmt: skip
    errors = dict(ours=ours, flash=theirs, lse=lse_error)
    rows.append(dict(what="accuracy", D=D, T=t, dtype=dtype, right=right, repeats=same, **errors))


def label(config) -> str:
    return f"{config.form}({config.warpgroups},{config.tile},{config.blocks})"


def sweep(rows, part, D, dtype, batches) -> None:
    """Each variant's time for each size of a group; variants that are wrong are not timed."""
    case = Case(2, T, D, dtype)
    out, lse, gradient = case.exact()
    want = case.heads(gradient)
    arch, good = case.arch, []
    case.forward()
    case.dq(flash.suited(flash.BACKWARD_DQ, arch, D))
    for config in variants(part, D, arch):
        outputs = (case.out, case.lse) if part == "forward" else (case.dqkv,)
        for x in outputs:
            x.zero_()
        call = functools.partial(getattr(case, part), config)
        call()
        if part == "forward":
            errors = [relative(case.out, out), 400 * relative(case.lse, lse)]
        else:
            got = case.heads(case.dqkv)
            errors = [relative(got[i], want[i]) for i in ((0,) if part == "dq" else (1, 2))]
        if max(errors) < 5e-3 and repeats(call, outputs):
            good.append(config)
        else:
            print(f"!! {part} D={D} {label(config)} is WRONG: {errors}", flush=True)
    for B in batches:
        case = Case(B, T, D, dtype)
        case.forward()
        case.dq(flash.suited(flash.BACKWARD_DQ, arch, D))
        for config in good:
            call = functools.partial(getattr(case, part), config)
            us = {name: time_us(functools.partial(call, n)) for name, n in GROUPS.items()}
            line = " ".join(f"{name} {t:.1f}" for name, t in us.items())
            print(f"D={D:3} B={B:2} {dtype} {part:7} {label(config):14} us: {line}", flush=True)
            rows.append(dict(what=part, D=D, B=B, dtype=dtype, config=label(config), us=us))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", action="store_true", help="time each way to cut a kernel")
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, help="of --variants")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], choices=list(HEADS))
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp16"), help="bf16 fp16; --variants: bf16")
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    dtypes = args.dtype or (["bf16"] if args.variants else ["bf16", "fp16"])
    if args.variants:
        arch = flash.instruction_set(compute_capability("cuda:0"))
        kinds = [(part, D, dtype) for D in args.head_dim for part in args.part for dtype in dtypes]
        jobs = [(*kind, T, config) for kind in kinds for config in variants(*kind[:2], arch)]
        jobs += [(None, D, dtype, T, None) for D in args.head_dim for dtype in dtypes]
        work = [(sweep, *kind, args.batch) for kind in kinds]
    else:
        jobs = [(None, D, d, t, None) for D in args.head_dim for d in dtypes for t in (T, 1000)]
        work = [(check, D, d, t) for D in args.head_dim for d in dtypes for t in (T, 1000)]
        work += [(compare, B, D, d) for D in args.head_dim for B in args.batch for d in dtypes]
    compile_ahead(jobs)
    import torch

    torch.cuda.init()
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(machine() | versions, flush=True)
    rows = [dict(what="versions", **versions)]
    for function, *arguments in work:
        try:
            function(rows, *arguments)
        except Exception:  # one size too many for this GPU does not cost the others
            print(f"!! {function.__name__} {arguments}:\n{traceback.format_exc()}", flush=True)
    print(write_results("bench_attention_variants" if args.variants else "bench_attention", rows, args.out))


if __name__ == "__main__":
    main()
