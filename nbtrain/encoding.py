"""Chunks of documents -> ids, by several processes, in order."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from nbtrain.documents import SPLITS, Chunk, Input, Measure, Part, Place, Segment, in_val, read, texts
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.token_file import header
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, from_dict

TRAINING_BYTES = 2**30  # of text that a BPE is learnt from; more tells it little

Report = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all


class Source(NamedTuple):
    """The inputs and what is known of them."""

    inputs: list[Input]
    measured: list[Measure]
    segments: list[Segment]
    field: str
    report: Report

    @property
    def n_bytes(self) -> int:
        return sum(m.n_bytes for m in self.measured)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        return read(self.inputs, self.measured, self.segments, self.field, place)


class Encoder:
    """What a process does with chunks. `tokenizer` is what its to_dict() gave; it is made in that process."""

    def __init__(self, tokenizer: dict, field: str, fraction: Fraction):
        self._given = tokenizer, field, fraction
        self._field, self._fraction = field, fraction
        self._tokenizer: Any = None
        self._end: Any = None

    def __reduce__(self):
        return Encoder, self._given

    def encode(self, chunk: Chunk) -> list[np.ndarray]:
        """The ids of a chunk for each of SPLITS."""
        if self._tokenizer is None:
            self._tokenizer = from_dict(self._given[0])
        dtype = header(0, vocab_size=self._tokenizer.vocab_size)[1]
        ids: list[list[np.ndarray]] = [[np.empty(0, dtype)] for _ in SPLITS]
        for part in chunk.parts:
            for text, number in texts(part, self._field):
                split = int(in_val(number, self._fraction)) if number is not None else part.split
                assert split is not None  # a piece of a text has been given one
                try:
                    ids[split].append(self._tokenizer.encode(text).astype(dtype))
                except InvalidValue as error:
                    raise InvalidValue(f"{_where(part, number)}: {error}") from None
                if number is not None:
                    ids[split].append(self._separator().astype(dtype))
            if part.ends is not None:
                ids[part.ends].append(self._separator().astype(dtype))
        return [np.concatenate(some) for some in ids]

    def _separator(self) -> np.ndarray:
        """What stands behind a document; one text has none, and needs no newline in its vocabulary."""
        if self._end is None:
            eot = self._tokenizer.eot
            self._end = self._tokenizer.encode("\n") if eot is None else np.array([eot])
        return self._end

    def characters(self, chunk: Chunk) -> str:
        """The characters that occur in a chunk, a newline where documents end."""
        found: set[str] = set()
        for part in chunk.parts:
            for text, number in texts(part, self._field):
                found.update(text, "\n" if number is not None else "")
            found.update("\n" if part.ends is not None else "")
        return "".join(sorted(found))


def make_tokenizer(tokenizer, vocab_size: int | None, source: Source, workers: int):
    """The tokenizer: the one given, or for "char", "byte" or "bpe" one made from the texts."""
    if tokenizer == "byte":
        return ByteTokenizer()
    if tokenizer == "char":
        found: set[str] = set()
        encoder = Encoder({}, source.field, Fraction(0))
        with contextlib.closing(in_order(encoder.characters, source.chunks(Place()), workers)) as chunks:
            for chunk, characters in chunks:
                found.update(characters)
                source.report("characters", chunk.n_bytes, source.n_bytes)
        return CharTokenizer.from_text("".join(found))
    if tokenizer == "bpe":
        every = -(-source.n_bytes // TRAINING_BYTES)

        def sampled():
            for i, chunk in enumerate(source.chunks(Place())):
                if i % every == 0:
                    yield from (text for part in chunk.parts for text, _ in texts(part, source.field))
                source.report("training the tokenizer", chunk.n_bytes, source.n_bytes)

        assert vocab_size is not None  # the caller has checked the options
        return BPETokenizer.train(sampled(), vocab_size)
    return tokenizer


def in_order(function, chunks: Iterator[Chunk], workers: int) -> Generator[tuple[Chunk, Any], None, None]:
    """(chunk, function(chunk)) in order, by `workers` processes; few chunks are in memory at a time."""
    if workers == 1:
        yield from ((chunk, function(chunk)) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")  # threads of numba and CUDA do not survive a fork
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function.__self__, function.__name__))
    waiting: deque = deque()
    try:
        for chunk in itertools.chain(chunks, itertools.repeat(None, 2 * workers)):
            if chunk is not None:
                waiting.append((chunk._replace(parts=[]), pool.submit(_work, chunk)))
            if waiting and (chunk is None or len(waiting) >= 2 * workers):
                chunk, future = waiting.popleft()
                yield chunk, future.result()
    except BrokenProcessPool:
        raise Unavailable(
            "a process that encodes has died, perhaps for want of memory. The same command goes on; give it "
            "fewer workers."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: Callable[[Chunk], Any]


def _start_worker(encoder: Encoder, method: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = getattr(encoder, method)


def _work(chunk: Chunk):
    return _worker(chunk)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])  # kill -9 leaves it no time to say good-bye
        os._exit(1)


def _where(part: Part, number: int | None) -> str:
    if number is None:
        return f"{part.name}, in what begins at character {part.number}" if part.number else part.name
    return f"{part.name}, {part.unit} {part.row + number - part.number + 1}"
