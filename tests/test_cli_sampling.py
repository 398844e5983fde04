"""nbtrain sample with several prompts, and nbtrain eval on text and questions."""

import codecs
import json
import re

import numpy as np
import pytest

from nbtrain.checkpoint import load, save
from nbtrain.cli.sample import MOST_TEXTS, pieces, print_sample, print_samples, printable, read_prompts
from nbtrain.config import GPTConfig
from nbtrain.device.place import resolve_device
from nbtrain.evaluation import loss_of_tokens
from nbtrain.generate import generate
from nbtrain.model import init_params
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12, vocab_size=256)


@pytest.fixture
def model(tmp_path):
    """(folder of a checkpoint, its params)"""
    params, _ = init_params(CONFIG)
    params.buffer[...] *= 10
    save(tmp_path / "model", params, config=CONFIG, tokenizer=ByteTokenizer())
    return tmp_path / "model", params


def test_several_prompts_are_written_side_by_side(model, nb):
    folder, params = model
    options = ("--max-new-tokens", 9, "--temperature", 0, "--device", "cpu")
    code, out, err = nb("sample", folder, "--prompt", "abc", "--prompt", "z", *options)
    assert code == 0 and not err
    tokenizer = ByteTokenizer()
    texts = generate(params, CONFIG, [[97, 98, 99], [122]], max_new_tokens=9, temperature=0)
    printed = re.split(r"^--- \d+\n", out, flags=re.M)[1:]
    assert len(printed) == 2 and printed[0].startswith("abc") and printed[1].startswith("z")
    for text, shown in zip(texts, printed, strict=True):
        visible = re.findall(r"[!-~]", tokenizer.decode(text))
        assert re.findall(r"[!-~]", shown) == visible and len(visible) > 1


def test_texts_end_with_the_end_of_text(model, capsys):
    folder, params = model
    tokenizer, prompts, options = ByteTokenizer(), ["abc", "z", "y"], dict(temperature=3.0, seed=1)
    ids = [list(prompt.encode()) for prompt in prompts]
    whole = generate(params, CONFIG, ids, max_new_tokens=200, **options)
    texts = [text[len(prompt) :].tolist() for text, prompt in zip(whole, prompts, strict=True)]
    tokenizer.eot = next(id for id in texts[0][5:] if all(id in text for text in texts))
    texts = [bytes(text[: text.index(tokenizer.eot)]).decode("utf-8", "replace") for text in texts]
    shown = [printable(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    checkpoint = load(folder, "cpu")._replace(tokenizer=tokenizer)
    print_samples(checkpoint, prompts, 200, **options)
    assert capsys.readouterr().out == "".join(f"--- {i}\n{text}\n" for i, text in enumerate(shown, 1))
    print_sample(checkpoint, "abc", 200, **options)
    assert capsys.readouterr().out == shown[0] + "\n"


@pytest.mark.parametrize("kind", ["byte", "bpe", "word"])
def test_pieces_are_the_text(kind):
    """Characters of several bytes, a part of one at the end, and a decoder that drops a leading space."""
    text = "Grüße 🙂🙂 und €, 你好 a b c. " * 4
    if kind == "byte":
        tokenizer, ids = ByteTokenizer(), [*text.encode(), 0xFF, 0x61, 0xF0, 0x9F]
    elif kind == "bpe":
        tokenizer = BPETokenizer.train([text[:20]], 262)
        ids = [*tokenizer.encode(text).tolist(), *tokenizer.encode("🙂").tolist()[:-1]]
    else:
        vocab = {"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}
        model = dict(type="WordLevel", vocab=vocab, unk_token="<unk>")
        decoder = dict(type="Metaspace", replacement="▁", prepend_scheme="always", split=True)
        tokenizer, ids = BPETokenizer(json.dumps(dict(model=model, decoder=decoder))), [0, 1, 2, 0, 0, 1]
        assert tokenizer.decode(ids) == "a bc a a b" != "".join(tokenizer.decode([id]) for id in ids)
    found = list(pieces(tokenizer, iter(ids)))
    assert "".join(found) == tokenizer.decode(ids) and len(found) > 5


def test_pieces_do_not_take_longer_from_token_to_token():
    decoded = []

    class Counting(ByteTokenizer):
        def decode(self, ids):
            decoded.append(len(ids))
            return super().decode(ids)

    assert "".join(pieces(Counting(), iter("Grüße".encode() * 300))) == "Grüße" * 300
    assert max(decoded) <= 4


def test_prompts_come_from_a_file_and_samples_in_number(model, nb, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(codecs.BOM_UTF8 + b"one\n\ntwo\r\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one", "two"]
    command = ("sample", model[0], "--prompts-file", tmp_path / "prompts.txt", "--num-samples", 3)
    code, out, _ = nb(*command, "--max-new-tokens", 5, "--device", "cpu")
    begun = re.findall(r"^--- (\d)\n(one|two)", out, re.M)
    assert code == 0 and begun == [(str(i), "one" if i < 4 else "two") for i in range(1, 7)]


@pytest.mark.parametrize("n", [1, 2])
def test_ids_that_the_tokenizer_lacks_are_left_out_and_told(n, model, nb, tmp_path):
    tokenizer = CharTokenizer.from_text("".join(map(chr, range(32, 160))))
    save(tmp_path / "small", model[1], config=CONFIG, tokenizer=tokenizer)
    ids = [generate(model[1], CONFIG, [[3]] * n, max_new_tokens=40, seed=5)[i][1:] for i in range(n)]
    unknown = sum(int((row >= tokenizer.vocab_size).sum()) for row in ids)
    command = ("sample", tmp_path / "small", *("--prompt", "#") * n, "--max-new-tokens", 40, "--seed", 5)
    code, out, err = nb(*command, "--temperature", 1, "--device", "cpu")
    assert code == 0 and 0 < unknown < 40 * n
    assert f"{unknown} tokens are left out: the tokenizer has 128 ids, the model 256" in err
    known = [tokenizer.decode(row[row < tokenizer.vocab_size]) for row in ids]
    shown = re.findall(r"^#(.*)$", out, re.M)
    assert shown == [printable(text) for text in known]


def test_samples_of_one_prompt_differ(model, nb):
    command = ("sample", model[0], "--prompt", "x", "--num-samples", 2, "--temperature", 3)
    _, out, _ = nb(*command, "--max-new-tokens", 30, "--device", "cpu")
    first, second = re.split(r"^--- \d+\n", out, flags=re.M)[1:]
    assert first != second


def test_several_texts_are_stripped_of_what_a_terminal_would_obey(nb, tmp_path):
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=3)
    save(tmp_path / "m", init_params(config)[0], config=config, tokenizer=CharTokenizer("\x1b[a"))
    code, out, _ = nb("sample", tmp_path / "m", "--prompt", "\x1b[a", "--num-samples", 2, "--device", "cpu")
    assert code == 0 and "\x1b" not in out and out.count("[") > 20


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xfe", "expected UTF-8 text"),
        (b"\n\n", "expected a prompt on each line"),
        (codecs.BOM_UTF8, "expected a prompt on each line"),
        (None, "prompts.txt: expected a text file of prompts; it cannot be read: No such file"),
        ("folder", "prompts.txt: expected a text file of prompts; it cannot be read: Is a directory"),
    ],
)
def test_a_file_of_prompts_that_is_none_is_named(model, nb, tmp_path, content, message):
    if content == "folder":
        (tmp_path / "prompts.txt").mkdir()
    elif content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    code, _, err = nb("sample", model[0], "--prompts-file", tmp_path / "prompts.txt", "--device", "cpu")
    assert code == 1 and "prompts.txt" in err and message in err and err.count("\n") == 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "option, value",
    [("top-k", 0), ("top-p", 2), ("temperature", -1), ("seed", -1), ("max-new-tokens", -1)],
)
def test_a_wrong_option_is_told_before_the_prompt_is_printed(option, value, n, model, nb):
    command = ("sample", model[0], "--prompt", "The", "--num-samples", n, "--device", "cpu")
    code, out, err = nb(*command, f"--{option}", value)
    assert (code, out) == (1, "") and err.startswith(f"nbtrain: {option.replace('-', '_')} must ")


def test_a_lost_model_is_told_on_a_line_of_its_own(model, nb, tmp_path):
    model[1]["lnf_b"][...] = np.nan
    save(tmp_path / "lost", model[1], config=CONFIG, tokenizer=ByteTokenizer())
    code, out, err = nb("sample", tmp_path / "lost", "--prompt", "The", "--device", "cpu")
    assert (code, out) == (1, "The\n") and err.startswith("nbtrain: the logit of token 0 is nan")


def test_samples_are_counted_before_memory_is_taken(nb, tmp_path):
    (tmp_path / "prompts.txt").write_text("x\n" * 101)
    one, many = (), ("--prompts-file", tmp_path / "prompts.txt")
    for prompts, n, told in (
        (one, MOST_TEXTS + 1, "1 prompts x 10,001 samples"),
        (many, 100, "101 prompts x 100 samples"),
    ):
        code, out, err = nb("sample", tmp_path / "nowhere", *prompts, "--num-samples", n, "--device", "cpu")
        assert (
            code == 2
            and not out
            and f"at most 10,000 texts, which are written side by side; got {told}"
            in (re.sub(r"[\s│]+", " ", err))
        )
    for prompts, n in ((one, MOST_TEXTS), (many, 99)):
        code, _, err = nb("sample", tmp_path / "nowhere", *prompts, "--num-samples", n, "--device", "cpu")
        assert code == 1 and "there is no checkpoint" in err


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_the_device_that_auto_chose_is_told_on_stderr(command, model, nb, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.device.place._said", set())
    (tmp_path / "text.txt").write_text("some text")
    rest = ("--prompt", "ab") if command == "sample" else ("--text", tmp_path / "text.txt")
    code, out, err = nb(command, model[0], *rest)
    place, why = resolve_device("auto")
    assert code == 0 and err.count(f"nbtrain: device {place}: {why}\n") == 1
    assert out.startswith("ab" if command == "sample" else str(tmp_path / "text.txt")) and why not in out


@pytest.mark.parametrize(
    "args, message",
    [
        (["sample", "m", "--prompt", "a", "--prompts-file", "b"], "not both"),
        (["sample", "m", "--num-samples", "0"], "--num-samples"),
        (["eval", "m"], "give at least one of --data, --text and --choices"),
        (["eval", "m", "--text", "a", "--batch-size", "0"], "--batch-size"),
    ],
)
def test_wrong_usage_exits_with_2(nb, args, message):
    code, _, err = nb(*args)
    assert code == 2 and message in re.sub(r"[\s│]+", " ", err)


def test_eval_tells_the_loss_of_a_text(model, nb, tmp_path):
    folder, params = model
    (tmp_path / "text.txt").write_text("Grüße und noch etwas Text.\n")
    code, out, err = nb("eval", folder, "--text", tmp_path / "text.txt", "--device", "cpu")
    assert code == 0, err
    want = loss_of_tokens(params, CONFIG, ByteTokenizer().encode((tmp_path / "text.txt").read_text()))
    n_bytes = want.n_tokens + 1
    bits = want.loss * want.n_tokens / n_bytes / np.log(2)
    told = f"loss {want.loss:.4f} nats per token, perplexity {want.perplexity:.2f}, {bits:.4f} bits per byte"
    assert told in out and out.endswith(f"{want.n_tokens} tokens, {n_bytes} bytes\n")


def test_eval_tells_the_accuracy_on_questions(model, nb, tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"ctx": "ab", "endings": ["c", "defgh"], "label": i % 2} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    code, out, err = nb("eval", model[0], "--choices", path, "--device", "cpu")
    assert code == 0 and out == f"{path}: acc 0.5000, acc_norm 0.5000, 4 questions\n", err


def test_eval_names_file_and_line_of_what_it_cannot_use(nb, tmp_path):
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=4)
    save(tmp_path / "m", init_params(config)[0], config=config, tokenizer=CharTokenizer(" abc"))
    bad = {"ctx": "a", "endings": ["b", "Ω"], "label": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps({**bad, "endings": ["b", "c"]}) + "\n" + json.dumps(bad))
    code, _, err = nb("eval", tmp_path / "m", "--choices", tmp_path / "q.jsonl", "--device", "cpu")
    assert code == 1 and "q.jsonl:2: unknown character 'Ω'" in err and err.count("\n") == 1
    (tmp_path / "t.txt").write_text("abx")
    code, _, err = nb("eval", tmp_path / "m", "--text", tmp_path / "t.txt", "--device", "cpu")
    assert code == 1 and "t.txt: unknown character 'x'" in err
    save(tmp_path / "n", init_params(config)[0], config=config)
    code, _, err = nb("eval", tmp_path / "n", "--text", tmp_path / "t.txt", "--device", "cpu")
    assert code == 1 and "holds no tokenizer" in err
