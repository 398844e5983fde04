"""Runs of a few steps, and what they leave."""

import json

from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.log import Report
from nbtrain.run import train

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=20, dropout=0.1)
TRAIN_CONFIG = TrainConfig(lr=1e-2, schedule="cosine", warmup=3, total=20, min_lr=1e-3)


class Quiet(Report):
    """Remembers what was said; `at_step` is called with each step's number."""

    def __init__(self, at_step=lambda step: None):
        super().__init__()
        self.said, self._at_step = [], at_step

    def say(self, text):
        self.said.append(text)

    def step(self, step, *rest):
        self._at_step(step)


def train_on_cpu(run_config, out, config=CONFIG, train_config=TRAIN_CONFIG, **options):
    options.setdefault("report", Quiet())
    return train(config, train_config, run_config, out, device="cpu", **options)


def rows_of(out):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    lines = (out / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [row for row in rows if "checkpoint" not in row]


def losses_of(out):
    return [row["loss"] for row in rows_of(out) if "loss" in row]


def bits_of(opt_state):
    trees = (opt_state.master, opt_state.m, opt_state.v)
    scalars = (opt_state.step, opt_state.updates, *opt_state.loss_scale, opt_state.seed)
    return [tree.buffer.tobytes() for tree in trees] + [x.tobytes() for x in scalars]
