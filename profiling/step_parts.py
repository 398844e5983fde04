"""Where a step's time goes, kernel by kernel: GPT-2 124M, one donated step, an event before and after every
launch.

    python -m profiling.step_parts [--dtype bf16] [--batch 32] [--preset gpt2] [--out FOLDER]

Prints a table and writes step_parts_<dtype>.json and .png. The host runs ahead of the device at this size, so
an interval between two events is the kernel's time and about 2 us. A captured step has the same kernels and
no gaps between them.
"""

import argparse
import collections
from pathlib import Path

import numpy as np

import nbtrain as nb
from nbtrain.device import launching
from profiling.bench_step import zipf_tokens
from profiling.timing import RESULTS, machine, write_results


def record_launches(events: list):
    """Makes every launch and product leave (name, start event, end event) in `events`."""
    import cupy

    from nbtrain.device.nvidia import lt

    def timed(name, run):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run()
        end.record()
        events.append((name, start, end))

    launch, gemm = launching.backend.launch, lt.gemm

    def recorded_launch(compiled, grid, block, args):
        timed(compiled.py_func.__name__, lambda: launch(compiled, grid, block, args))

    def recorded_gemm(a, b, out, *rest, **options):
        M, K, N = *a.shape[1:], b.shape[2]
        timed(f"gemm {M} x {K} x {N}", lambda: gemm(a, b, out, *rest, **options))

    launching.backend.launch, lt.gemm = recorded_launch, recorded_gemm


def draw(rows, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(rows) + 1))
    axes.barh([f"{r['part']} ({r['calls']})" for r in reversed(rows)], [r["ms"] for r in reversed(rows)])
    axes.set_xlabel("ms a step")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import cupy

    cfg = nb.GPTConfig.preset(args.preset)
    step = nb.donate(nb.make_train_step(cfg, nb.TrainConfig()))
    params, state = nb.init(cfg, 0, args.dtype, "cuda:0")
    tokens = zipf_tokens(cfg.vocab_size, args.batch * (cfg.block_size + 1)).reshape(args.batch, -1)
    batch = nb.Batch.of(
        cupy.asarray(np.ascontiguousarray(tokens[:, :-1])), cupy.asarray(np.ascontiguousarray(tokens[:, 1:]))
    )
    for _ in range(3):
        params, state, metrics = step(params, state, batch)
    float(metrics.loss)
    events: list = []
    record_launches(events)
    times = collections.defaultdict(list)
    for _ in range(args.steps):
        events.clear()
        params, state, metrics = step(params, state, batch)
        float(metrics.loss)
        parts = collections.defaultdict(lambda: [0.0, 0])
        for name, start, end in events:
            parts[name][0] += cupy.cuda.get_elapsed_time(start, end)
            parts[name][1] += 1
        for name, (ms, calls) in parts.items():
            times[name].append((ms, calls))
    rows = [
        dict(part=name, ms=float(np.median([m for m, _ in seen])), calls=seen[0][1])
        for name, seen in times.items()
    ]
    rows.sort(key=lambda r: -r["ms"])
    total = sum(r["ms"] for r in rows)
    print(machine())
    for r in rows:
        each_us = r["ms"] / r["calls"] * 1e3
        print(f"{r['ms']:8.3f} ms {r['ms'] / total:6.1%} {r['calls']:4} x {each_us:8.1f} us  {r['part']}")
    gemms = sum(r["ms"] for r in rows if r["part"].startswith("gemm"))
    print(f"sum {total:.2f} ms, of which products {gemms:.2f}")
    write_results(f"step_parts_{args.dtype}", rows, args.out)
    draw(
        rows[:24],
        f"{args.preset} {args.dtype}, B = {args.batch}: {total:.1f} ms of kernels",
        args.out / f"step_parts_{args.dtype}.png",
    )


if __name__ == "__main__":
    main()
