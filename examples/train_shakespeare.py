"""Trains a GPT on Shakespeare's plays, character by character, as `nbtrain train --shakespeare` does.

    python examples/train_shakespeare.py
    python examples/train_shakespeare.py --text my.txt --steps 500 --device cuda:0

The folder --out is then one that `nbtrain sample` and `nbtrain eval` take: its checkpoints/ holds the model.
"""

import argparse
import time
from pathlib import Path

import nbtrain as nb
from nbtrain.checkpoints import Checkpoints
from nbtrain.cli.sample import printable
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.tokenizer import CharTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file or a folder of them, instead of Shakespeare's plays")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--device", default="auto")
parser.add_argument("--out", type=Path, default=Path("runs/example"))
args = parser.parse_args()

# Text -> token files.
text = read_text(args.text) if args.text else shakespeare_text()
tokenizer = CharTokenizer.from_text(text)
data = prepare_text(text, args.out / "data", tokenizer)

# The model, and a training step: a pure function of params, opt_state and a batch, that `donate` lets reuse
# the memory of the first two.
config = nb.GPTConfig.preset("shakespeare-small", vocab_size=tokenizer.vocab_size)
schedule = dict(schedule="cosine", lr=1e-3, min_lr=1e-4, warmup=min(100, args.steps // 10), total=args.steps)
train_config = nb.TrainConfig(**schedule, betas=(0.9, 0.99), weight_decay=0.1)
params, opt_state = nb.init(config, seed=0, dtype="auto", device=args.device)
train_step = nb.donate(nb.make_train_step(config, train_config))

start = time.perf_counter()
with nb.batches(data.train, B=args.batch_size, T=config.block_size, seed=0, device=params.device) as source:
    for step in range(1, args.steps + 1):
        params, opt_state, metrics = train_step(params, opt_state, next(source))
        if step % 100 == 0 or step == args.steps:  # reading the loss waits for the device
            print(f"step {step}: loss {float(metrics.loss):.4f}, {time.perf_counter() - start:.1f} s")
    told = dict(config=config, train_config=train_config, tokenizer=tokenizer, data_state=source.state())
    checkpoints = Checkpoints(args.out / "checkpoints", keep_last=1)
    checkpoints.start(0)  # those of an earlier run go once this one is saved
    checkpoints.save(args.steps, params, opt_state, wait=True, **told)

# Validation: each token of the file counts once.
eval_step = nb.make_eval_step(config)
loss_sum = n_targets = 0
for batch in nb.eval_batches(data.val, B=64, T=config.block_size, device=params.device):
    loss, n = eval_step(params, batch)
    loss_sum, n_targets = loss_sum + loss.item(), n_targets + n.item()
print(f"validation loss {loss_sum / n_targets:.4f} over {n_targets:,} tokens")

prompt = tokenizer.encode(text[: text.index("\n") + 1])
ids = nb.generate(params, config, prompt, max_new_tokens=300, temperature=0.8)
print(printable(tokenizer.decode(ids)))  # without the control characters that the text may have
