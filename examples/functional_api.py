"""The functional API from top to bottom: no trainer, no hidden state, arrays in and arrays out.

    python examples/functional_api.py
    python examples/functional_api.py --dtype bf16 --device cuda:0 --steps 300

A training step is a pure function of params, opt_state and a batch. Below it are the operators, each of which
is a function of arrays too. What is claimed on the way is checked by `assert`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import nbtrain as nb
from nbtrain.device.place import to_host
from nbtrain.ops import layernorm_backward, layernorm_forward
from nbtrain.optim import Schedule

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="auto", help="fp32, fp16, bf16 or auto")
parser.add_argument("--device", default="auto")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()


def bits(*trees):
    """Every byte of some trees, wherever they are."""
    return [to_host(tree.buffer).tobytes() for tree in trees]


# --- Operators by themselves
# They take NumPy arrays (CuPy's on a GPU), return what the backward pass needs, and write to `out=` if asked.

rng = np.random.default_rng(0)
x, dy = rng.standard_normal((2, 8, 32), np.float32)
weight, bias = np.ones(32, np.float32), np.zeros(32, np.float32)
y, mean, rstd, _ = layernorm_forward(x, weight, bias)
dx, dweight, dbias = layernorm_backward(dy, x, weight, mean, rstd)

# The derivative along a direction, once from the gradient and once from two evaluations.
direction, h = rng.standard_normal(x.shape).astype(np.float32), np.float32(1e-2)
ends = [(layernorm_forward(x + s * h * direction, weight, bias)[0] * dy).sum() for s in (1, -1)]
print(
    f"layernorm: derivative {(dx * direction).sum():.4f}, by differences {(ends[0] - ends[1]) / (2 * h):.4f}"
)
assert np.isclose((dx * direction).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-2)

# --- A model and its state
# A config is a frozen dataclass; params, master weights and moments are trees, named views of a buffer each.

config = nb.GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=64)
params, opt_state = nb.init(config, seed=0, dtype=args.dtype, device=args.device)
print(f"params: {params}")
print(f"the second block's QKV weights: {params.blocks[1].qkv_w.shape}, {params.blocks[1].qkv_w.dtype}")
planned = nb.plan(config, B=16, device="cuda")  # nothing is allocated, and no GPU is needed
print(f"on a GPU, training with batches of 16 will take {planned.total / 1e6:,.0f} MB, most of it CUDA's own")

# --- Data: a batch is three arrays
# Here each id follows from the one before it, so that there is something to learn.


def batch_of(seed, B=16):
    first = np.random.default_rng(seed).integers(0, 64, (B, 1))
    ids = (first + 5 * np.arange(config.block_size + 1)) % 64
    return nb.Batch.of(ids[:, :-1], ids[:, 1:])  # of NumPy arrays: a step moves them to its device


# --- One pure step

schedule = dict(schedule="cosine", lr=3e-3, min_lr=3e-4, warmup=args.steps // 6, total=args.steps)
train_config = nb.TrainConfig(**schedule, weight_decay=0.1, clip=1.0)
pure_step = nb.make_train_step(config, train_config)

before = bits(params, opt_state.master, opt_state.m, opt_state.v)
first_params, first_state, metrics = pure_step(params, opt_state, batch_of(0))
assert bits(params, opt_state.master, opt_state.m, opt_state.v) == before  # inputs are untouched,
assert bits(first_params) != bits(params)  # outputs are fresh,
again, _, _ = pure_step(params, opt_state, batch_of(0))
assert bits(again) == bits(first_params)  # and the same inputs give the same bits
print(f"first step: {metrics}")

# The learning rate is a function of the step, here on the host.
lr_at = Schedule("cosine", lr=3e-3, min_lr=3e-4, warmup=args.steps // 6, total=args.steps).lr_at
assert np.isclose(float(metrics.lr), lr_at(0), rtol=1e-6)

# --- The same step, in place
# `donate` writes the results over the inputs, which are then gone; `capture`, on a GPU, replays that from a
# graph. All of them give the same bits.

donated_step = nb.donate(nb.make_train_step(config, train_config))
params, opt_state, _ = donated_step(params, opt_state, batch_of(0))
assert bits(params, opt_state.m, opt_state.v) == bits(first_params, first_state.m, first_state.v)
print("pure and donated: the same bits")

late = metrics
for step in range(1, args.steps):
    params, opt_state, metrics = donated_step(params, opt_state, batch_of(step))
    if step % 20 == 0:  # reading a number waits for the device, so read it a step late
        print(
            f"step {step}: loss {float(late.loss):.4f}, gradient norm {late.grad_norm:.3f}, lr {late.lr:.2e}"
        )
    late = metrics

# --- Evaluation

eval_step = nb.make_eval_step(config)
loss_sum, n_targets = eval_step(params, batch_of(10_000, B=32))
print(f"evaluation: {loss_sum.item() / n_targets.item():.4f} nats per token, {n_targets.item()} tokens")

# --- Files

with tempfile.TemporaryDirectory() as folder:
    path = nb.save(Path(folder) / "checkpoint", params, opt_state, config=config, train_config=train_config)
    loaded = nb.load(path, device=params.device)
assert loaded.config == config and bits(loaded.params, loaded.opt_state.m) == bits(params, opt_state.m)
next_bits = bits(donated_step(loaded.params, loaded.opt_state, batch_of(args.steps))[0])
assert next_bits == bits(
    pure_step(params, opt_state, batch_of(args.steps))[0]
)  # it goes on as if never saved
print("saved, loaded, and a step further: the same bits")

# --- Text, if these ids were text

ids = nb.generate(params, config, [3, 8, 13], max_new_tokens=12, temperature=0.0)
print("generated:", *ids)
