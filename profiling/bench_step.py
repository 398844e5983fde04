"""The training step of GPT-2 on one GPU: ms, tokens/s, MFU, memory; PyTorch and JAX beside it in the same
run.

    python -m profiling.bench_step --dtype bf16 fp16 --batch 32 [--mode capture donate] [--peers torch,jax]
    [--out FOLDER]

Each trainer runs in a process of its own, one after the other, on the same tokens (Zipf-distributed, so that
frequent words repeat as in a text). Steps are timed back to back in blocks; the median block counts. Memory
is the rise of the whole card over idle (NVML), the context included, measured alike for every trainer. MFU =
(6 N + 12 L C T) FLOP a token over the measured 8192^3 product.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from profiling.timing import RESULTS, machine, write_results

HERE = Path(__file__).parent
WARM_UP, BLOCKS, STEPS = 5, 7, 6


def zipf_tokens(vocab_size: int, n: int, seed: int = 0) -> np.ndarray:
    weights = 1 / np.arange(1, vocab_size + 1)
    return np.random.default_rng(seed).choice(vocab_size, n, p=weights / weights.sum()).astype(np.int32)


def flop_per_token(cfg) -> float:
    matmul_params = 12 * cfg.n_layer * cfg.n_embd**2 + cfg.padded_vocab_size * cfg.n_embd
    return 6 * matmul_params + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


class CardMemory:
    """The card's memory above what was used before, largest value seen."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(card)) if card.isdigit() else by_uuid(card)
        self._read = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
        self.idle = self.peak = self._read()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._read())

    def rise_mb(self) -> float:
        self._stop.set()
        self._thread.join()
        return (max(self.peak, self._read()) - self.idle) / 1e6


def time_blocks(step, synchronize) -> dict:
    """Median ms of `step()` over blocks of steps back to back."""
    for _ in range(WARM_UP):
        step()
    synchronize()
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return dict(ms=float(np.median(times)), ms_min=min(times), ms_max=max(times))


def run_nbtrain(args) -> dict:
    memory = CardMemory()
    import cupy

    import nbtrain as nb
    from nbtrain.modes import capture

    cfg = nb.GPTConfig.preset(args.preset)
    scale = float(args.loss_scale) if args.loss_scale.replace(".", "").isdigit() else args.loss_scale
    train = nb.TrainConfig(lr=6e-4, clip=1.0, remat=args.remat, loss_scale=scale)
    step = {"capture": capture, "donate": nb.donate, "pure": lambda s: s}[args.mode](
        nb.make_train_step(cfg, train)
    )
    state = list(nb.init(cfg, 0, args.dtype, "cuda:0"))
    stream = zipf_tokens(cfg.vocab_size, args.batch * (cfg.block_size + 1) * 4).reshape(4, args.batch, -1)
    batches = [
        nb.Batch.of(
            cupy.asarray(np.ascontiguousarray(t[:, :-1])), cupy.asarray(np.ascontiguousarray(t[:, 1:]))
        )
        for t in stream
    ]
    losses, count = [], 0

    def one():
        nonlocal count
        *state[:], metrics = step(*state, batches[count % 4])
        count += 1
        losses.append(metrics.loss)

    start = time.perf_counter()
    one()
    first_loss = float(losses[0])
    first = time.perf_counter() - start
    row = time_blocks(one, cupy.cuda.runtime.deviceSynchronize)
    return row | dict(
        memory_mb=memory.rise_mb(), first_step_s=first, loss_first=first_loss, loss_last=float(losses[-1])
    )


def run_torch(args) -> dict:
    memory = CardMemory()
    import torch
    from torch_gpt import GPT as TorchGPT

    import nbtrain as nb

    cfg = nb.GPTConfig.preset(args.preset)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    weights16 = args.variant == "weights16"
    model = TorchGPT(
        n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=cfg.block_size,
        vocab_size=cfg.padded_vocab_size, fused=True,  # cuBLAS is 8 times slower at 50257 columns
    ).cuda()  # fmt: skip
    masters = None
    if weights16:  # 16-bit weights and gradients beside fp32 masters
        masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        model = model.to(kind)
        optimizer = torch.optim.AdamW(masters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16")

    @torch.compile  # the loss too: outside, its fp32 logits cost 20 ms and 25 GB
    def loss_of(x, y):
        logits = model(x)
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.view(-1))

    stream = zipf_tokens(cfg.vocab_size, args.batch * (cfg.block_size + 1) * 4).reshape(4, args.batch, -1)
    batches = [(torch.tensor(t[:, :-1]).long().cuda(), torch.tensor(t[:, 1:]).long().cuda()) for t in stream]
    params, losses, count = list(model.parameters()), [], 0

    def one():
        nonlocal count
        x, y = batches[count % 4]
        count += 1
        with torch.autocast("cuda", kind, enabled=not weights16):
            loss = loss_of(x, y)
        scaler.scale(loss).backward()
        if masters is not None:
            for master, p in zip(masters, params, strict=True):
                master.grad = p.grad.float()
                p.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    one()
    row = time_blocks(one, torch.cuda.synchronize)
    return row | dict(memory_mb=memory.rise_mb(), loss_first=float(losses[0]), loss_last=float(losses[-1]))


def run_jax(args) -> dict:
    memory = CardMemory()
    sys.path.insert(0, str(HERE))
    import jax_gpt

    return jax_gpt.run(args, zipf_tokens, time_blocks) | dict(memory_mb=memory.rise_mb())


def run_ceilings(args) -> dict:
    from nbtrain.device import FLOATS
    from profiling.timing import copy_gb_s, gemm_tflop_s

    return dict(copy_gb_s=copy_gb_s(), **{f"gemm_{d}": gemm_tflop_s(FLOATS[d]) for d in ("bf16", "fp16")})


def child(args, **options) -> dict | None:
    """One trainer in a process of its own."""
    values = {k: v for k, v in vars(args).items() if k not in ("peers", "out", "child")} | options
    values["dtype"] = [values["dtype"]] if isinstance(values["dtype"], str) else values["dtype"]
    command = [sys.executable, "-m", "profiling.bench_step", "--child", json.dumps(values)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    for line in reversed(result.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    print(f"FAILED {options}\n{result.stdout[-1500:]}\n{result.stderr[-2500:]}", flush=True)
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp16"], choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[32])
    parser.add_argument("--mode", nargs="+", default=["capture"], choices=["capture", "donate", "pure"])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--remat", nargs="+", default=["light"], help="policies of recomputation")
    parser.add_argument("--loss-scale", default="auto", help='a power of two, "dynamic" or "auto"')
    parser.add_argument("--peers", default="", help="torch,jax")
    parser.add_argument(
        "--torch", nargs="+", default=["autocast", "weights16"], choices=["autocast", "weights16"],
        help="forms of PyTorch in bf16",
    )  # fmt: skip
    parser.add_argument(
        "--no-ceilings", action="store_true", help="without copy speed and matrix peak, so without MFU"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one trainer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="", help="of the results file; bench_step_PRESET by default")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's
    if args.child:
        inner = argparse.Namespace(**json.loads(args.child))
        inner.dtype = inner.dtype[0]
        sys.path.insert(0, str(HERE))
        run = {"nbtrain": run_nbtrain, "torch": run_torch, "jax": run_jax, "ceilings": run_ceilings}[
            inner.trainer
        ]
        print("RESULT " + json.dumps(run(inner)), flush=True)
        return

    import nbtrain as nb

    cfg = nb.GPTConfig.preset(args.preset)
    print(machine(), flush=True)
    ceilings = {} if args.no_ceilings else child(args, trainer="ceilings") or {}
    print(ceilings, flush=True)
    jobs = []
    for dtype in args.dtype:
        for batch in args.batch:
            jobs += [
                dict(
                    trainer="nbtrain",
                    variant=f"{mode}, {remat}",
                    mode=mode,
                    remat=remat,
                    dtype=dtype,
                    batch=batch,
                )
                for mode in args.mode
                for remat in args.remat
            ]
            if "torch" in args.peers and dtype != "fp32":
                kinds = args.torch if dtype == "bf16" else ("autocast",)
                jobs += [dict(trainer="torch", variant=v, dtype=dtype, batch=batch) for v in kinds]
            if "jax" in args.peers and dtype == "bf16":
                jobs.append(dict(trainer="jax", variant="jit", dtype=dtype, batch=batch))
    rows = []
    for job in jobs:
        result = child(args, **job)
        if result:
            row = job | result
            row["tokens_per_s"] = job["batch"] * cfg.block_size / row["ms"] * 1e3
            ceiling = ceilings.get(f"gemm_{job['dtype']}")
            row["mfu"] = row["tokens_per_s"] * flop_per_token(cfg) / ceiling / 1e12 if ceiling else None
            rows.append(row)
            print(row, flush=True)
    print("\n| trainer | dtype | B | ms | tokens/s | MFU | memory MB | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        mfu = f"{r['mfu']:.1%}" if r["mfu"] else "-"
        print(
            f"| {r['trainer']} {r['variant']} | {r['dtype']} | {r['batch']} | {r['ms']:.2f} | "
            f"{r['tokens_per_s']:,.0f} | {mfu} | {r['memory_mb']:,.0f} | "
            f"{r['loss_first']:.3f} -> {r['loss_last']:.3f} |"
        )
    print(write_results(args.name or f"bench_step_{args.preset}", [ceilings, *rows], args.out))


if __name__ == "__main__":
    main()
