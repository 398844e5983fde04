"""Reads what tests/fixtures/make_golden.py wrote: PyTorch's answers for a small GPT-2, from float64."""

import json
from pathlib import Path
from types import SimpleNamespace

from safetensors import safe_open

PATH = Path(__file__).parent / "fixtures" / "golden_gpt.safetensors"


def load_golden():
    """A namespace of fresh arrays:

    config        keywords of GPTConfig; padded_vocab, ignore_index, schedule (lr, warmup, total, min_lr) and
                  optimizer (betas, eps, weight_decay, clip) say the rest
    params        name -> fp32, the initial values; wte has padded_vocab rows, those from vocab_size on zero
    batches       [(tokens, targets)] * 10, each (A, B, T) int32
    logits        (A*B, T, vocab_size) fp32, and loss (float): batch 0 under the initial params
    grads         name -> fp32: the gradient of that loss, with no clipping
    losses, norms, lrs    (10,) float64: each step's loss and gradient norm before its update, and its rate
    final_logits  like logits, after the ten steps
    """
    with safe_open(PATH, "numpy") as f:
        header = json.loads(f.metadata()["golden"])
        flat = {name: f.get_tensor(name) for name in f.keys()}
    golden = SimpleNamespace(**header, params={}, grads={})
    golden.batches = list(zip(flat.pop("tokens"), flat.pop("targets"), strict=True))
    golden.loss = float(flat.pop("loss"))
    for name, array in flat.items():
        group, _, leaf = name.partition(".")
        if leaf:
            getattr(golden, group)[leaf] = array
        else:
            setattr(golden, name, array)
    return golden
