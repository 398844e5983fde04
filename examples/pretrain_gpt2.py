"""Pretrains GPT-2 124M on token files, top to bottom: half a million tokens a step by accumulation, warm-up
and cosine, evaluation, a log, checkpoints.

    nbtrain prepare corpus/ --out data --tokenizer-from gpt2/
    python examples/pretrain_gpt2.py --train 'data/train_*.bin' --val 'data/val_*.bin'

Without token files it takes the bytes of a text, --text or Shakespeare's plays, for a small model:

    python examples/pretrain_gpt2.py --n-layer 4 --n-embd 128 --n-head 4 --block-size 64 --batch-size 12 \
        --total-batch-tokens 1536 --steps 500 --lr 1e-3

The hyperparameters are those of GPT-3's smallest model (Brown et al., 2020). 19,073 steps are 10 billion
tokens.
"""

import argparse
import json
import time
from pathlib import Path

import nbtrain as nb
from nbtrain.checkpoints import Checkpoints
from nbtrain.run import micro_batches
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.tokenizer import ByteTokenizer

parser = argparse.ArgumentParser(description="Pretrains GPT-2.")
parser.add_argument("--train", help="token files: a path or pattern")
parser.add_argument("--val", help="token files to validate on")
parser.add_argument("--text", help="a text file or a folder of them, instead of token files")
parser.add_argument("--vocab-size", type=int, default=50257, help="of --train")
for name, size in (("n-layer", 12), ("n-head", 12), ("n-embd", 768), ("block-size", 1024)):
    parser.add_argument(f"--{name}", type=int, default=size)
parser.add_argument(
    "--batch-size", type=int, default=16, help="sequences of a micro-batch: what memory holds"
)
parser.add_argument("--total-batch-tokens", type=int, default=524_288)
parser.add_argument("--steps", type=int, default=19_073)
parser.add_argument("--warmup", type=int, help="700, or a tenth of short runs")
parser.add_argument("--lr", type=float, default=6e-4)
parser.add_argument("--eval-every", type=int, default=250)
parser.add_argument("--save-every", type=int, default=1000)
parser.add_argument("--dtype", default="auto")
parser.add_argument("--device", default="auto")
parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
args = parser.parse_args()

# Data. Token files come from `nbtrain prepare`, or from llm.c or nanoGPT as they are.
tokenizer, train_files, val_files, vocab_size = None, args.train, args.val, args.vocab_size
if train_files is None:
    tokenizer = ByteTokenizer()
    data = prepare_text(
        read_text(args.text) if args.text else shakespeare_text(), args.out / "data", tokenizer
    )
    train_files, val_files, vocab_size = data.train, data.val, tokenizer.vocab_size

# The model, the optimizer and the place in the data.
sizes = dict(n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd, block_size=args.block_size)
config = nb.GPTConfig(**sizes, vocab_size=vocab_size)
train_config = nb.TrainConfig(
    lr=args.lr,
    min_lr=args.lr / 10,
    schedule="cosine",
    warmup=min(700, args.steps // 10) if args.warmup is None else args.warmup,
    total=args.steps,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    clip=1.0,
)
if args.resume:
    checkpoint = nb.load(args.out, args.device)  # the newest good one
    config, train_config = checkpoint.config, checkpoint.train_config
    params, opt_state, state = checkpoint.params, checkpoint.opt_state, checkpoint.data_state
else:
    (params, opt_state), state = nb.init(config, seed=0, dtype=args.dtype, device=args.device), None
args.out.mkdir(parents=True, exist_ok=True)

# A step is a pure function of params, opt_state and a batch of `micro` micro-batches, whose gradients add up
# in fp32. On an NVIDIA GPU it is captured: one graph instead of hundreds of launches, with the same bits.
micro = micro_batches(args.total_batch_tokens, args.batch_size, config.block_size)
step_of = nb.capture if params.device.startswith("cuda") else nb.donate
train_step = step_of(nb.make_train_step(config, train_config))
eval_step = nb.make_eval_step(config)
spec = dict(T=config.block_size, device=params.device, vocab_size=config.vocab_size)
print(f"{params.n_params:,} parameters, a step is {micro} x {args.batch_size} x {config.block_size} tokens")


def validate(max_batches):
    """Mean loss over the first batches of the validation files, or over all of them."""
    loss_sum = n_targets = 0
    for batch in nb.eval_batches(val_files, B=args.batch_size, max_batches=max_batches, **spec):
        loss, n = eval_step(params, batch)
        loss_sum, n_targets = loss_sum + loss.item(), n_targets + n.item()
    return loss_sum / n_targets


def save(step, wait):
    """The state is copied now; without `wait` it is written beside the next steps."""
    told = dict(config=config, train_config=train_config, tokenizer=tokenizer, data_state=source.state())
    checkpoints.save(step, params, opt_state, wait=wait, **told)


def write(step, metrics):
    """A step's numbers, to the log and now and then to the terminal. Reading them waits for the device, so on
    a GPU the loop does it one step late."""
    global at
    elapsed, at = time.perf_counter() - at, time.perf_counter()
    row = {"step": step} | metrics.read() | {"tokens_per_s": round(args.total_batch_tokens / elapsed)}
    log.write(json.dumps(row) + "\n")
    if step % 10 == 0 or step == args.steps:
        print(f"step {step}/{args.steps}: loss {row['loss']:.4f}, {row['tokens_per_s']:,} tokens/s")


first, unread, at = int(opt_state.step[0]) + 1, [], time.perf_counter()
late = 0 if params.device == "cpu" else 1
with (
    open(args.out / "log.jsonl", "a" if args.resume else "w", buffering=1) as log,
    nb.batches(train_files, B=args.batch_size, micro=micro, seed=0, state=state, **spec) as source,
    Checkpoints(args.out / "checkpoints", keep_last=2) as checkpoints,
):
    for step in range(first, args.steps + 1):
        params, opt_state, metrics = train_step(params, opt_state, next(source))
        unread.append((step, metrics))
        if len(unread) > late:
            write(*unread.pop(0))
        if val_files and step % args.eval_every == 0:
            loss = validate(max_batches=40)
            log.write(json.dumps({"step": step, "val_loss": loss}) + "\n")
            print(f"step {step}: validation loss {loss:.4f}")
        if step % args.save_every == 0 and step < args.steps:
            save(step, wait=False)
    for numbers in unread:
        write(*numbers)
    if first <= args.steps:
        save(step, wait=True)

if val_files:
    print(f"validation loss {validate(max_batches=None):.4f}")
if tokenizer is not None:
    ids = nb.generate(params, config, tokenizer.encode("\n"), max_new_tokens=100, temperature=0.8)
    print(ascii(tokenizer.decode(ids)))
