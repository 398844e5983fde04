"""How good a model is: its loss on text, and how often it picks the right ending of a sentence.

loss_of_tokens: mean nats a token. Windows of block_size + 1 tokens, one behind the other: each token but the
first is a target once, with what its window has before it.

multiple_choice: questions in the form of HellaSwag (Zellers et al., 2019), JSON-lines with

    {"ctx": "A man sits on a roof. He", "endings": [" …", …], "label": 0}

The context and each " " + ending (an ending that begins with white space stays as it is) are tokens of their
own; log p is the sum over the ending's tokens, given the context and the ending's tokens before. acc counts
the questions whose right ending has the largest log p; acc_norm those where it has the largest log p / the
ending's bytes of UTF-8 without the space: per byte, not per token, so that tokenizers can be compared. The
first of equal ones is the answer.
"""

import codecs
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nbtrain.batch import IGNORE_INDEX, Batch
from nbtrain.config import GPTConfig, is_whole
from nbtrain.device.place import enough_memory, to_device, to_host, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.model import GPT
from nbtrain.tree import Tree, check_params

Report = Callable[[int, int], None]  # how much is done, of how much
MOST_LINE_BYTES = 1 << 20  # of a file of questions
LENGTH_STEP = 32  # batches of endings have lengths that are multiples of it, so that few shapes occur


class TextLoss(NamedTuple):
    loss: float  # mean nats a token
    n_tokens: int  # targets

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > 700 else math.exp(self.loss)


class Question(NamedTuple):
    ctx: str
    endings: tuple[str, ...]
    label: int  # of the right ending
    place: str  # "file:line", for what is said about it


class Score(NamedTuple):
    acc: float  # by log p
    acc_norm: float  # by log p a byte
    n: int  # questions


class Scorer(GPT):
    """The loss of every token of a batch, where `GPT` has the sum."""

    def losses(self, params: Tree, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """(B, T) fp32 nats of targets (B, T), host arrays as tokens; 0 where a target is IGNORE_INDEX."""
        check_params(params, self.config.leaves())
        place = params.device
        with use(place), enough_memory("an evaluation", "Take a smaller batch_size."):
            arrays = (to_device(x, place) for x in (tokens, targets, np.zeros(tokens.size, np.int32)))
            self.eval_loss(params, Batch(*arrays))
            return to_host(self._scratch("losses", (tokens.size,), np.float32)).reshape(tokens.shape).copy()


def loss_of_tokens(
    params: Tree, config: GPTConfig, ids, *, batch_size: int = 16, report: Report = lambda done, total: None
) -> TextLoss:
    """The loss on a sequence of ids (n,), n >= 2. `report` is told how many tokens are done, and of how
    many."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or len(ids) < 2:
        raise InvalidValue(f"a loss needs ids (n,) with n >= 2; got shape {ids.shape}. Give a longer text.")
    _check_ids(ids, config.vocab_size, "ids")
    _check_batch_size(batch_size)
    scorer, T, total = Scorer(config, "full"), min(config.block_size, len(ids) - 1), 0.0
    starts = range(0, len(ids) - 1, T)
    for first in range(0, len(starts), batch_size):
        rows = [ids[i : i + T + 1] for i in starts[first : first + batch_size]]
        tokens, targets = _padded(rows, [0] * len(rows), T)
        total += float(scorer.losses(params, tokens, targets).sum(dtype=np.float64))
        report(min((first + batch_size) * T, len(ids) - 1), len(ids) - 1)
    return TextLoss(total / (len(ids) - 1), len(ids) - 1)


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a JSON-lines file; empty lines are skipped, other keys than the three ignored. A label
    may be a number or its digits as text, and a byte order mark may stand at the beginning. Raises
    InvalidValue naming file and line."""
    path = Path(path)
    questions = []
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise InvalidValue(
                    f"{path}:{number}: expected a line of at most {MOST_LINE_BYTES} bytes. Is it JSON-lines, "
                    "one question a line?"
                )
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                questions.append(_question(line, f"{path}:{number}"))
    if not questions:
        raise InvalidValue(f"{path}: expected a question on each line; the file has none.")
    return questions


def _question(line: bytes, place: str) -> Question:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{place}: expected a JSON object; got {str(error)[:200]}.") from None
    wanted = '{"ctx": text, "endings": [text, …], "label": number of the right ending}'
    if not isinstance(row, dict):
        raise InvalidValue(f"{place}: expected {wanted}; got {type(row).__name__}.")
    ctx, endings, label = row.get("ctx"), row.get("endings"), row.get("label")
    if not isinstance(ctx, str) or not ctx:
        raise InvalidValue(f"{place}: expected ctx, a text that is not empty; got {_short(ctx)}.")
    if (
        not isinstance(endings, list)
        or len(endings) < 2
        or not all(isinstance(ending, str) and ending.strip() for ending in endings)
    ):
        raise InvalidValue(
            f"{place}: expected endings, a list of at least two texts, none empty; got {_short(endings)}."
        )
    if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 10:
        label = int(label)
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(endings):
        raise InvalidValue(
            f"{place}: expected label, the number of the right ending, 0 … {len(endings) - 1}; got "
            f"{_short(label)}."
        )
    return Question(ctx, tuple(endings), label, place)


def _short(value) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def multiple_choice(
    params: Tree,
    config: GPTConfig,
    tokenizer,
    questions: Sequence[Question],
    *,
    batch_size: int = 16,
    report: Report = lambda done, total: None,
) -> Score:
    """The score on questions. A context that is too long loses its beginning; an ending that the model's
    context cannot hold, or text that the tokenizer cannot encode, is an InvalidValue naming file and line.
    `report` is told how many endings are done, and of how many."""
    _check_batch_size(batch_size)
    items = [item for i, question in enumerate(questions) for item in _items(i, question, tokenizer, config)]
    if not items:
        raise InvalidValue("multiple_choice expects at least one question; got none.")
    pairs = [item[2:] for item in items]
    log_p = log_likelihoods(params, config, pairs, batch_size=batch_size, report=report)
    right = norm = at = 0
    for question in questions:
        scores = log_p[at : at + len(question.endings)]
        n_bytes = np.array([len(e.strip().encode("utf-8", "surrogatepass")) for e in question.endings])
        right += int(scores.argmax()) == question.label
        norm += int((scores / n_bytes).argmax()) == question.label
        at += len(scores)
    return Score(right / len(questions), norm / len(questions), len(questions))


def _items(i: int, question: Question, tokenizer, config: GPTConfig) -> Iterator[tuple]:
    """(question, ending, context's ids, ending's ids) of each ending."""
    try:
        ctx = np.asarray(tokenizer.encode(question.ctx))
        texts = [e if e[0].isspace() else f" {e}" for e in question.endings]
        endings = [np.asarray(tokenizer.encode(text)) for text in texts]
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{question.place}: {error}") from None
    for k, ending in enumerate(endings):
        if len(ending) > config.block_size:
            raise InvalidValue(
                f"{question.place}: ending {k} has {len(ending)} tokens, and the model's context "
                f"{config.block_size}. Leave the question out, or take a model with a longer context."
            )
        for name, ids in (("ctx", ctx), (f"endings[{k}]", ending)):
            if not len(ids):
                raise InvalidValue(f"{question.place}: {name} has no tokens. Give it text.")
            _check_ids(ids, config.vocab_size, f"{question.place}: token of {name}")
        yield i, k, ctx, ending


def log_likelihoods(
    params: Tree,
    config: GPTConfig,
    pairs: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    batch_size: int = 16,
    report: Report = lambda done, total: None,
) -> np.ndarray:
    """(n,) fp64: the sum of log p of each continuation's tokens behind its context, for pairs (context ids,
    continuation ids), both not empty; the last block_size + 1 tokens count. Pairs of like lengths are
    computed together. `report` is told how many pairs are done, and of how many."""
    rows = []
    for context, continuation in pairs:
        ids = np.concatenate([context, continuation])[-config.block_size - 1 :]
        rows.append((ids.astype(np.int32), len(ids) - len(continuation)))
    scorer, result = Scorer(config, "full"), np.empty(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]), reverse=True)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        longest = len(rows[chosen[0]][0]) - 1
        T = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, config.block_size)
        tokens, targets = _padded([rows[i][0] for i in chosen], [rows[i][1] - 1 for i in chosen], T)
        losses = scorer.losses(params, tokens, targets)
        result[chosen] = -losses.sum(1, dtype=np.float64)
        report(first + len(chosen), len(order))
    return result


def _padded(rows, first_targets, T: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens, targets (B, T) of rows of at most T + 1 ids; targets before each row's first one do not
    count."""
    tokens = np.zeros((len(rows), T), np.int32)
    targets = np.full((len(rows), T), IGNORE_INDEX, np.int32)
    for b, (ids, first) in enumerate(zip(rows, first_targets, strict=True)):
        tokens[b, : len(ids) - 1] = ids[:-1]
        targets[b, first : len(ids) - 1] = ids[first + 1 :]
    return tokens, targets


def _check_ids(ids: np.ndarray, vocab_size: int, name: str) -> None:
    if ids.dtype.kind not in "iu":
        raise InvalidType(f"{name} must be integers; got {ids.dtype}. A tokenizer's encode makes them.")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidValue(
            f"{name}[{at}] is {ids[at]}, outside the model's vocabulary 0..{vocab_size - 1}. Use the "
            "tokenizer that the model was trained with."
        )


def _check_batch_size(batch_size: int) -> None:
    if not is_whole(batch_size) or batch_size < 1:
        raise InvalidValue(f"batch_size must be an int, 1 or more; got {batch_size!r}.")
