import codecs
import json

import numpy as np
import pytest

from nbtrain.config import GPTConfig
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.evaluation import (
    MOST_LINE_BYTES,
    Question,
    TextLoss,
    log_likelihoods,
    loss_of_tokens,
    multiple_choice,
    read_questions,
)
from nbtrain.model import GPT, init_params
from nbtrain.tokenizer import ByteTokenizer, CharTokenizer

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12, vocab_size=256)
GOOD = {"ctx": "He", "endings": ["sat.", "ran away."], "label": 1}


def _params(seed=0):
    params, _ = init_params(CONFIG, seed)
    params.buffer[...] *= 10
    return params


def _log_p(params, ids):
    """log p (n - 1,) of each token behind those before it, in float64; n <= block_size + 1."""
    x = np.array(GPT(CONFIG).logits(params, np.array([ids[:-1]], np.int32))[0]).astype(np.float64)
    x -= x.max(1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    return log_p[np.arange(len(x)), ids[1:]]


def test_the_loss_is_the_mean_over_windows_behind_each_other():
    params = _params()
    ids = np.random.default_rng(0).integers(0, 256, 40).astype(np.int32)
    want = [_log_p(params, ids[i : i + 13]) for i in range(0, 39, 12)]
    for batch_size in (1, np.int64(3), 16):
        got = loss_of_tokens(params, CONFIG, ids, batch_size=batch_size)
        assert got.n_tokens == 39 and got.loss == pytest.approx(-np.concatenate(want).mean(), rel=1e-5)
    short = loss_of_tokens(params, CONFIG, ids[:5])
    assert short.n_tokens == 4 and short.loss == pytest.approx(-_log_p(params, ids[:5]).mean(), rel=1e-5)


def test_perplexity_is_the_exponential_of_the_loss():
    assert TextLoss(2.0, 5).perplexity == pytest.approx(np.exp(2.0)) and TextLoss(1e4, 5).perplexity == np.inf
    assert np.isnan(TextLoss(float("nan"), 5).perplexity)


def test_log_likelihoods_count_the_continuation_only():
    params, rng = _params(), np.random.default_rng(1)
    pairs = [(rng.integers(0, 256, n), rng.integers(0, 256, m)) for n, m in ((3, 4), (1, 1), (5, 8), (30, 2))]
    want = [_log_p(params, np.concatenate(pair)[-13:])[-len(pair[1]) :].sum() for pair in pairs]
    for batch_size in (1, 2, 16):
        got = log_likelihoods(params, CONFIG, pairs, batch_size=batch_size)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_score_counts_right_answers_by_sum_and_by_byte():
    """Questions whose answers by sum and by byte differ, as the model has them; half are labelled right."""
    params, tokenizer, rng = _params(), ByteTokenizer(), np.random.default_rng(2)
    questions, right, norm = [], 0, 0
    for i in range(12):
        endings = tuple("".join(rng.choice(list("abcdef"), n)) for n in (2, 6, 9))
        ids = [tokenizer.encode("xy" + f" {ending}") for ending in endings]
        log_p = [_log_p(params, x)[1:].sum() for x in ids]
        by_byte = [p / len(ending) for p, ending in zip(log_p, endings, strict=True)]
        label = int(np.argmax(log_p if i % 3 else by_byte)) if i % 2 else int(rng.integers(3))
        questions.append(Question("xy", endings, label, f"here:{i}"))
        right += int(np.argmax(log_p)) == label
        norm += int(np.argmax(by_byte)) == label
    score = multiple_choice(params, CONFIG, tokenizer, questions, batch_size=5)
    assert score == (right / 12, norm / 12, 12) and right != norm and 0 < right < 12


def test_an_ending_with_its_own_space_gets_no_other():
    params, tokenizer = _params(), ByteTokenizer()
    for endings in (("ab", "cde"), (" ab", " cde")):
        question = Question("xy", endings, 0, "here:1")
        want = [_log_p(params, tokenizer.encode(f"xy {e.strip()}"))[1:].sum() for e in endings]
        score = multiple_choice(params, CONFIG, tokenizer, [question])
        assert score.acc == float(np.argmax(want) == 0)


def test_the_space_before_an_ending_does_not_count_as_one_of_its_bytes():
    params, tokenizer, rng, differ = _params(), ByteTokenizer(), np.random.default_rng(3), 0
    for i in range(20):
        endings = [" " * n + "".join(rng.choice(list("abcdef"), m)) for n, m in ((1, 5), (6, 3))]
        log_p = np.array([_log_p(params, tokenizer.encode(f"xy{e}"))[1:].sum() for e in endings])
        answer = int((log_p / [5, 3]).argmax())
        differ += answer != int((log_p / [6, 9]).argmax())
        score = multiple_choice(params, CONFIG, tokenizer, [Question("xy", tuple(endings), answer, f"q:{i}")])
        assert score.acc_norm == 1
    assert differ > 3


def test_what_a_tokenizer_or_model_cannot_take_is_named_with_its_line():
    params = _params()
    question = Question("xy", ("ab", "cdΩ"), 0, "q.jsonl:7")
    with pytest.raises(InvalidValue, match=r"q\.jsonl:7: unknown character 'Ω'"):
        multiple_choice(params, CONFIG, CharTokenizer(" abcdxy"), [question])
    question = Question("xy", ("ab", "c" * 20), 0, "q.jsonl:8")
    with pytest.raises(InvalidValue, match=r"q\.jsonl:8: ending 1 has 21 tokens, and the model's context 12"):
        multiple_choice(params, CONFIG, ByteTokenizer(), [question])
    with pytest.raises(InvalidValue, match=r"ids\[2\] is 256"):
        loss_of_tokens(params, CONFIG, [1, 2, 256])
    with pytest.raises(InvalidType, match="ids must be integers; got float64"):
        loss_of_tokens(params, CONFIG, [1.5, 2.5])
    with pytest.raises(InvalidValue, match=r"n >= 2; got shape \(1,\)"):
        loss_of_tokens(params, CONFIG, [1])
    with pytest.raises(InvalidValue, match="batch_size"):
        loss_of_tokens(params, CONFIG, [1, 2], batch_size=0)
    with pytest.raises(InvalidValue, match="batch_size"):
        loss_of_tokens(params, CONFIG, [1, 2], batch_size="2")
    with pytest.raises(InvalidValue, match="another layout"):
        loss_of_tokens(params, GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256), [1, 2])


# Files


def _write(tmp_path, *lines):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def test_questions_are_read_with_their_lines(tmp_path):
    path = _write(tmp_path, {**GOOD, "ind": 4}, b"", {**GOOD, "label": "0"})
    assert read_questions(path) == [
        Question("He", ("sat.", "ran away."), 1, f"{path}:1"),
        Question("He", ("sat.", "ran away."), 0, f"{path}:3"),
    ]


def test_a_byte_order_mark_may_stand_at_the_beginning_alone(tmp_path):
    marked = codecs.BOM_UTF8 + json.dumps(GOOD).encode()
    question = Question("He", ("sat.", "ran away."), 1, f"{tmp_path / 'q.jsonl'}:1")
    assert read_questions(_write(tmp_path, marked)) == [question]
    assert read_questions(_write(tmp_path, codecs.BOM_UTF8, GOOD))[0].place.endswith("q.jsonl:2")
    with pytest.raises(InvalidValue, match=r"q\.jsonl:2: expected a JSON object"):
        read_questions(_write(tmp_path, GOOD, marked))


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "expected a JSON object"),
        (b"\xff", "expected a JSON object"),
        (b"[" * 100_000, "expected a JSON object"),
        (b"[1]", "got list"),
        ({**GOOD, "ctx": ""}, "expected ctx.*got ''"),
        ({**GOOD, "ctx": None}, "got None"),
        ({**GOOD, "endings": ["a"]}, "at least two texts"),
        ({**GOOD, "endings": ["a", " "]}, "none empty"),
        ({**GOOD, "endings": "ab"}, "expected endings"),
        ({**GOOD, "label": 2}, r"0 … 1; got 2"),
        ({**GOOD, "label": -1}, "got -1"),
        ({**GOOD, "label": True}, "got True"),
        ({**GOOD, "label": ""}, "got ''"),
        ({**GOOD, "label": 1.0}, r"got 1\.0"),
        (b" " * (MOST_LINE_BYTES + 1), "at most 1048576 bytes"),
    ],
    ids=lambda x: None if isinstance(x, str) else str(x)[:40],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = _write(tmp_path, GOOD, line)
    with pytest.raises(InvalidValue, match=rf"q\.jsonl:2: .*{message}"):
        read_questions(path)


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(InvalidValue, match=r"q\.jsonl: expected a question on each line"):
        read_questions(_write(tmp_path, b"", b"  "))


def test_a_lack_of_memory_says_what_to_do(monkeypatch):
    params = _params()
    monkeypatch.setattr(GPT, "eval_loss", lambda *args: np.empty(1 << 50, np.uint8))
    with pytest.raises(
        Unavailable, match="an evaluation takes more memory than is free.* smaller batch_size"
    ):
        loss_of_tokens(params, CONFIG, np.arange(40, dtype=np.int32))
