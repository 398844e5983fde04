import dataclasses
import json
import math
import os
import signal

import numpy as np
import pytest

import nbtrain.run
from nbtrain.checkpoint import load, save
from nbtrain.config import TrainConfig
from nbtrain.data import eval_batches
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.run import RunConfig, evaluate, micro_batches, resumed, why_no_capture
from nbtrain.train import init, make_eval_step
from tests.short_runs import CONFIG, TRAIN_CONFIG, Quiet, bits_of, losses_of, rows_of, train_on_cpu

LEVEL = TrainConfig(lr=1e-6)  # the loss stays where it is, but for the batches' differences


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(dtype, run_config, tmp_path):
    whole = train_on_cpu(run_config, tmp_path / "whole", dtype=dtype)

    def interrupt(step):
        if step == 10:
            signal.raise_signal(signal.SIGINT)

    half = train_on_cpu(run_config, tmp_path / "half", dtype=dtype, report=Quiet(interrupt))
    assert (half.interrupted, half.step, half.val_loss) == (True, 10, None)
    checkpoint = load(tmp_path / "half", device="cpu")
    again, train_config = resumed(checkpoint)
    assert (again, train_config) == (run_config, TRAIN_CONFIG)
    rest = train_on_cpu(again, tmp_path / "half", train_config=train_config, resume=checkpoint)
    assert (rest.interrupted, rest.step, rest.val_loss) == (False, 20, whole.val_loss)
    losses = losses_of(tmp_path / "half")
    assert losses == losses_of(tmp_path / "whole") and len(losses) == 20
    assert bits_of(rest.checkpoint.opt_state) == bits_of(whole.checkpoint.opt_state)
    assert rest.checkpoint.params.buffer.tobytes() == whole.checkpoint.params.buffer.tobytes()
    assert rest.checkpoint.data_state == whole.checkpoint.data_state


def test_the_saved_checkpoint_is_the_result(run_config, tmp_path):
    result = train_on_cpu(run_config, tmp_path / "run")
    on_disk = load(tmp_path / "run", device="cpu")
    assert on_disk.opt_state.step.item() == 20 and bits_of(on_disk.opt_state) == bits_of(
        result.checkpoint.opt_state
    )
    assert on_disk.config == CONFIG and on_disk.train_config == TRAIN_CONFIG


def test_training_learns_and_the_log_tells_every_step(run_config, tmp_path):
    run_config = dataclasses.replace(run_config, steps=60)
    train_config = dataclasses.replace(TRAIN_CONFIG, total=60)
    config = dataclasses.replace(CONFIG, dropout=0.0)
    result = train_on_cpu(run_config, tmp_path / "run", config, train_config)
    rows = rows_of(tmp_path / "run")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert abs(steps[0]["loss"] - math.log(20)) < 0.2 and steps[-1]["loss"] < 1.0
    assert all(
        row["n_targets"] == 2 * 3 * 8 and row["tokens_per_s"] > 0 and not row["skipped"] for row in steps
    )
    assert steps[0]["lr"] == pytest.approx(1e-2 / 3) and steps[-1]["lr"] < 1.1e-3
    evaluations = {row["step"]: row for row in rows if "val_loss" in row}
    assert list(evaluations) == [8, 16, 24, 32, 40, 48, 56, 60]
    # On the way two batches of 3 windows of 8 tokens, at the end all but the first token.
    assert evaluations[8]["val_tokens"] == 48 and evaluations[60]["val_tokens"] == 99
    assert evaluations[60]["val_loss"] == result.val_loss < 1.0
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_read_when_the_next_step_has_been_launched(run_config, tmp_path, monkeypatch):
    """As on a GPU, which then never waits for the host; evaluations and the end read what there is."""
    events, donate = [], nbtrain.run.donate

    def watched(step):
        donated = donate(step)

        def launch(*args):
            events.append("launch")
            return donated(*args)

        return launch

    monkeypatch.setattr(nbtrain.run, "steps_ahead", lambda place: 1)
    monkeypatch.setattr(nbtrain.run, "donate", watched)
    run_config = dataclasses.replace(run_config, steps=5, eval_every=3)
    train_on_cpu(run_config, tmp_path / "run", report=Quiet(events.append))
    assert events == ["launch", "launch", 1, "launch", 2, 3, "launch", "launch", 4, 5]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 3, 4, 5, 5]


def test_validation_takes_the_mean_over_tokens_not_batches(run_config):
    params, _ = init(CONFIG, dtype="fp32", device="cpu")
    step = make_eval_step(CONFIG)
    by_5, by_64 = (
        evaluate(step, params, eval_batches(list(run_config.val), B=B, T=8, vocab_size=20)) for B in (5, 64)
    )
    assert by_5[1] == by_64[1] == 99 and by_5[0] == pytest.approx(by_64[0], rel=1e-5)
    losses = iter([(2.0, 1), (3.0, 9)])
    fake = lambda params, batch: tuple(np.array([x]) for x in next(losses))  # noqa: E731
    assert evaluate(fake, None, [None, None]) == (0.5, 10)


def test_checkpoints_on_the_way_do_not_change_the_run(run_config, tmp_path):
    plain = train_on_cpu(run_config, tmp_path / "plain")
    often = train_on_cpu(dataclasses.replace(run_config, save_every=6), tmp_path / "often")
    assert bits_of(often.checkpoint.opt_state) == bits_of(plain.checkpoint.opt_state)
    rows = [json.loads(line) for line in (tmp_path / "often" / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "checkpoint" in row]
    assert [row["checkpoint"] for row in rows] == [f"step_{step:08d}" for step in (6, 12, 18, 20)]
    # No bound: a stall is as long as the save before takes, which on a busy disk may be seconds.
    assert all(row["stall_ms"] > 0 and row["write_ms"] > 0 for row in rows)
    folder = tmp_path / "often" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000018", "step_00000020"]
    # The last one cut by 8 bytes: the run goes on from the one before, and ends where it had ended.
    model = folder / "step_00000020" / "model.safetensors"
    os.truncate(model, model.stat().st_size - 8)
    named = []
    checkpoint = load(tmp_path / "often", device="cpu", passed_over=named.append)
    assert checkpoint.opt_state.step.item() == 18 and len(named) == 1 and str(model) in named[0]
    run, train_config = resumed(checkpoint)
    again = train_on_cpu(run, tmp_path / "often", train_config=train_config, resume=checkpoint)
    assert bits_of(again.checkpoint.opt_state) == bits_of(plain.checkpoint.opt_state)
    assert losses_of(tmp_path / "often") == losses_of(tmp_path / "plain")


def test_a_run_without_skipping_takes_no_limits_from_its_checkpoint(run_config, tmp_path):
    half = train_on_cpu(dataclasses.replace(run_config, steps=10), tmp_path / "half").checkpoint
    tight = half.opt_state._replace(limits=np.array([1e-3, 1e-3], np.float32))
    rest = train_on_cpu(run_config, tmp_path / "rest", resume=half._replace(opt_state=tight))
    assert rest.checkpoint.opt_state.updates.item() == 20


def test_a_run_resumed_elsewhere_says_that_bits_may_differ(run_config, tmp_path):
    kept = train_on_cpu(dataclasses.replace(run_config, steps=5), tmp_path / "run").checkpoint
    kept = load(kept.meta["path"], device="cpu")
    for differs, words in (([], []), (["cpu i486, here znver4"], ["bits may differ", "i486, here znver4"])):
        report = Quiet()
        checkpoint = kept._replace(meta=kept.meta | {"differs": differs}, params=kept.params.alias())
        state = kept.opt_state
        trees = {name: getattr(state, name).alias() for name in ("m", "v")}
        checkpoint = checkpoint._replace(opt_state=state._replace(master=checkpoint.params, **trees))
        train_on_cpu(run_config, tmp_path / "other", resume=checkpoint, report=report)
        said = [text for text in report.said if "bits may differ" in text]
        assert len(said) == bool(words) and all(word in said[0] for word in words)


def test_a_run_goes_on_only_from_a_checkpoint_that_can(run_config, tmp_path):
    done = train_on_cpu(dataclasses.replace(run_config, steps=2), tmp_path / "run").checkpoint
    with pytest.raises(InvalidValue, match="has done 2 of 2 steps"):
        train_on_cpu(dataclasses.replace(run_config, steps=2), tmp_path / "run", resume=done)
    save(tmp_path / "weights", done.params, config=CONFIG)
    weights = load(tmp_path / "weights", device="cpu")
    with pytest.raises(InvalidValue, match="weights only"):
        train_on_cpu(run_config, tmp_path / "run", resume=weights)
    with pytest.raises(InvalidValue, match="not saved by a run"):
        resumed(weights)
    assert resumed(done, steps=50)[0].steps == 50


def test_the_schedule_of_a_prolonged_run_is_prolonged(run_config, tmp_path):
    checkpoint = train_on_cpu(run_config, tmp_path / "run").checkpoint
    run, train_config = resumed(checkpoint, steps=30)
    assert (run.steps, train_config.total) == (30, 30) and run.train == run_config.train


@pytest.mark.parametrize("late", [0, 1])
def test_outliers_are_skipped_by_the_device_exactly_where_the_host_warns(
    late, run_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(nbtrain.run, "steps_ahead", lambda place: late)
    monkeypatch.setattr("nbtrain.monitor.LEAST", 3)  # with few values a limit moves much from step to step
    run_config = dataclasses.replace(run_config, steps=40, warn_z=0.7, skip_outliers=True)
    options = dict(dtype="fp32", train_config=LEVEL)
    whole = train_on_cpu(run_config, tmp_path / "whole", **options)
    rows = [row for row in rows_of(tmp_path / "whole") if "loss" in row]
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 3 < len(skipped) < 30 and skipped[0] > 3 + late and len(rows) == 40
    assert [row["step"] for row in rows if "warnings" in row] == skipped
    assert all(
        "lies" in row["warnings"][0] and "skipped" in row["warnings"][-1] for row in rows if row["skipped"]
    )
    assert whole.checkpoint.opt_state.updates.item() == 40 - len(skipped)

    # Interrupted after an outlier and resumed, the limits are the same, whatever became of the log.
    def interrupt(step):
        if step == skipped[2]:
            signal.raise_signal(signal.SIGINT)

    half = train_on_cpu(run_config, tmp_path / "half", **options, report=Quiet(interrupt))
    assert half.interrupted
    (tmp_path / "half" / "log.jsonl").unlink()
    rest = train_on_cpu(
        run_config, tmp_path / "half", **options, resume=load(tmp_path / "half", device="cpu")
    )
    assert bits_of(rest.checkpoint.opt_state) == bits_of(whole.checkpoint.opt_state)


def test_outliers_are_told_and_change_nothing_where_none_is_skipped(run_config, tmp_path):
    report = Quiet()
    run_config = dataclasses.replace(run_config, steps=45)
    silent, loud = (dataclasses.replace(run_config, warn_z=z) for z in (0, 1.0))
    plain = train_on_cpu(silent, tmp_path / "plain", train_config=LEVEL)
    told = train_on_cpu(loud, tmp_path / "told", train_config=LEVEL, report=report)
    assert bits_of(plain.checkpoint.opt_state) == bits_of(told.checkpoint.opt_state)
    warned = [row["step"] for row in rows_of(tmp_path / "told") if "warnings" in row]
    assert warned and [text for text in report.said if "standard deviations" in text] == [
        f"step {row['step']}: {'; '.join(row['warnings'])}"
        for row in rows_of(tmp_path / "told")
        if "warnings" in row
    ]
    assert not any("warnings" in row for row in rows_of(tmp_path / "plain"))
    with pytest.raises(InvalidValue, match="warn_z is 0"):
        dataclasses.replace(run_config, warn_z=0, skip_outliers=True)


def test_micro_batches_come_from_the_tokens_of_a_step():
    assert micro_batches(524_288, 16, 1024) == 32 and micro_batches(96, 12, 8) == 1
    for total, B, T, nearest in (
        (500_000, 16, 1024, 507_904),
        (95, 12, 8, 96),
        (1, 12, 8, 96),
        (145, 12, 8, 192),
    ):
        with pytest.raises(InvalidValue, match=f"The nearest is {nearest}\\."):
            micro_batches(total, B, T)
    for wrong in ((0, 1, 1), (8, 0, 1), (8, 1, True), (8.0, 1, 1)):
        with pytest.raises(InvalidValue, match="must be an int"):
            micro_batches(*wrong)


def test_a_step_is_captured_only_where_its_products_can_be(monkeypatch):
    monkeypatch.setattr("nbtrain.device.blas.room", lambda: ("cublaslt", "because of a test"))
    assert why_no_capture("cuda:0") is None and "the run is on hip:0" in why_no_capture("hip:0")
    monkeypatch.setattr("nbtrain.device.blas.room", lambda: ("cupy", "because of a test"))
    assert "through cupy: because of a test" in why_no_capture("cuda:0")
    with pytest.raises(Unavailable, match="asked for, but a graph needs products through cuBLASLt"):
        nbtrain.run.check_available("cuda:0", True, False)
    nbtrain.run.check_available("cuda:0", None, False)


def test_a_run_from_given_weights_begins_with_them(run_config, tmp_path):
    run_config = dataclasses.replace(run_config, steps=1)
    params, opt_state = init(CONFIG, seed=9, dtype="fp16", device="cpu")
    want = evaluate(make_eval_step(CONFIG), params, eval_batches(list(run_config.val), B=3, T=8))
    still = dataclasses.replace(TRAIN_CONFIG, lr=0.0, min_lr=0.0)
    result = train_on_cpu(run_config, tmp_path / "run", train_config=still, start=(params, opt_state))
    assert result.val_loss == want[0] and result.checkpoint.params.dtype == np.float16


@pytest.mark.parametrize(
    "field, value",
    [("steps", 0), ("B", 0), ("micro", -1), ("seed", -1), ("eval_every", -1), ("B", True), ("steps", 2.0)],
)
def test_counts_of_a_run_are_checked(field, value):
    with pytest.raises(InvalidValue, match=f"{field} must be an int"):
        RunConfig(train=("a",), **{field: value})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 2**64}, "seed must be an int in 0"),
        ({"train": 5}, "train must be a tuple of paths"),
        ({"train": [5]}, "train must be a tuple of paths"),
        ({"val": "a.bin"}, "val must be a tuple of paths"),
        ({"skip_outliers": "no"}, "skip_outliers must be True or False"),
        ({"format": 5}, "format is one of auto"),
        ({"steps": "5"}, "steps must be an int"),
        ({"colour": 5}, "unknown option 'colour'"),
    ],
)
def test_options_of_a_run_in_a_checkpoint_are_checked_and_the_file_is_named(
    change, message, run_config, tmp_path
):
    saved = train_on_cpu(dataclasses.replace(run_config, steps=1), tmp_path / "run").checkpoint
    told = saved.meta["extra"]["run"]
    for wrong, because in (
        (told | change, message),
        ({name: value for name, value in told.items() if name != "steps"}, "was not saved by a run"),
        ({}, "was not saved by a run"),
    ):
        meta = saved.meta | {"extra": {"run": json.loads(json.dumps(wrong))}}
        with pytest.raises(InvalidValue, match=f"step_00000001.*{because}"):
            resumed(saved._replace(meta=meta), steps=9)


def test_what_the_monitor_saw_is_checked_and_the_file_is_named(run_config, tmp_path):
    short = dataclasses.replace(run_config, steps=1)
    saved = train_on_cpu(short, tmp_path / "run").checkpoint
    wrong = saved._replace(meta=saved.meta | {"extra": saved.meta["extra"] | {"monitor": 5}})
    with pytest.raises(InvalidValue, match="step_00000001: the state of a Monitor is damaged"):
        train_on_cpu(run_config, tmp_path / "run", resume=wrong)


def test_going_on_from_an_earlier_checkpoint_says_which_later_ones_go(run_config, tmp_path):
    run_config = dataclasses.replace(run_config, steps=8, save_every=2, keep_last=9)
    train_on_cpu(run_config, tmp_path / "run")
    report = Quiet()
    early = load(tmp_path / "run/checkpoints/step_00000004", device="cpu")
    train_on_cpu(run_config, tmp_path / "run", resume=early, report=report)
    assert any(
        "later than step 4 (step_00000006 … step_00000008) are kept in" in text for text in report.said
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_in_an_older_one_s_folder_replaces_it_whole(resume, run_config, tmp_path):
    older, other = (
        dataclasses.replace(run_config, steps=8, save_every=2, keep_last=9, seed=s) for s in (1, 2)
    )
    train_on_cpu(older, tmp_path / "a", settings={"seed": 1})
    train_on_cpu(other, tmp_path / "b")
    from_b = load(tmp_path / "b/checkpoints/step_00000004", device="cpu") if resume else None
    report, in_between = Quiet(), []
    report.step = lambda step, *rest: in_between.append(sorted((tmp_path / "a/checkpoints").glob("step_*")))
    train_on_cpu(dataclasses.replace(other, steps=5), tmp_path / "a", resume=from_b, report=report)
    assert in_between[0] == []  # none of the older run's is taken for one of this run's
    assert any("an older run's checkpoints (step_00000002 … step_00000008)" in text for text in report.said)
    first = 5 if resume else 1
    assert [row["step"] for row in rows_of(tmp_path / "a") if "loss" in row] == list(range(first, 6))
    assert (
        not (tmp_path / "a" / "config.toml").exists() and not (tmp_path / "a/checkpoints/replaced").exists()
    )


def test_what_a_failing_run_saves_leaves_the_older_run_s_checkpoints(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.run.MOST_SKIPPED", 3)
    train_on_cpu(dataclasses.replace(run_config, steps=4), tmp_path / "run")
    params, opt_state = init(CONFIG, seed=9, dtype="fp32", device="cpu")
    params.buffer[...] = np.inf
    with pytest.raises(InvalidValue, match="not finite for 3 steps"):
        train_on_cpu(run_config, tmp_path / "run", start=(params, opt_state))
    assert (tmp_path / "run/checkpoints/replaced/step_00000004").is_dir()
    assert (tmp_path / "run/checkpoints/step_00000003").is_dir()
