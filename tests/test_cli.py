import importlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import nbtrain
from nbtrain.checkpoint import save
from nbtrain.cli.sample import printable
from nbtrain.config import GPTConfig
from nbtrain.model import init_params
from nbtrain.tokenizer import ByteTokenizer, CharTokenizer
from tests.cli_runs import TEXT

COMMANDS = ("train", "sample", "prepare", "eval", "plan", "import", "export", "doctor")


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
        (["train", "--shakespeare", "--steps", "0"], "'--steps'"),
        (["train", "--shakespeare", "--batch-size", "0"], "'--batch-size'"),
        (["train", "--shakespeare", "--sample-tokens", "-1"], "'--sample-tokens'"),
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
        (["train", "--data", "{tmp}/nowhere.bin", "--out", "{tmp}/run"], "no token file matches"),
        (["train", "--data", "{tmp}", "--out", "{tmp}/run"], "is a folder; give its token files"),
        (["train", "--text", "{tmp}/text.txt", "--init", "{tmp}/nowhere", "--out", "{tmp}/run"], "nowhere"),
        (["train", "--text", "{tmp}/text.txt", "--remat", "some", "--out", "{tmp}/run"], "remat"),
        (["train", "--text", "{tmp}/text.txt", "--block-size", "5000", "--out", "{tmp}/run"], "T + 1 = 5001"),
        (["train", "--resume", "{tmp}/nowhere"], "no checkpoint at"),
        (["train", "--text", "{tmp}/text.txt", "--out", "{tmp}/text.txt"], "text.txt is a file"),
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


def test_a_lack_of_memory_is_one_line_that_says_what_to_do(nb, monkeypatch):
    monkeypatch.setattr("nbtrain.prepare.prepare", lambda *args, **options: bytearray(1 << 60))
    for _ in range(2):
        code, _, err = nb("prepare", "a.txt")
        assert code == 1 and err.count("\n") == 1
        assert err.startswith(
            "nbtrain: nbtrain prepare takes more memory than is free: MemoryError. Take less"
        )


def test_an_interrupt_outside_the_steps_exits_with_130(nb, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbtrain.prepare.prepare", interrupted)
    assert nb("prepare", "a.txt") == (130, "", "")


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


def test_eval_refuses_the_ids_of_another_tokenizer(trained, nb, tmp_path):
    (tmp_path / "text.txt").write_text("0123456789\n" * 300)
    code, _, err = nb("prepare", tmp_path / "text.txt", "--out", tmp_path / "digits")
    assert code == 0, err
    digits, letters = tmp_path / "digits" / "val_*.bin", trained[0] / "data" / "val_*.bin"
    code, out, err = nb("eval", trained[0], "--data", digits, "--device", "cpu")
    assert code == 1 and not out and err.count("\n") == 1
    assert f"{digits} was made with another tokenizer (char, 11 ids) than {trained[0]}" in err
    code, _, err = nb("eval", trained[0], "--data", letters, "--data", digits, "--device", "cpu")
    assert code == 1 and "token files of two tokenizers" in err
    (tmp_path / "digits" / "tokenizer.json").unlink()  # nothing says what the ids are
    code, out, err = nb("eval", trained[0], "--data", digits, "--device", "cpu")
    assert code == 0 and out.startswith("loss "), err


def test_eval_tells_the_final_validation_loss(trained, nb):
    folder, told = trained
    code, out, err = nb("eval", folder, "--data", folder / "data" / "val_*.bin", "--device", "cpu")
    assert code == 0, err
    loss = re.search(r"final validation loss (\d\.\d{4})", told)[1]
    perplexity = float(re.search(r"perplexity (\d+\.\d\d)", out)[1])
    assert out.startswith(f"loss {loss} nats per token") and out.endswith(", 269 tokens\n")
    assert perplexity == pytest.approx(np.exp(float(loss)), rel=1e-3)


@pytest.mark.parametrize("what", ["--data", "--text", "--choices"])
def test_eval_shows_how_far_it_is(what, trained, nb, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.cli.progress.LINE_S", -1.0)
    question = {"ctx": "the", "endings": ["fox", "dog"], "label": 0}
    (tmp_path / "questions.jsonl").write_text(f"{json.dumps(question)}\n" * 3)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    given, name = {
        "--data": (trained[0] / "data" / "val_*.bin", "token files"),
        "--text": (tmp_path / "text.txt", str(tmp_path / "text.txt")),
        "--choices": (tmp_path / "questions.jsonl", str(tmp_path / "questions.jsonl")),
    }[what]
    code, out, err = nb("eval", trained[0], what, given, "--device", "cpu", "--batch-size", 4)
    assert code == 0 and out.count("\n") == 1, err
    shares = re.findall(rf"^{re.escape(name)}: (\d+)%$", err, re.M)
    assert shares[-1] == "100" and shares == sorted(shares, key=int) and len(shares) > 1


def test_eval_on_a_terminal_writes_its_bar_beside_its_result(trained):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "nbtrain", "eval", trained[0], "--device", "cpu"]
    command += ["--data", trained[0] / "data" / "val_*.bin"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, text=True, timeout=120)
    os.close(slave)
    shown = os.read(master, 10**6).decode()
    os.close(master)
    assert done.returncode == 0 and "token files" in shown and "nats" not in shown
    assert done.stdout.startswith("loss ") and done.stdout.count("\n") == 1


def test_output_that_nobody_reads_ends_quietly(trained):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nbtrain", "sample", trained[0], "--device", "cpu"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr
