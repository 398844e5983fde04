"""nbtrain against PyTorch eager on the CPU, fp32: ms a training step, alternated in one process.

    python profiling/compare_cpu.py                      both sizes, 2 threads, about 20 s each
    python profiling/compare_cpu.py small --threads 4 --seconds 60

A step is forward, backward, clipping and AdamW. All sides start from the same weights and see the same
windows. They take turns, and each turn begins with a step that isn't timed, so that nobody meets the other's
threads awake. PyTorch runs twice: with its default AdamW and with the fused one.
Needs torch (pip install torch).
"""

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 65
SIZES = {  # name -> GPTConfig without the vocabulary, batch size, timed steps a turn
    "small": (dict(n_layer=4, n_head=4, n_embd=128, block_size=64), 12, 15),
    "baby": (dict(n_layer=6, n_head=6, n_embd=384, block_size=256), 16, 2),
}
HYPER = dict(lr=1e-3, weight_decay=0.1)
CLIP = 1.0


def windows(B, T, count=64, seed=0):
    """[(tokens, targets)] * count, each (B, T) int32, from a made-up text.

    Three characters can follow each one, so a loss that does not fall is a fault."""
    rng = np.random.default_rng(seed)
    successors = rng.integers(VOCAB, size=(VOCAB, 3))
    text = np.zeros(20 * (T + 1), np.int32)
    for i, choice in enumerate(rng.integers(3, size=len(text) - 1)):
        text[i + 1] = successors[text[i], choice]
    starts = rng.integers(len(text) - T, size=(count, B))
    index = starts[..., None] + np.arange(T)
    return list(zip(text[index], text[index + 1], strict=True))


def nbtrain_side(shape, batches):
    """(a function that takes a step's number, steps, and returns the loss; the initial parameters)."""
    import nbtrain as nb

    config = nb.GPTConfig(**shape, vocab_size=VOCAB)
    params, opt_state = nb.init(config, seed=0, dtype="fp32", device="cpu")
    train_step = nb.donate(nb.make_train_step(config, nb.TrainConfig(**HYPER, clip=CLIP)))
    ready = [nb.Batch.of(*batch) for batch in batches]
    initial = params

    def step(i):
        nonlocal params, opt_state
        params, opt_state, metrics = train_step(params, opt_state, ready[i % len(ready)])
        return float(metrics.loss)

    return step, initial


def torch_side(shape, batches, params=None, fused=None):
    """The function for PyTorch, which starts from a copy of nbtrain's parameters if they are given."""
    import torch

    from profiling import torch_gpt

    torch.manual_seed(0)
    model = torch_gpt.GPT(**shape, vocab_size=VOCAB)
    if params is not None:
        torch_gpt.load_params(model, dict(params))
    optimizer = torch_gpt.adamw(model, **HYPER, fused=fused)
    ready = [torch_gpt.to_torch(*batch) for batch in batches]

    def step(i):
        loss, _ = torch_gpt.train_step(model, optimizer, *ready[i % len(ready)], clip=CLIP)
        return float(loss)

    return step


def race(sides, steps_a_turn, seconds):
    """(times_ms, losses): lists by side. Every side takes the same number of steps."""
    times_ms, losses = {name: [] for name in sides}, {name: [] for name in sides}
    for name, step in sides.items():  # the first step compiles
        losses[name].append(step(0))
    i, end = 1, time.perf_counter() + seconds
    while i == 1 or time.perf_counter() < end:
        for name, step in sides.items():
            for j in range(steps_a_turn + 1):
                start = time.perf_counter()
                losses[name].append(step(i + j))
                if j > 0:
                    times_ms[name].append((time.perf_counter() - start) * 1e3)
        i += steps_a_turn + 1
    return times_ms, losses


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(only):
    """What ran, with how many threads, in one line."""
    said = [f"{processor()}, {os.cpu_count()} cores", f"Python {platform.python_version()}"]
    said.append(f"NumPy {np.__version__}")
    if only != "nbtrain":
        import torch

        said.append(f"torch {torch.__version__} on {torch.get_num_threads()} threads")
    if only != "torch":
        import numba

        import nbtrain

        said.append(
            f"nbtrain {nbtrain.__version__}, numba {numba.__version__} on {numba.get_num_threads()} threads"
        )
    return ", ".join(said)


def compare(size, seconds, only):
    shape, B, steps_a_turn = SIZES[size]
    L, H, C, T = shape.values()
    batches = windows(B, T)
    sides, params = {}, None
    if only != "torch":
        sides["nbtrain"], params = nbtrain_side(shape, batches)
    if only != "nbtrain":
        sides["torch"] = torch_side(shape, batches, params)
        sides["torch, fused AdamW"] = torch_side(shape, batches, params, fused=True)
    times_ms, losses = race(sides, steps_a_turn, seconds)

    print(f"\n{size}: {L} layers, {H} heads, {C}, T {T}, B {B}, vocabulary {VOCAB}")
    print(f"{'':20}{'median ms':>10}{'min ms':>10}{'tokens/s':>10}{'speed':>8}{'first loss':>12}{'last':>8}")
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    base = medians.get("torch", medians[next(iter(sides))])
    for name, ms in medians.items():
        times = f"{ms:10.2f}{min(times_ms[name]):10.2f}{B * T / ms * 1e3:10.0f}{base / ms:7.2f}x"
        print(f"{name:20}{times}{losses[name][0]:12.5f}{losses[name][-1]:8.4f}")
    n = min(map(len, times_ms.values()))
    print(f"{n} timed steps of each; load average {os.getloadavg()[0]:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"{', '.join(SIZES)}; all if none is named")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="for each size, about")
    parser.add_argument("--only", choices=("nbtrain", "torch"), help="time one side alone")
    args = parser.parse_args()
    for size in args.sizes:
        if size not in SIZES:
            parser.error(f"the sizes are {', '.join(SIZES)}; got {size}")

    for variable in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):  # read when numba and torch are imported
        os.environ[variable] = str(args.threads)
    sys.path.insert(0, str(ROOT))
    if args.only != "nbtrain":
        try:
            import torch
        except ImportError:
            sys.exit(
                "This comparison needs PyTorch: pip install torch. For nbtrain by itself: --only nbtrain"
            )
        torch.set_num_threads(args.threads)
    print(versions(args.only), flush=True)
    for size in args.sizes or SIZES:
        compare(size, args.seconds, args.only)


if __name__ == "__main__":
    main()
