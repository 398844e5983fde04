"""Fine-tunes GPT-2 on a text: weights from a Hugging Face folder, and back into one.

    python examples/finetune_gpt2.py path/to/gpt2 --text my.txt --device cuda:0
    python examples/finetune_gpt2.py --text my.txt

The folder holds config.json, model.safetensors and a tokenizer, as on the Hub under openai-community/gpt2.
Without one, a small GPT-2 with random weights is written and taken. --out/model is what `transformers` loads.
"""

import argparse
from pathlib import Path

import nbtrain as nb
from nbtrain.cli.sample import printable
from nbtrain.huggingface import load_init
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.tokenizer import BPETokenizer

parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", type=Path, help="a GPT-2; without it a small random one")
parser.add_argument("--text", help="a text file or a folder of them, instead of Shakespeare's plays")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--T", type=int, default=256, help="tokens of a sequence, at most the model's positions")
parser.add_argument("--lr", type=float, default=5e-5, help="pretrained weights want a small one")
parser.add_argument("--device", default="auto")
parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
args = parser.parse_args()
text = read_text(args.text) if args.text else shakespeare_text()

# A GPT-2 to begin with, where none is given: this is also how to hand a model of your own to others.
if args.folder is None:
    args.folder = args.out / "random"
    learnt = BPETokenizer.train([text], vocab_size=512)
    small = nb.GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=learnt.vocab_size)
    random, _ = nb.init(small, seed=0, dtype="fp32", device="cpu")
    nb.save_pretrained(args.folder, random, small, learnt)

# Weights in the device's dtype, and an optimizer state whose master weights are those of the file, in fp32.
# To compute and to sample alone: config, params, tokenizer = nb.load_pretrained(folder).
config, params, opt_state, tokenizer = load_init(args.folder, dtype="auto", device=args.device, dropout=0.1)
T = min(args.T, config.block_size)

# The text in the model's own tokens.
data = prepare_text(text, args.out / "data", tokenizer)
print(f"{data.n_train:,} tokens to train on, {data.n_val:,} to validate on")

eval_step = nb.make_eval_step(config)


def validation_loss() -> float:
    """Mean nats per token over the beginning of the validation tokens."""
    loss_sum = n_targets = 0
    for batch in nb.eval_batches(data.val, B=args.batch_size, T=T, max_batches=20, device=params.device):
        loss, n = eval_step(params, batch)
        loss_sum, n_targets = loss_sum + loss.item(), n_targets + n.item()
    return loss_sum / n_targets


print(f"validation loss before: {validation_loss():.4f}")

schedule = dict(schedule="cosine", lr=args.lr, min_lr=args.lr / 10, warmup=args.steps // 10, total=args.steps)
train_step = nb.donate(nb.make_train_step(config, nb.TrainConfig(**schedule, weight_decay=0.1)))
with nb.batches(data.train, B=args.batch_size, T=T, seed=0, device=params.device) as source:
    for step in range(1, args.steps + 1):
        params, opt_state, metrics = train_step(params, opt_state, next(source))
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: loss {float(metrics.loss):.4f}")
print(f"validation loss after: {validation_loss():.4f}")

# The master weights: of a run in 16 bits they hold more than params.
folder = nb.save_pretrained(args.out / "model", opt_state.master, config, tokenizer)
print(f'saved: transformers.GPT2LMHeadModel.from_pretrained("{folder}")')

prompt = tokenizer.encode(text[: text.index("\n") + 1])
ids = nb.generate(params, config, prompt, max_new_tokens=60, temperature=0.8)
print(printable(tokenizer.decode(ids)))  # without the control characters that bytes can spell
