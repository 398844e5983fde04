"""Short runs of `nbtrain train` on a GPU."""

import json
import signal

import numpy as np
import pytest

from nbtrain.checkpoint import load
from nbtrain.cli import main
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.data import write_tokens
from nbtrain.device.place import to_host
from nbtrain.log import Report
from nbtrain.run import RunConfig, resumed, train

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 200
SMALL = "--n-layer 2 --n-head 2 --n-embd 64 --block-size 64 --batch-size 8 --micro 2 --dropout 0.1 --steps 40"


def _rows(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def _bits(state):
    trees = (state.master, state.m, state.v)
    scalars = (state.step, state.updates, *state.loss_scale)
    return [to_host(tree.buffer).tobytes() for tree in trees] + [to_host(x).tobytes() for x in scalars]


def _cli(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    assert not end.value.code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_captured_run_has_the_bits_of_one_launched_kernel_by_kernel(dtype, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    source = (
        "train",
        "--text",
        tmp_path / "text.txt",
        "--device",
        "cuda:0",
        "--dtype",
        dtype,
        *SMALL.split(),
    )
    _cli(*source, "--lr", "3e-3", "--sample-tokens", 20, "--save-every", 15, "--out", tmp_path / "graph")
    out = capsys.readouterr().out
    assert "steps: captured in one graph (auto)" in out and "final validation loss" in out
    _cli("train", "--config", tmp_path / "graph" / "config.toml", "--no-capture", "--out", tmp_path / "plain")
    assert "steps: launched kernel by kernel (asked for)" in capsys.readouterr().out
    graph, plain = (load(tmp_path / name, device="cuda:0") for name in ("graph", "plain"))
    assert _bits(graph.opt_state) == _bits(plain.opt_state) and graph.meta["dtype"] == dtype
    rows = [row for row in _rows(tmp_path / "graph") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5 and not any(row["skipped"] for row in rows[-10:])
    again = [row for row in _rows(tmp_path / "plain") if "loss" in row]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_outliers_are_skipped_on_the_device_where_the_host_warns_and_after_a_resume(
    dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr("nbtrain.monitor.LEAST", 3)
    ids = np.random.default_rng(0).integers(0, 50, 4000)
    write_tokens(tmp_path / "train.bin", ids, vocab_size=50)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=50, dropout=0.1)
    run = RunConfig(train=(str(tmp_path / "train.bin"),), steps=60, B=4, warn_z=0.7, skip_outliers=True)
    level = TrainConfig(lr=1e-6, loss_scale=1024.0 if dtype == "fp16" else "auto")

    class Quiet(Report):
        stop = None

        def say(self, text):
            pass

        def step(self, step, *rest):
            if step == self.stop:
                signal.raise_signal(signal.SIGINT)

    def go(run, out, **options):
        return train(config, level, run, out, device="cuda:0", **options)

    whole = go(run, tmp_path / "whole", dtype=dtype, report=Quiet())
    rows = [row for row in _rows(tmp_path / "whole") if "loss" in row]
    skipped = [row["step"] for row in rows if row["skipped"]]
    # A limit of 0.7 spreads refuses most steps; 47 of 60 with the CPU's masks in every dtype.
    assert 3 < len(skipped) < 57 and [row["step"] for row in rows if "warnings" in row] == skipped
    assert int(whole.checkpoint.opt_state.updates.item()) == 60 - len(skipped)

    stopping = Quiet()
    stopping.stop = skipped[2] + 1
    assert go(run, tmp_path / "half", dtype=dtype, report=stopping).interrupted
    half = load(tmp_path / "half", device="cuda:0")
    assert resumed(half) == (run, level)
    rest = go(run, tmp_path / "half", resume=half, report=Quiet())
    assert _bits(rest.checkpoint.opt_state) == _bits(whole.checkpoint.opt_state)
