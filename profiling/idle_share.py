"""How much of a captured step the GPU idles: the kernels of some steps on a timeline.

    python -m profiling.idle_share [--dtype bf16] [--batch 32] [--out FOLDER]

The timeline is CUPTI's, through torch.profiler (PyTorch is needed for that alone). Idle is what no kernel,
copy or fill covers between the first kernel of the second step and the last one of the last; the tracing's
own cost is in it. `waits` counts the host's calls that wait for the device during these steps. The table says
what the kernels and copies are, those that come most often first, and how long nothing ran before them.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from profiling.bench_step import zipf_tokens
from profiling.timing import RESULTS, machine, write_results

STEPS = 6
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


def timeline(path: Path) -> tuple[list[tuple[float, float, str]], list[str]]:
    """(start, end, name) in us of everything on the device, in order; the names of the host's CUDA calls."""
    events = json.loads(path.read_text())["traceEvents"]
    device, calls = [], []
    for event in events:
        kind = event.get("cat", "")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls.append(event["name"])
    return sorted(device), calls


def busy_us(spans) -> float:
    """Length of the union of spans."""
    total, until = 0.0, -np.inf
    for start, end, _ in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kinds(spans, steps: int) -> list[dict]:
    """Of each name: how many a step, us a step, and us a step in which nothing ran before them."""
    found: dict[str, list[float]] = {}
    until = spans[0][0]
    for start, end, name in spans:
        count, busy, idle = found.get(name, (0, 0.0, 0.0))
        found[name] = [count + 1, busy + end - start, idle + max(0.0, start - until)]
        until = max(until, end)
    rows = [
        dict(name=name[:80], n=count / steps, us=busy / steps, idle_us=idle / steps)
        for name, (count, busy, idle) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    import cupy
    import torch
    from torch.profiler import ProfilerActivity, profile

    import nbtrain as nb

    cfg = nb.GPTConfig.preset("gpt2")
    step = nb.capture(nb.make_train_step(cfg, nb.TrainConfig(lr=6e-4)))
    state = list(nb.init(cfg, 0, args.dtype, "cuda:0"))
    stream = zipf_tokens(cfg.vocab_size, args.batch * (cfg.block_size + 1)).reshape(args.batch, -1)
    batch = nb.Batch.of(*(cupy.asarray(np.ascontiguousarray(x)) for x in (stream[:, :-1], stream[:, 1:])))
    torch.cuda.init()
    for _ in range(5):
        *state[:], _ = step(*state, batch)
    cupy.cuda.runtime.deviceSynchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            *state[:], _ = step(*state, batch)
        calls_end = cupy.cuda.Event()
        calls_end.record()
        calls_end.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        spans, calls = timeline(path)
    a_step = len(spans) // STEPS
    spans = spans[a_step : a_step * STEPS]
    window = max(end for _, end, _ in spans) - spans[0][0]
    row = dict(
        dtype=args.dtype, batch=args.batch, steps=STEPS - 1, kernels_a_step=a_step,
        ms_a_step=window / (STEPS - 1) / 1e3, idle=1 - busy_us(spans) / window,
        waits=sum(call in WAITS for call in calls) - 1,  # the one at the end is ours
    )  # fmt: skip
    print(machine(), row, sep="\n")
    row["kinds"] = kinds(spans, STEPS - 1)
    print("| a step | us | idle before, us | what |\n| ---: | ---: | ---: | --- |")
    for kind in row["kinds"]:
        print(f"| {kind['n']:.0f} | {kind['us']:.0f} | {kind['idle_us']:.1f} | {kind['name']} |")
    print(f"idle {row['idle']:.2%} of {row['ms_a_step']:.2f} ms a step, {a_step} kernels, copies and fills")
    print(write_results("idle_share", [row], args.out))


if __name__ == "__main__":
    main()
