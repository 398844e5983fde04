"""Trains one model twice, with nbtrain and with PyTorch, and prints both validation losses.

    python profiling/compare_quality.py                        Shakespeare's plays by character, 2000 steps
    python profiling/compare_quality.py --data DIR --size baby --steps 5000

The same initial weights, batches, schedule, clipping and AdamW; fp32 on the CPU, no dropout. Both results are
evaluated by the PyTorch model on the validation file: one ruler for two. DIR holds train_*.bin, val_*.bin and
meta.json, as `nbtrain prepare` writes them. Needs torch (pip install torch).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SIZES = {  # name -> GPTConfig without the vocabulary, batch size
    "small": (dict(n_layer=4, n_head=4, n_embd=128, block_size=64), 12),
    "baby": (dict(n_layer=6, n_head=6, n_embd=384, block_size=256), 16),
}
ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1)
CLIP = 1.0


def train_nbtrain(shape, vocab_size, batches, schedule):
    """(initial parameters, final parameters, losses, learning rates)."""
    import nbtrain as nb

    config = nb.GPTConfig(**shape, vocab_size=vocab_size)
    params, opt_state = nb.init(config, seed=0, dtype="fp32", device="cpu")
    initial = params.copy()
    train_config = nb.TrainConfig(schedule="cosine", **schedule, **ADAMW, clip=CLIP)
    train_step = nb.donate(nb.make_train_step(config, train_config))
    losses, lrs = [], []
    for batch in batches:
        params, opt_state, metrics = train_step(params, opt_state, batch)
        losses.append(float(metrics.loss))
        lrs.append(float(metrics.lr))
    return initial, params, losses, lrs


def train_torch(model, batches, lrs):
    """The loss of each step, one a batch; the model is updated. Batches have tokens and targets (A, B, T)."""
    from profiling.torch_gpt import adamw, to_torch, train_step

    optimizer = adamw(model, lr=lrs[0], **ADAMW)
    losses = []
    for batch, lr in zip(batches, lrs, strict=True):
        loss, _ = train_step(model, optimizer, *to_torch(batch.tokens, batch.targets), clip=CLIP, lr=lr)
        losses.append(float(loss))
    return losses


def prepare_shakespeare(folder):
    from nbtrain.text import prepare_text, shakespeare_text
    from nbtrain.tokenizer import CharTokenizer

    text = shakespeare_text()
    prepare_text(text, folder, CharTokenizer.from_text(text))


def compare(data, size, steps, seed, only_torch, max_eval_batches):
    import torch

    from nbtrain.data import batches, eval_batches
    from profiling.torch_gpt import GPT, learning_rate, load_params, mean_loss

    shape, B = SIZES[size]
    T = shape["block_size"]
    vocab_size = json.loads((data / "meta.json").read_text())["vocab_size"]
    schedule = dict(lr=1e-3, warmup=min(100, steps // 10), total=steps, min_lr=1e-4)
    lrs = [learning_rate(step, **schedule) for step in range(steps)]
    torch.manual_seed(seed)
    model = GPT(**shape, vocab_size=vocab_size)

    def train_batches():
        with batches(data / "train_*.bin", B=B, T=T, seed=seed, vocab_size=vocab_size) as endless:
            yield from islice(endless, steps)

    def validate():
        val = eval_batches(data / "val_*.bin", B=B, T=T, max_batches=max_eval_batches)
        return mean_loss(model, ((batch.tokens, batch.targets) for batch in val))

    def report(name, losses, seconds):
        marks = ", ".join(f"{losses[i]:.4f}" for i in np.linspace(0, steps - 1, 6).astype(int))
        print(f"{name:8} training losses {marks}; {seconds:.0f} s")
        print(f"{name:8} validation loss {validate():.4f}", flush=True)

    print(f"{size}: vocabulary {vocab_size}, B {B}, T {T}, {steps} steps, seed {seed}", flush=True)
    if not only_torch:
        start = time.perf_counter()
        initial, final, losses, nb_lrs = train_nbtrain(shape, vocab_size, train_batches(), schedule)
        seconds = time.perf_counter() - start
        if not np.allclose(nb_lrs, lrs, rtol=1e-5, atol=0):
            at = int(np.argmax(~np.isclose(nb_lrs, lrs, rtol=1e-5, atol=0)))
            sys.exit(
                f"the schedules differ: at step {at} nbtrain has {nb_lrs[at]:.9g}, PyTorch {lrs[at]:.9g}"
            )
        load_params(model, dict(final))
        report("nbtrain", losses, seconds)
        load_params(model, dict(initial))
    start = time.perf_counter()
    losses = train_torch(model, train_batches(), lrs)
    report("torch", losses, time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="default: the plays, prepared for this run")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-torch", action="store_true", help="from PyTorch's own initial weights")
    parser.add_argument("--max-eval-batches", type=int, help="default: the whole validation file")
    args = parser.parse_args()
    for variable in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):  # read when numba and torch are imported
        os.environ[variable] = str(args.threads)
    sys.path.insert(0, str(ROOT))
    try:
        import torch
    except ImportError:
        sys.exit("This comparison needs PyTorch: pip install torch.")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            prepare_shakespeare(folder)
        compare(
            args.data or Path(folder),
            args.size,
            args.steps,
            args.seed,
            args.only_torch,
            args.max_eval_batches,
        )


if __name__ == "__main__":
    main()
