"""Trains 10 steps, saves, loads and trains 10 more: the bits of 20 steps in one go.

    python examples/resume.py
    python examples/resume.py --dtype bf16 --device cuda:0

`nbtrain train --resume` does the same for a run; this is what lies under it.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np

import nbtrain as nb
from nbtrain.data import write_tokens
from nbtrain.device.place import to_host

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="auto", help="fp32, fp16, bf16 or auto")
parser.add_argument("--device", default="auto")
args = parser.parse_args()

folder = Path(tempfile.mkdtemp())
write_tokens(folder / "train.bin", np.arange(20_000) * 7 % 65, vocab_size=65)

config = nb.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=65, dropout=0.1)
train_config = nb.TrainConfig(lr=1e-2, schedule="cosine", warmup=5, total=20)


def run(params, opt_state, steps, state=None):
    """`steps` steps, from where `state` is in the data: (losses, params, opt_state, place in the data)."""
    train_step = nb.donate(nb.make_train_step(config, train_config))
    losses, spec = [], dict(B=4, T=config.block_size, micro=2, seed=1, device=params.device, state=state)
    with nb.batches(folder / "train.bin", **spec) as source:
        for _ in range(steps):
            params, opt_state, metrics = train_step(params, opt_state, next(source))
            losses.append(float(metrics.loss))
        return losses, params, opt_state, source.state()


def bits(tree):
    """Every byte of a tree, wherever it is."""
    return to_host(tree.buffer).tobytes()


start = dict(seed=0, dtype=args.dtype, device=args.device)
whole, *once, _ = run(*nb.init(config, **start), steps=20)

# What a checkpoint needs to go on: the weights, the optimizer's state and the place in the data. The random
# bits of dropout follow from the seed and the step, which are in the state.
first, params, opt_state, at = run(*nb.init(config, **start), steps=10)
told = dict(config=config, train_config=train_config, data_state=at)
nb.save(folder / "checkpoint", params, opt_state, **told)

checkpoint = nb.load(folder / "checkpoint", device=params.device)
for text in checkpoint.meta["differs"]:
    print(f"bits may differ: {text}")
rest, *twice, _ = run(checkpoint.params, checkpoint.opt_state, steps=10, state=checkpoint.data_state)

same = {
    "losses": first + rest == whole,
    "params": bits(twice[0]) == bits(once[0]),
    "moments": all(bits(getattr(twice[1], name)) == bits(getattr(once[1], name)) for name in ("m", "v")),
}
print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}")
print(", ".join(f"{name} {'equal' if equal else 'DIFFER'}" for name, equal in same.items()))
shutil.rmtree(folder)
raise SystemExit(not all(same.values()))
