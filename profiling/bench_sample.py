"""Tokens a second of sampling, nbtrain beside transformers, in one run.

    python -m profiling.bench_sample [--preset gpt2] [--batch 1 8 64] [--dtype bf16 fp16] [--prompt 64]
                                     [--new 256] [--peers transformers compile] [--repeats 3] [--out FOLDER]

GPT-2's sizes with random weights, which cost what trained ones cost. Greedy, and drawn with top-k 50. On a
GPU where there is one, else on the CPU in fp32. Each row is the median of --repeats whole calls behind one
that warms up: prefill of the prompts, and --new tokens for each of them on the host at the end. `step` is
nbtrain's forward pass of one token and its choice, without the prefill.

transformers: GPT2LMHeadModel with attn_implementation="sdpa", generate() with its default cache; with
`compile`, too, its static cache, for which it compiles the forward pass on a GPU. Neither stops early.
"""

import argparse
import statistics
import time
import traceback
from pathlib import Path

import numpy as np

from nbtrain.config import PRESETS, GPTConfig
from nbtrain.decode import Decoder
from nbtrain.device import FLOATS
from nbtrain.device.place import resolve_device, synchronize, to_device
from nbtrain.generate import generate
from nbtrain.model import init_params
from nbtrain.tree import Tree
from profiling.timing import RESULTS, machine, write_results

WAYS = {"greedy": dict(temperature=0.0), "top-k 50": dict(temperature=1.0, top_k=50)}


def seconds(work, repeats: int, wait) -> float:
    """Median time of `work()` behind one call that warms up."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def prompts(config, B: int, n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, (B, n)).astype(np.int32)


def nbtrain_rows(config, dtype: str, B: int, args, device: str):
    start = time.perf_counter()
    master, _ = init_params(config)
    buffer = to_device(master.buffer.astype(FLOATS[dtype]), device)
    params, ids = Tree(master.layout, buffer), prompts(config, B, args.prompt)
    decoder = Decoder(params, config, B, min(args.prompt + args.new, config.block_size))

    def wait():
        synchronize(device)

    wait()
    made = time.perf_counter() - start
    for way, options in WAYS.items():
        call = dict(max_new_tokens=args.new, decoder=decoder, **options)
        start = time.perf_counter()
        generate(params, config, ids, **call)
        first = time.perf_counter() - start
        s = seconds(lambda call=call: generate(params, config, ids, **call), args.repeats, wait)
        one = seconds(
            lambda call=call: generate(params, config, ids, **{**call, "max_new_tokens": 1}),
            args.repeats,
            wait,
        )
        step = (s - one) / max(1, args.new - 1)
        yield dict(who="nbtrain", way=way, s=s, step_ms=step * 1e3, first_s=first, made_s=made)


def transformers_rows(config, dtype: str, B: int, args, device: str, static: bool):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    place = "cpu" if device == "cpu" else "cuda"
    theirs = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd,
        n_layer=config.n_layer, n_head=config.n_head, attn_implementation="sdpa", eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(theirs).to(place, torch_dtype).eval()
    ids = torch.tensor(prompts(config, B, args.prompt), dtype=torch.int64, device=place)
    mask = torch.ones_like(ids)

    def wait():
        if place == "cuda":
            torch.cuda.synchronize()

    for way, options in WAYS.items():
        sampled = options["temperature"] > 0
        call = dict(max_new_tokens=args.new, min_new_tokens=args.new, do_sample=sampled, pad_token_id=0)
        call |= dict(top_k=options["top_k"]) if sampled else {}
        call |= dict(cache_implementation="static") if static else {}

        @torch.inference_mode()
        def work(call=call):
            out = model.generate(ids, attention_mask=mask, **call).cpu()
            assert out.shape == (B, args.prompt + args.new), f"transformers wrote {tuple(out.shape)}"

        start = time.perf_counter()
        work()
        first = time.perf_counter() - start
        yield dict(
            who="transformers, static cache" if static else "transformers", way=way,
            s=seconds(work, args.repeats, wait), first_s=first,
        )  # fmt: skip


def sections(config, args, device):
    """(what is said of it, rows) of every part of the benchmark."""
    for dtype in args.dtype:
        for B in args.batch:
            shape = config, dtype, B, args, device
            yield dict(dtype=dtype, B=B), "nbtrain", nbtrain_rows(*shape)
            if "transformers" in args.peers:
                yield dict(dtype=dtype, B=B), "transformers", transformers_rows(*shape, static=False)
            if "compile" in args.peers:
                found = transformers_rows(*shape, static=True)
                yield dict(dtype=dtype, B=B), "transformers, static cache", found


def free_memory() -> None:
    """What a section leaves behind goes back to the device."""
    import gc
    import sys

    gc.collect()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2", choices=list(PRESETS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--dtype", nargs="+", choices=list(FLOATS), help="bf16 fp16; fp32 on the CPU")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens to write for each prompt")
    parser.add_argument(
        "--peers", nargs="*", default=["transformers", "compile"], choices=["transformers", "compile"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    device, reason = resolve_device(args.device)
    args.dtype = args.dtype or (["fp32"] if device == "cpu" else ["bf16", "fp16"])
    config = GPTConfig.preset(args.preset)
    print(machine())
    print(f"{args.preset} on {device} ({reason}), prompts of {args.prompt} tokens, {args.new} new ones")
    rows: list[dict] = []
    for about, name, found in sections(config, args, device):
        try:
            for row in found:
                row = {**about, **row, "prompt": args.prompt, "new": args.new, "preset": args.preset}
                row |= dict(device=device, tokens_per_s=about["B"] * args.new / row["s"])
                rows.append(row)
                print(f"{about} {row['who']} {row['way']}: {row['tokens_per_s']:,.0f} tokens/s", flush=True)
        except ImportError as error:
            print(f"{about} {name}: skipped, {error}", flush=True)
        except Exception:
            print(f"{about} {name}: failed", flush=True)
            traceback.print_exc()
        free_memory()
    print("\n| dtype | B | draw | who | tokens/s | of ours | ms a step | first call, s |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        same = [x for x in rows if x["who"] == "nbtrain" and all(x[k] == r[k] for k in ("dtype", "B", "way"))]
        ratio = f"{r['tokens_per_s'] / same[0]['tokens_per_s']:.2f}" if same else "-"
        step = f"{r['step_ms']:.3f}" if "step_ms" in r else f"{r['s'] / r['new'] * 1e3:.3f}*"
        print(
            f"| {r['dtype']} | {r['B']} | {r['way']} | {r['who']} | {r['tokens_per_s']:,.0f} | {ratio} "
            f"| {step} | {r['first_s']:.2f} |"
        )
    print("\n*: the whole call divided by the tokens of a prompt")
    print(f"written to {write_results('bench_sample', rows, args.out)}")


if __name__ == "__main__":
    main()
