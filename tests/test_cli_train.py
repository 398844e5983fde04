"""nbtrain train"""

import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from nbtrain.checkpoint import load
from nbtrain.cli.config_file import read
from nbtrain.cli.progress import progress_bar
from nbtrain.cli.train import train
from nbtrain.config import GPTConfig
from nbtrain.data import write_tokens
from nbtrain.errors import InvalidValue
from nbtrain.run import resumed, to_toml
from nbtrain.tokenizer import ByteTokenizer
from tests.cli_runs import TEXT, TINY


def test_training_tells_what_it_does(trained):
    folder, out = trained
    assert re.search(r"^text: 2,700 characters, 2,430 tokens to train on, 270 to validate on$", out, re.M)
    assert re.search(r"^model: 1 layers, 2 heads, 16 channels, 16 positions, vocabulary 29: ", out, re.M)
    assert "a step is 1 x 4 x 16 = 64 tokens" in out and "the run 12 steps" in out
    final = re.search(r"^final validation loss (\d\.\d{4}), perplexity (\d+\.\d\d)$", out, re.M)
    assert (
        final
        and 2 < float(final[1]) < 4
        and float(final[2]) == pytest.approx(np.exp(float(final[1])), rel=1e-3)
    )
    assert (
        "steps: launched kernel by kernel (a graph needs an NVIDIA GPU; the run is on cpu)" in out
        and "MFU: unknown" in out
    )
    assert len(out[final.end() :].strip("\n")) > 10, "no sample"
    assert {"checkpoints", "log.jsonl", "loss.png", "data"} <= {entry.name for entry in folder.iterdir()}


def test_what_auto_chose_is_said_with_the_reason(nb, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.precision.resolve_device", lambda name: ("cpu", "because of a test"))
    (tmp_path / "text.txt").write_text(TEXT)
    tiny = [arg for arg in TINY if arg not in ("--device", "cpu")]
    code, out, err = nb(
        "train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", *tiny, "--sample-tokens", 0
    )
    assert code == 0 and not re.search("device|dtype", err)
    assert out.count("device cpu: because of a test") == 1 and out.count("dtype fp32: ") == 1


def test_options_reach_the_configuration(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = "--micro 2 --lr 0.02 --schedule wsd --weight-decay 0.2 --clip 0.5 --seed 3 --dropout 0.25"
    source = ("train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", "--tokenizer", "byte")
    code, _, err = nb(
        *source,
        *TINY,
        *options.split(),
        "--remat",
        "every:1",
        "--min-lr",
        "0.001",
        "--eval-every",
        5,
        "--sample-tokens",
        0,
    )
    assert code == 0, err
    got = load(tmp_path / "run", device="cpu")
    assert got.config == GPTConfig(
        n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=256, dropout=0.25
    )
    c = got.train_config
    assert (c.lr, c.schedule, c.warmup, c.total, c.decay, c.min_lr) == (0.02, "wsd", 1, 12, 1, 0.001)
    assert (c.weight_decay, c.clip, c.remat, c.betas) == (0.2, 0.5, "every:1", (0.9, 0.99))
    run = got.meta["extra"]["run"]
    assert (run["micro"], run["B"], run["seed"], run["eval_every"], run["steps"]) == (2, 4, 3, 5, 12)
    assert isinstance(got.tokenizer, ByteTokenizer) and got.opt_state.seed.tolist() == [3, 0]


def test_a_run_is_repeated_by_its_config(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = (
        "--tokenizer byte --lr 0.02 --schedule wsd --decay 3 --betas 0.8 0.9 --eps 1e-7 --loss-scale 256"
    )
    options += (
        " --warn-z 4 --skip-outliers --total-batch-tokens 128 --keep-every 5 --save-every 5 --dropout 0.1"
    )
    source = ("train", "--text", tmp_path / "text.txt", "--dtype", "fp16", "--sample-tokens", 0, *TINY)
    code, _, err = nb(*source, *options.split(), "--out", tmp_path / "first")
    assert code == 0, err
    file = tmp_path / "first" / "config.toml"
    settings = tomllib.loads(file.read_text())
    assert settings["micro"] == 2
    assert settings["decay"] == 3 and not {"warmup", "min_lr"} & set(settings)  # they follow from others
    assert (settings["dtype"], settings["device"], settings["n_layer"]) == ("fp16", "cpu", 1)
    assert settings["betas"] == [0.8, 0.9] and settings["text"] == str(tmp_path / "text.txt")
    code, _, err = nb("train", "--config", file, "--out", tmp_path / "again")
    assert code == 0, err
    first, again = (load(tmp_path / name, device="cpu") for name in ("first", "again"))
    assert first.params.buffer.tobytes() == again.params.buffer.tobytes()
    assert first.train_config == again.train_config and first.config == again.config
    c = again.train_config
    assert (c.decay, c.betas, c.eps, c.loss_scale, c.total) == (3, (0.8, 0.9), 1e-7, 256.0, 12)
    run = again.meta["extra"]["run"]
    assert (run["warn_z"], run["skip_outliers"], run["micro"], run["keep_every"]) == (4.0, True, 2, 5)
    assert {path.name for path in (tmp_path / "again" / "checkpoints").iterdir()} >= {
        "step_00000005", "step_00000010", "step_00000012",
    }  # fmt: skip
    told = tomllib.loads((tmp_path / "again" / "config.toml").read_text())
    assert told == settings | {"out": str(tmp_path / "again")}


def test_what_nobody_gave_follows_from_what_is_given_beside_a_config(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    begun = ("train", "--text", tmp_path / "text.txt", "--sample-tokens", 0, *TINY, "--schedule", "wsd")
    code, _, err = nb(*begun, "--lr", 0.02, "--steps", 20, "--out", tmp_path / "first")
    assert code == 0, err
    repeat = ("train", "--config", tmp_path / "first" / "config.toml", "--out")
    code, _, err = nb(*repeat, tmp_path / "again", "--lr", 0.001, "--steps", 10)
    assert code == 0, err
    first, again = (load(tmp_path / name, device="cpu").train_config for name in ("first", "again"))
    assert (first.min_lr, first.warmup, first.decay) == (0.002, 2, 2)
    assert (again.min_lr, again.warmup, again.decay) == (0.0001, 1, 1)
    code, _, err = nb(*repeat, tmp_path / "first", "--resume", "auto", "--min-lr", 0.001)
    assert code == 2 and "--min-lr is 0.001, and 0.002 in the run in" in re.sub(r"[\s│]+", " ", err)


def test_flags_win_over_the_config_file_and_void_what_they_replace(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(
        "shakespeare = true\nsteps = 999\nmicro = 3\nlr = 1\nseed = 4\nsample_tokens = 0\nvocab_size = 7\n"
        'preset = "gpt2"\n'
    )
    files = ("--config", tmp_path / "run.toml", "--text", tmp_path / "text.txt", "--out", tmp_path / "run")
    code, _, err = nb("train", *files, *TINY, "--total-batch-tokens", 64)
    assert code == 0, err
    got = load(tmp_path / "run", device="cpu")
    run = got.meta["extra"]["run"]
    assert (run["steps"], run["micro"], run["seed"], got.train_config.lr) == (12, 1, 4, 1.0)
    assert (got.config.vocab_size, got.config.n_layer) == (29, 1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("step = 3", "unknown option 'step'; the nearest known one is 'steps'"),
        ("batch-size = 3", "unknown option 'batch-size'; the nearest known one is 'batch_size'"),
        ("config = 'a'", "unknown option 'config'"),
        ("steps = 'many'", "steps must be an integer of 64 bits; got 'many'"),
        ("steps = true", "steps must be an integer"),
        ("lr = [1]", "lr must be a number; got [1]"),
        ("schedule = 'fast'", "schedule must be one of constant, linear, cosine, wsd; got 'fast'"),
        ("betas = [0.9]", "betas must be a list of 2 numbers"),
        ("data = 'a.bin'", "data must be a list of strings"),
        ("shakespeare = 1", "shakespeare must be true or false"),
        ("steps = ", "is no TOML"),
    ],
)
def test_a_config_file_that_is_wrong_is_named(nb, tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    code, out, err = nb("train", "--config", tmp_path / "run.toml")
    assert code == 1 and not out and err.count("\n") == 1
    assert err.startswith(f"nbtrain: {tmp_path / 'run.toml'}") and message in err


def test_a_config_file_that_is_not_there_is_named(nb, tmp_path):
    code, _, err = nb("train", "--config", tmp_path / "nowhere.toml")
    assert code == 1 and "nowhere.toml" in err and err.count("\n") == 1


def test_a_run_begins_with_the_weights_of_another(trained, nb, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT[:1350])  # other characters would not be in its tokenizer
    options = ("--text", tmp_path / "other.txt", "--init", trained[0], "--out", tmp_path / "run", "--lr", 0)
    tiny = ("--steps", 2, "--device", "cpu", "--sample-tokens", 0, "--batch-size", 4)
    code, _, err = nb("train", *options, *tiny)
    assert code == 0, err
    got, base = (load(folder, device="cpu") for folder in (tmp_path / "run", trained[0]))
    assert got.params.buffer.tobytes() == base.params.buffer.tobytes() and got.config == base.config
    assert got.opt_state.step.item() == 2 and got.tokenizer.to_dict() == base.tokenizer.to_dict()
    code, _, err = nb("train", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert code == 0, err
    assert load(tmp_path / "again", device="cpu").data_state == got.data_state
    code, _, err = nb("train", *options, "--n-layer", 2)
    assert code == 2 and "--n-layer is fixed by the weights" in re.sub(r"[\s│]+", " ", err)


def test_token_files_bring_their_tokenizer(trained, nb, tmp_path):
    data = trained[0] / "data"
    files = ("--data", data / "train_*.bin", "--val", data / "val_*.bin")
    code, out, err = nb("train", *files, "--out", tmp_path / "run", *TINY, "--sample-tokens", 5)
    assert code == 0, err
    assert (
        load(tmp_path / "run", device="cpu").tokenizer.to_dict()
        == load(trained[0], device="cpu").tokenizer.to_dict()
    )
    assert "final validation loss" in out


def test_token_files_without_a_tokenizer_train_and_do_not_sample(nb, tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(500) % 9, vocab_size=9)
    source = ("train", "--data", tmp_path / "train.bin", "--out", tmp_path / "run")
    code, out, err = nb(*source, *TINY, "--vocab-size", 9)
    assert code == 0, err
    assert "validation" not in out
    code, _, err = nb("sample", tmp_path / "run", "--device", "cpu")
    assert code == 1 and "holds no tokenizer" in err
    code, _, err = nb(*source, *TINY, "--vocab-size", 8)
    assert code == 1 and "outside 0..7" in err


def test_the_first_interrupt_saves_and_the_run_goes_on(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [
        sys.executable,
        "-m",
        "nbtrain",
        "train",
        "--text",
        tmp_path / "text.txt",
        "--out",
        tmp_path / "run",
        *TINY,
    ]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command + ["--steps", "1000000", "--warmup", "0"], **pipes)
    log, until = tmp_path / "run" / "log.jsonl", time.monotonic() + 250
    while not (log.exists() and log.read_text().count("\n") >= 3) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (
        f"nbtrain: go on with: nbtrain train --resume {tmp_path / 'run'}\n" in err and "Traceback" not in err
    )
    done = load(tmp_path / "run", device="cpu").opt_state.step.item()
    assert done == log.read_text().count('"lr"') >= 3 and "final validation loss" not in out
    code, out, err = nb(
        *(
            "train",
            "--resume",
            tmp_path / "run",
            "--steps",
            done + 2,
            "--device",
            "cpu",
            "--sample-tokens",
            0,
        ),
        *("--keep-last", 5, "--tensorboard"),
    )
    assert code == 0, err
    assert f"step {done}, on cpu in fp32" in out and "final validation loss" in out
    got = load(tmp_path / "run", device="cpu")
    assert got.opt_state.step.item() == done + 2 and got.meta["extra"]["run"]["keep_last"] == 5
    assert any((tmp_path / "run" / "tensorboard").iterdir())


def test_the_bar_takes_text_as_it_is(capsys):
    report = progress_bar()
    report.say("[bold] is no markup here")
    report.step(1, 2, 3.25, 1234.0, 61.0)
    report.close()
    out = capsys.readouterr().out
    assert "[bold] is no markup here" in out and "1/2" in out and "3.2500" in out and "1,234 tokens/s" in out
    report = progress_bar()
    report.step(2, 2, 3.25, 1234.0, 61.0, 0.4567)
    report.close()
    assert "1,234 tokens/s, MFU 45.7%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options,message",
    [
        (["--device", "cuda:7"], "cuda:7 was asked for"),
        (["--steps", "100", "--schedule", "cosine", "--warmup", "500"], "warmup"),
    ],
)
def test_what_cannot_run_is_said_before_anything_is_written(nb, tmp_path, options, message):
    (tmp_path / "text.txt").write_text(TEXT)
    code, _, error = nb("train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", *options)
    assert code == 1 and message in error
    assert not (tmp_path / "run").exists()


def test_a_bar_whose_terminal_has_gone_ends_no_run(monkeypatch):
    report = progress_bar()

    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(report._progress.console, "file", Gone())
    report.say("still here")
    for step in (1, 2):
        report.step(step, 2, 3.25, 1234.0, 61.0)
    report.close()


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1])
def test_the_config_of_a_run_holds_any_seed(seed, tmp_path):
    (tmp_path / "config.toml").write_bytes(to_toml({"seed": seed}))
    assert read(tmp_path / "config.toml", train.__annotations__) == {"seed": seed}


# --resume auto


def _auto(tmp_path, *options):
    (tmp_path / "text.txt").write_text(TEXT)
    source = ("train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", "--sample-tokens", 0)
    return (*source, *TINY, "--lr", 0.02, "--total-batch-tokens", 64, "--resume", "auto", *options)


def test_resume_auto_begins_goes_on_and_ends(nb, tmp_path):
    code, out, err = nb(*_auto(tmp_path))
    assert code == 0 and "going on from" not in out, err
    code, out, err = nb(*_auto(tmp_path))
    assert code == 0 and out == f"the run in {tmp_path / 'run'} has done 12 steps, and 12 were asked for\n", (
        err
    )
    code, out, err = nb(*_auto(tmp_path, "--steps", 20, "--dtype", "auto"))
    assert code == 0 and "step 12, on cpu in fp32" in out and "final validation loss" in out, err
    got = load(tmp_path / "run", device="cpu")
    assert got.opt_state.step.item() == 20 and got.train_config.lr == 0.02


@pytest.mark.parametrize(
    "options, message",
    [
        (["--lr", 0.01], "--lr is 0.01, and 0.02 in the run in"),
        (["--total-batch-tokens", 128], "--total-batch-tokens is 128, and 64 in the run in"),
        (["--tokenizer", "byte"], "--tokenizer is byte, and char in the run in"),
        (["--text", "other.txt"], "other.txt, and /"),
    ],
)
def test_resume_auto_goes_on_with_the_same_command_only(options, message, nb, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_00000003").mkdir(parents=True)
    text = tmp_path / "text.txt"
    settings = f'text = "{text}"\nlr = 0.02\nmicro = 1\nbatch_size = 4\nblock_size = 16\ntokenizer = "char"\n'
    (tmp_path / "run" / "config.toml").write_text(settings + "n_layer = 1\nn_head = 2\nn_embd = 16\n")
    code, _, err = nb(*_auto(tmp_path, *options))
    assert code == 2 and message in re.sub(r"[\s│]+", " ", err)


def test_the_config_of_a_run_may_be_given_when_it_goes_on(nb, tmp_path):
    code, _, err = nb(*_auto(tmp_path))
    assert code == 0, err
    config = tmp_path / "run" / "config.toml"
    command = ("train", "--config", config, "--resume", tmp_path / "run", "--steps")
    code, out, err = nb(*command, 14)
    assert code == 0 and "step 12, on cpu" in out, err
    (tmp_path / "other.toml").write_text(config.read_text().replace("lr = 0.02", "lr = 0.03", 1))
    code, _, err = nb("train", "--config", tmp_path / "other.toml", *command[3:], 16)
    assert code == 2 and "--lr is 0.03, and 0.02 in the run in" in re.sub(r"[\s│]+", " ", err)


def test_resume_auto_begins_where_the_first_save_was_cut_and_refuses_damage(nb, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000003.tmp-0123abcd").mkdir(parents=True)
    code, _, err = nb(*_auto(tmp_path))
    assert code == 0, err
    assert [path.name for path in folder.iterdir()] == ["step_00000012"]
    (folder / "step_00000012" / "model.safetensors").unlink()
    code, _, err = nb(*_auto(tmp_path))
    assert code == 1 and "model.safetensors is missing" in err


def test_two_runs_do_not_share_a_folder(trained, nb, tmp_path):
    script = "import sys, nbtrain.lock as lock\nwith lock.only_writer(sys.argv[1]):\n"
    script += " print(1, flush=True)\n sys.stdin.read()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    files = {path: path.read_bytes() for path in (trained[0] / "data").iterdir()}
    (tmp_path / "text.txt").write_text("another text\n" * 50)
    with subprocess.Popen([sys.executable, "-c", script, trained[0]], **pipes) as other:
        other.stdout.readline()
        begun = ("train", "--text", tmp_path / "text.txt", "--out", trained[0], *TINY)
        for command in (begun, ("train", "--resume", trained[0], "--steps", 14, "--device", "cpu")):
            code, _, err = nb(*command)
            assert code == 1 and f"is being written by process {other.pid} on" in err and err.count("\n") == 1
        other.stdin.close()
    assert files == {path: path.read_bytes() for path in (trained[0] / "data").iterdir()}


def test_a_data_file_given_on_resuming_is_found_from_elsewhere(nb, tmp_path, monkeypatch):
    write_tokens(tmp_path / "train.bin", np.arange(500) % 9, vocab_size=9)
    monkeypatch.chdir(tmp_path)
    code, _, err = nb("train", "--data", "train.bin", "--out", "run", *TINY, "--vocab-size", 9)
    assert code == 0, err
    resume = ("train", "--resume", tmp_path / "run", "--device", "cpu")
    code, _, err = nb(*resume, "--data", "train.bin", "--steps", 13)
    assert code == 0, err
    monkeypatch.chdir("/")
    code, _, err = nb(*resume, "--steps", 14)
    assert code == 0, err


def test_a_new_text_in_an_older_run_s_folder_leaves_the_older_run_its_data(nb, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(TEXT if name == "a" else TEXT[::-1])
    run = tmp_path / "run"
    begin = ("--out", run, *TINY, "--sample-tokens", 0)
    assert nb("train", "--text", tmp_path / "a.txt", *begin)[0] == 0
    files = {path: path.read_bytes() for path in (run / "data").iterdir()}
    code, _, err = nb("train", "--text", tmp_path / "b.txt", *begin, "--batch-size", 100_000)
    assert code == 1 and "tokens" in err
    resume = ("train", "--resume", run, "--device", "cpu", "--sample-tokens", 0)
    code, _, err = nb(*resume, "--steps", 13)
    assert code == 0, err
    assert nb("train", "--text", tmp_path / "b.txt", *begin)[0] == 0  # takes what the first try prepared
    assert {entry.name for entry in run.iterdir() if entry.name.startswith("data")} == {"data", "data_2"}
    assert files == {path: path.read_bytes() for path in (run / "data").iterdir()}
    trained_on = load(run, device="cpu").meta["extra"]["run"]["train"]
    assert [Path(path).parent.name for path in trained_on] == ["data_2"]
    # Whoever puts other tokens in the place of a run's is told.
    (run / "data_2" / "train_000000.bin").write_bytes(files[run / "data" / "train_000000.bin"])
    code, _, err = nb(*resume, "--steps", 14)
    assert code == 1 and "state belongs to other data" in err


def test_a_run_goes_on_in_another_folder(trained, nb, tmp_path):
    resume = ("train", "--resume", trained[0] / "checkpoints" / "step_00000012", "--device", "cpu")

    def files():
        return {path: path.read_bytes() for path in trained[0].rglob("*.*") if path.name != ".lock"}

    before = files()
    code, _, err = nb(*resume, "--steps", 13, "--out", tmp_path / "fork", "--sample-tokens", 0)
    assert code == 0, err
    assert (tmp_path / "fork" / "checkpoints" / "step_00000013").is_dir()
    settings, forked = (
        tomllib.loads((run / "config.toml").read_text()) for run in (trained[0], tmp_path / "fork")
    )
    assert forked == settings | {"out": str(tmp_path / "fork"), "steps": 13}
    assert files() == before and len(before) > 8


def test_a_checkpoint_outside_a_run_needs_a_folder_to_go_on_in(trained, nb, tmp_path):
    shutil.copytree(trained[0] / "checkpoints" / "step_00000012", tmp_path / "place" / "best")
    resume = ("train", "--resume", tmp_path / "place" / "best", "--steps", 13, "--device", "cpu")
    code, _, err = nb(*resume)
    assert code == 2 and "lies in no run's folder" in re.sub(r"[\s│]+", " ", err)
    assert [entry.name for entry in (tmp_path / "place").iterdir()] == ["best"]
    assert nb(*resume, "--out", tmp_path / "fork", "--sample-tokens", 0)[0] == 0


@pytest.mark.parametrize("seed", ["-1", str(2**64), str(2**70)])
@pytest.mark.parametrize("init", [False, True])
def test_a_seed_that_is_none_is_refused_before_anything_is_written(init, seed, trained, nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--init", trained[0], "--device", "cpu"] if init else TINY
    code, _, err = nb(
        "train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", *options, "--seed", seed
    )
    assert code == 1 and "seed must be an int in 0 … 2**64 - 1" in err
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_in_a_folder_that_was_moved(nb, tmp_path):
    """Even where another run's data lie in its place, by the same names."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    begin = ("--out", tmp_path / "run", *TINY, "--sample-tokens", 0)
    assert nb("train", "--text", tmp_path / "text.txt", *begin)[0] == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    resume = ("train", "--resume", tmp_path / "moved", "--device", "cpu", "--sample-tokens", 0)
    assert nb(*resume, "--steps", 13)[0] == 0
    assert nb("train", "--text", tmp_path / "other.txt", *begin)[0] == 0
    (tmp_path / "moved").rename(tmp_path / "again")
    (tmp_path / "run").rename(tmp_path / "moved")
    checkpoint = load(tmp_path / "again", device="cpu")
    run, _ = resumed(checkpoint, steps=15)
    assert run.train == (str(tmp_path / "again" / "data" / "train_*.bin"),)
    assert run.val == (str(tmp_path / "again" / "data" / "val_*.bin"),)
    (tmp_path / "again" / "data").rename(tmp_path / "again" / "elsewhere")
    (tmp_path / "moved").rename(tmp_path / "gone")
    with pytest.raises(InvalidValue, match="are not there any more. Say where they are: .* --data and --val"):
        resumed(checkpoint, steps=15)
    run, _ = resumed(checkpoint, steps=15, train=("a.bin",), val=())
    assert (run.train, run.val) == (("a.bin",), ())
    # What has no step left needs no data to say so.
    code, out, err = nb("train", "--resume", "auto", "--out", tmp_path / "again", "--device", "cpu")
    assert code == 0 and out.endswith("has done 13 steps, and 13 were asked for\n"), err


# Tokenizers


@pytest.mark.parametrize("option", ["--init", "--val", "--resume"])
def test_ids_of_another_tokenizer_are_refused(option, trained, nb, tmp_path):
    (tmp_path / "text.txt").write_text("0123456789\n" * 300)
    code, _, err = nb("prepare", tmp_path / "text.txt", "--out", tmp_path / "digits")
    assert code == 0, err
    digits, letters = tmp_path / "digits" / "train_*.bin", trained[0] / "data" / "train_*.bin"
    out = ("--out", tmp_path / "run", "--device", "cpu", "--steps", 14)
    command = {
        "--init": ("--init", trained[0], "--data", digits, *out),
        "--val": ("--data", letters, "--val", digits, *out, *TINY),
        "--resume": ("--resume", trained[0], "--steps", 14, "--device", "cpu", "--data", digits),
    }[option]
    code, _, err = nb("train", *command)
    assert code == 1 and "was made with another tokenizer (char, 11 ids) than" in err
    assert not (tmp_path / "run").exists()


def test_bpe_is_learnt_from_the_text(nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    text = ("train", "--text", tmp_path / "text.txt", "--tokenizer", "bpe")
    code, _, err = nb(*text, "--out", tmp_path / "none", *TINY)
    assert code == 2 and "--tokenizer bpe needs --vocab-size" in re.sub(r"[\s│]+", " ", err)
    assert not (tmp_path / "none").exists()
    code, out, err = nb(*text, "--vocab-size", 270, "--out", tmp_path / "run", *TINY, "--sample-tokens", 5)
    assert code == 0, err
    got = load(tmp_path / "run", device="cpu")
    assert (got.config.vocab_size, got.tokenizer.kind) == (
        270,
        "bpe",
    ) and 257 < got.tokenizer.vocab_size <= 270
    n_tokens = int(re.search(r"([\d,]+) tokens to train on", out)[1].replace(",", ""))
    assert n_tokens < len(TEXT) * 0.8
    # A file may hold kind and size, and the command line another text.
    code, _, err = nb(
        "train", "--config", tmp_path / "run" / "config.toml", "--text", tmp_path / "text.txt",
        "--out", tmp_path / "again",
    )  # fmt: skip
    assert code == 0 and load(tmp_path / "again", device="cpu").config.vocab_size == 270, err


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused_before_anything_is_written(nb, tmp_path):
    """Its tokens would train, and its checkpoints could not be read."""
    (tmp_path / "text.txt").write_text(TEXT)
    text = ("train", "--text", tmp_path / "text.txt", "--tokenizer", "byte", "--vocab-size", 128)
    code, _, err = nb(*text, "--out", tmp_path / "run", *TINY)
    assert code == 1 and "the tokenizer has 256 ids, the model only 128" in err
    assert not (tmp_path / "run").exists()


def test_an_interrupted_last_evaluation_sends_nobody_to_resume(nb, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)

    def interrupted(eval_step, params, chosen, stop):
        signal.raise_signal(signal.SIGINT)
        return 1.0, 1

    monkeypatch.setattr("nbtrain.run.evaluate", interrupted)
    text = ("train", "--text", tmp_path / "text.txt", "--out", tmp_path / "a run", "--eval-every", 0)
    code, _, err = nb(*text, *TINY)
    assert code == 130 and f"every step is done and saved in '{tmp_path / 'a run'}'" in err
