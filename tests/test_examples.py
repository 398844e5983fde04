import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.checkpoint import load
from nbtrain.config import TrainConfig
from nbtrain.train import init_opt_state, make_train_step

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def custom():
    spec = importlib.util.spec_from_file_location("custom_loss", EXAMPLES / "custom_loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shakespeare_example_trains_saves_and_writes(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\x1b\n" * 60)
    (tmp_path / "run" / "checkpoints" / "step_00000099").mkdir(parents=True)  # of a longer run before
    command = [sys.executable, EXAMPLES / "train_shakespeare.py", "--text", tmp_path / "text.txt"]
    options = ["--steps", "8", "--batch-size", "4", "--device", "cpu", "--out", tmp_path / "run"]
    done = subprocess.run(command + options, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 8: loss ") and lines[1].startswith("validation loss ")
    assert lines[1].endswith("over 269 tokens")
    assert lines[2] == "the quick brown fox jumps over the lazy dog" and len(done.stdout) > 300
    assert "\x1b" not in done.stdout  # a terminal would obey it
    got = load(tmp_path / "run", device="cpu")
    assert got.opt_state.step.item() == 8 and got.meta["path"].name == "step_00000008"


def _batch(custom, seed=0, A=1, B=4):
    """Tokens that follow each other: each is predictable from the one before."""
    first = np.random.default_rng(seed).integers(0, 256, (A, B, 1))
    ids = (first + 3 * np.arange(custom.T + 1)) % 256
    return Batch.of(ids[..., :-1], ids[..., 1:])


def test_the_custom_gradients_are_those_of_the_custom_loss(custom):
    params, grads = custom.init_params(), custom.init_params()
    grads.buffer[...] = np.nan  # whatever is not written is seen
    micro = Batch(*(x[0] for x in _batch(custom)))
    scale = np.array([2.0], np.float32)
    custom.loss_and_grads(params, micro, loss_scale=scale, rng=None, out=grads)
    scratch, rng = params.like(), np.random.default_rng(1)

    def loss():
        return float(custom.loss_and_grads(params, micro, loss_scale=scale, rng=None, out=scratch)[0])

    for name, leaf in params:
        # Along a random direction. The losses are sums near 700 in fp32, so the quotient is good to 0.05.
        h, direction = 2e-3, rng.standard_normal(leaf.shape)
        kept, ends = leaf.copy(), []
        for sign in (1, -1):
            leaf[...] = kept + sign * h * direction
            ends.append(loss())
        leaf[...] = kept
        want, got = 2.0 * (ends[0] - ends[1]) / (2 * h), float((grads[name] * direction).sum())
        # The derivative along a normal direction is about as large as the gradient.
        assert abs(got - want) < 0.02 * np.linalg.norm(grads[name]) + 0.05, name


def test_the_custom_model_learns(custom):
    params = custom.init_params()
    opt_state = init_opt_state(params)
    train_step = make_train_step(custom.loss_and_grads, TrainConfig(lr=1e-2))
    losses = []
    for seed in range(80):
        params, opt_state, metrics = train_step(params, opt_state, _batch(custom, seed, A=2, B=8))
        losses.append(float(metrics.loss))
    assert abs(losses[0] - np.log(256)) < 0.3 and losses[-1] < 1.0


def test_the_finetuning_example_lowers_the_loss_and_exports_its_model(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    command = [sys.executable, EXAMPLES / "finetune_gpt2.py", "--text", tmp_path / "text.txt"]
    options = ["--steps", "20", "--batch-size", "4", "--lr", "3e-3", "--device", "cpu", "--out"]

    def run(*args):
        done = subprocess.run([*command, *options, *args], capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    lines = run(tmp_path / "run")
    before, after = (float(lines[i].rpartition(" ")[2]) for i in (1, 3))
    assert lines[1].startswith("validation loss before") and lines[3].startswith("validation loss after")
    assert lines[2].startswith("step 20: loss ") and 4 < before < 7 and after < before - 1
    assert lines[5] == "the quick brown fox jumps over the lazy dog."

    # Its own export, fine-tuned further, begins where it ended.
    again = run(tmp_path / "again", tmp_path / "run" / "model")
    assert again[1] == f"validation loss before: {after:.4f}"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_resume_example_ends_with_the_same_bits(dtype):
    command = [sys.executable, EXAMPLES / "resume.py", "--dtype", dtype, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    losses, equal = done.stdout.splitlines()
    first, last = map(float, losses.removeprefix("loss ").split(" -> "))
    assert abs(first - np.log(65)) < 0.3 and last < first - 0.3
    assert equal == "losses equal, params equal, moments equal"


def test_the_pretraining_example_trains_validates_and_goes_on(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    command = [sys.executable, EXAMPLES / "pretrain_gpt2.py", "--text", tmp_path / "text.txt"]
    options = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4 --total-batch-tokens 128"
    options += " --lr 0.01 --eval-every 4 --device cpu"
    command += [*options.split(), "--out", tmp_path / "run"]

    def run(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("--steps", "8", "--warmup", "2", "--save-every", "4")
    assert "a step is 2 x 4 x 16 tokens" in out and "step 8/8: loss " in out
    assert "step 4: validation loss " in out and "\nvalidation loss " in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9)) and steps[-1]["n_targets"] == 128
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8]
    assert load(tmp_path / "run", device="cpu").opt_state.step.item() == 8

    assert "step 10/10: loss " in run("--steps", "10", "--resume")
    got = load(tmp_path / "run", device="cpu")
    assert got.opt_state.step.item() == 10 and got.train_config.total == 8  # the schedule of the first run
    rows = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if '"loss"' in row] == list(range(1, 11))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_functional_example_keeps_what_it_claims_and_learns(dtype):
    command = [sys.executable, EXAMPLES / "functional_api.py", "--device", "cpu", "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr  # its asserts hold
    losses = [float(n) for n in re.findall(r"^(?:step \d+: loss|evaluation:) ([\d.]+)", done.stdout, re.M)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True) and losses[-1] < 0.5
    ids = [int(n) for n in done.stdout.splitlines()[-1].removeprefix("generated: ").split()]
    assert len(ids) == 15 and all(
        after == (before + 5) % 64 for before, after in zip(ids, ids[1:], strict=False)
    )
