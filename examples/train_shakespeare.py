"""Trains a GPT on Shakespeare's plays, character by character, as `nbtrain train --shakespeare` does.

python examples/train_shakespeare.py
python examples/train_shakespeare.py --text my.txt --steps 500 --device cuda:0
"""

import argparse
import time
from pathlib import Path

from nbtrain.checkpoint import save
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.data import batches, eval_batches
from nbtrain.generate import generate
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.tokenizer import CharTokenizer
from nbtrain.train import donate, init, make_eval_step, make_train_step

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file or a folder of them, instead of Shakespeare's plays")
parser.add_argument("--steps", type=int, default=3000)
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
config = GPTConfig.preset("shakespeare-small", vocab_size=tokenizer.vocab_size)
warmup = min(100, args.steps // 10)
train_config = TrainConfig(
    lr=1e-3,
    min_lr=1e-4,
    schedule="cosine",
    warmup=warmup,
    total=args.steps,
    betas=(0.9, 0.99),
    weight_decay=0.1,
)
params, opt_state = init(config, seed=0, dtype="auto", device=args.device)
train_step = donate(make_train_step(config, train_config))

start = time.perf_counter()
with batches(data.train, B=args.batch_size, T=config.block_size, seed=0, device=params.device) as source:
    for step in range(1, args.steps + 1):
        params, opt_state, metrics = train_step(params, opt_state, next(source))
        if step % 100 == 0 or step == args.steps:  # reading the loss waits for the device
            print(f"step {step}: loss {float(metrics.loss):.4f}, {time.perf_counter() - start:.1f} s")
    save(
        args.out / "checkpoint",
        params,
        opt_state,
        config=config,
        tokenizer=tokenizer,
        data_state=source.state(),
    )

# Validation: each token of the file counts once.
eval_step = make_eval_step(config)
loss_sum = n_targets = 0
for batch in eval_batches(data.val, B=64, T=config.block_size, device=params.device):
    loss, n = eval_step(params, batch)
    loss_sum, n_targets = loss_sum + loss.item(), n_targets + n.item()
print(f"validation loss {loss_sum / n_targets:.4f} over {n_targets:,} tokens")

prompt = tokenizer.encode(text[: text.index("\n") + 1])
print(tokenizer.decode(generate(params, config, prompt, max_new_tokens=300, temperature=0.8)))
