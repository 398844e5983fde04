"""A run that was saved, killed and resumed has the bits of one that went through."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.checkpoint import INDEX, load, save
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.data import batches, write_tokens
from nbtrain.device import FLOATS
from nbtrain.device.place import to_device, to_host, use
from nbtrain.modes import capture, donate
from nbtrain.train import init, make_train_step

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=20, dropout=0.1)
# The scale doubles after every third good step, so that it and its counter are on their way at step 10.
TRAIN_CONFIG = TrainConfig(
    lr=1e-2, schedule="cosine", warmup=3, total=20, loss_scale="dynamic", growth_interval=3
)


def batches_of(config, n, device, seed=0, A=2, B=3):
    """n batches of random tokens, on `device`."""
    shape = (A, B, config.block_size + 1)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (n, *shape)).astype(np.int32)
    return [Batch(*(to_device(x, device) for x in Batch.of(i[..., :-1], i[..., 1:]))) for i in ids]


def _bits(params, state):
    trees = (params, state.master, state.m, state.v)
    scalars = (state.step, state.updates, *state.loss_scale, state.seed)
    return [to_host(tree.buffer).tobytes() for tree in trees] + [to_host(x).tobytes() for x in scalars]


def _steps(make, params, opt_state, chosen):
    """(losses, params, opt_state) behind some steps."""
    train_step, losses = make(make_train_step(CONFIG, TRAIN_CONFIG)), []
    with use(params.device):
        for batch in chosen:
            params, opt_state, metrics = train_step(params, opt_state, batch)
            losses.append(float(metrics.loss))
    return losses, params, opt_state


def _check_resume(make, dtype, device, folder):
    chosen = batches_of(CONFIG, 20, device)
    losses, *whole = _steps(make, *init(CONFIG, 3, dtype, device), chosen)
    first, *half = _steps(make, *init(CONFIG, 3, dtype, device), chosen[:10])
    initial = init(CONFIG, 3, dtype, device)[1].loss_scale.value.item()
    value, good_steps = (x.item() for x in half[1].loss_scale)
    assert value != initial and good_steps > 0, (value, good_steps)
    save(folder, *half, config=CONFIG)
    checkpoint = load(folder, device)
    assert _bits(checkpoint.params, checkpoint.opt_state) == _bits(*half)
    rest, *resumed = _steps(make, checkpoint.params, checkpoint.opt_state, chosen[10:])
    assert first + rest == losses and _bits(*resumed) == _bits(*whole)
    assert len(set(losses)) == 20


@pytest.mark.parametrize("dtype", FLOATS)
def test_ten_steps_saved_and_ten_more_are_twenty(dtype, tmp_path):
    _check_resume(donate, dtype, "cpu", tmp_path / "checkpoint")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [donate, capture])
@pytest.mark.parametrize("dtype", FLOATS)
def test_ten_steps_saved_and_ten_more_are_twenty_on_a_gpu(dtype, make, tmp_path, pytestconfig):
    _check_resume(make, dtype, pytestconfig.getoption("--device"), tmp_path / "checkpoint")


def test_the_data_go_on_where_they_were(tmp_path):
    """Across the end of an epoch: the same tokens, each once."""
    write_tokens(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 20, 200), vocab_size=20)
    spec = dict(B=3, T=8, micro=2, seed=5)
    with batches(tmp_path / "train.bin", **spec) as source:
        tokens = [next(source).tokens.tobytes() for _ in range(20)]
    with batches(tmp_path / "train.bin", **spec) as source:
        first = [next(source).tokens.tobytes() for _ in range(10)]
        params, opt_state = init(CONFIG, 3, "fp32", "cpu")
        save(tmp_path / "checkpoint", params, opt_state, config=CONFIG, data_state=source.state())
    with batches(
        tmp_path / "train.bin", **spec, state=load(tmp_path / "checkpoint", "cpu").data_state
    ) as rest:
        assert first + [next(rest).tokens.tobytes() for _ in range(10)] == tokens


# Kills

RUN = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from nbtrain.checkpoint import has_checkpoint, load
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.run import Report, RunConfig, resumed, train

class Told(Report):
    def say(self, text):
        print(text, flush=True)
    def step(self, step, *rest):
        print("step", step, flush=True)

out, tokens, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if has_checkpoint(out / "checkpoints"):
    checkpoint = load(out, "cpu", passed_over=print)
    run, train_config = resumed(checkpoint)
    train(checkpoint.config, train_config, run, out, device="cpu", resume=checkpoint, report=Told())
else:
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=20, dropout=0.1)
    train_config = TrainConfig(lr=1e-2, schedule="cosine", warmup=3, total=steps, growth_interval=5)
    run = RunConfig(train=(tokens,), steps=steps, B=3, micro=2, seed=5, eval_every=0, save_every=3)
    train(config, train_config, run, out, device="cpu", dtype="fp16", report=Told())
"""
STEPS_A_KILL = 60  # the most that an idle machine takes before the kill, with room


def _start(out, tokens, steps):
    script = RUN.format(root=str(Path(__file__).parents[1]))
    environment = os.environ | {"NBTRAIN_TARGET": "none", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(out), str(tokens), str(steps)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def _finish(process):
    out, _ = process.communicate(timeout=250)
    assert process.returncode == 0, out
    return out


def _result(out):
    """(losses by step, digests of the last checkpoint's files)."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [(row["step"], row["loss"], row["loss_scale"]) for row in rows if "loss" in row]
    last = load(out, "cpu")
    return losses, json.loads((last.meta["path"] / INDEX).read_text())["files"], last.opt_state.step.item()


def _kill_and_resume(folder, kills, seed):
    rng, steps = random.Random(seed), STEPS_A_KILL * (kills + 1)
    write_tokens(folder / "train.bin", np.random.default_rng(0).integers(0, 20, 2000), vocab_size=20)
    _finish(_start(folder / "whole", folder / "train.bin", steps))  # compiles, too
    begun, out, said = time.perf_counter(), folder / "killed", []
    while_saving, at_start, start_s = 0, 0, 0.5  # the last: from a start to its first step
    for _ in range(kills):
        process, started = _start(out, folder / "train.bin", steps), time.perf_counter()
        if rng.random() < 0.2:  # while it starts or loads
            time.sleep(rng.uniform(0, start_s))
            at_start += 1
        else:  # some steps on, then any moment of the steps and saves that follow
            told, n = rng.randrange(1, 10), 0
            for line in process.stdout:
                said.append(line)
                n += line.startswith("step ")
                if n == 1 and line.startswith("step "):
                    start_s = time.perf_counter() - started
                if n == told:
                    break
            time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, rest
        said += rest.splitlines()
        while_saving += any(".tmp-" in path.name for path in (out / "checkpoints").glob("*"))
    said += _finish(_start(out, folder / "train.bin", steps)).splitlines()
    passed_over = sum("passed over" in line for line in said)
    whole, killed = _result(folder / "whole"), _result(out)
    for a, b in zip(killed[0], whole[0], strict=True):
        assert a == b, f"the first step that differs; said: {' | '.join(map(str.strip, said))}"
    assert killed == whole and [step for step, *_ in whole[0]] == list(range(1, steps + 1))
    assert whole[2] == steps and len({scale for *_, scale in whole[0]}) > 1
    print(
        f"{kills} kills in {time.perf_counter() - begun:.0f} s, {at_start} of them at the start, "
        f"{while_saving} left an unfinished save, of which "
        f"{passed_over} were passed over"
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9 on this system")
def test_a_run_killed_five_times_ends_with_the_bits_of_one_that_was_not(tmp_path):
    _kill_and_resume(tmp_path, kills=5, seed=0)


@pytest.mark.kills
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9 on this system")
def test_a_run_killed_a_hundred_times_ends_with_the_bits_of_one_that_was_not(tmp_path):
    _kill_and_resume(tmp_path, kills=100, seed=1)
