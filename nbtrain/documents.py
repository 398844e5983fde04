"""Documents out of text files, JSON-lines and Parquet: in pieces of bounded size, in an order that is fixed.

A text file is one document, cut where a line ends so that its pieces can be encoded one by one; a line of a
.jsonl file and a row of a .parquet file are one each. `plan` says which text goes into which split, `read`
gives it from any `Place` on: the same parts whenever and however often it is asked.
"""

import codecs
import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from nbtrain.device.machine import cores
from nbtrain.errors import InvalidValue, Unavailable

TEXT_SUFFIXES = (".txt", ".md")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "rows"}  # others: text
FOLDER_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".ndjson", ".parquet")
PIECE = 2**18  # characters of a text that are encoded together
CHUNK = 2**20  # bytes, about, that a process is given at a time
OVERHEAD = 64  # bytes that a part costs besides
BLOCK = 2**20  # bytes of one read
MAX_LINE = 2**27  # bytes of a line of JSON
BOM = codecs.BOM_UTF8
SPLITS = ("train", "val")
STRINGS = ("string", "large_string", "dictionary<values=string")  # types of a column of texts


class Input(NamedTuple):
    name: str  # for messages
    path: Path | None
    kind: str  # text, lines or rows
    data: bytes = b""  # instead of a path


class Measure(NamedTuple):
    n_bytes: int
    sha256: str
    changed_ns: int  # of a path
    start: int  # bytes of a byte order mark
    n_documents: int  # lines and rows, blank ones too
    n_chars: int  # of a text
    blank: bool


class Segment(NamedTuple):
    """A stretch of one input."""

    input: int
    start: int  # bytes; rows
    end: int
    number: int  # of its first document; of a text, its first character's
    split: int | None  # index of SPLITS; None: by each document's number
    ends: int | None  # split that has an end of a document behind the segment


class Place(NamedTuple):
    """Where in a plan to go on reading."""

    segment: int = 0
    offset: int = 0  # bytes; rows; from the segment's start
    number: int = 0  # documents of the segment before; characters of a text


class Part(NamedTuple):
    """A bit of a segment, to be encoded."""

    name: str  # of the input
    kind: str
    data: Any  # text: str; lines: bytes; rows: list of str or None
    row: int  # of the input, from 0: its first line or row
    number: int  # of its first document; of a text, its first character's
    split: int | None
    ends: int | None

    @property
    def unit(self) -> str:
        return "row" if self.kind == "rows" else "line"


class Chunk(NamedTuple):
    parts: list[Part]
    after: Place
    n_bytes: int  # of the input files, read up to here


def find_inputs(paths, field: str | None) -> list[Input]:
    """The files that `paths` mean, those of a folder sorted by path."""
    found: list[Input] = []
    for given in paths:
        if isinstance(given, Input):
            found.append(given)
            continue
        path = Path(given)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in FOLDER_SUFFIXES and p.is_file())
            if not files:
                raise InvalidValue(
                    f"expected {', '.join(FOLDER_SUFFIXES)} files below {path}, where there are none."
                )
        elif path.exists():
            files = [path]
        else:
            raise InvalidValue(f"expected a file or a folder at {path}, where there is neither.")
        found += [Input(str(file), file, KINDS.get(file.suffix.lower(), "text")) for file in files]
    if not found:
        raise InvalidValue("expected at least one file or folder; got none.")
    if field is not None and all(one.kind == "text" for one in found):
        raise InvalidValue(f"field {field!r} is for JSON-lines and Parquet; the inputs are plain text.")
    return found


def measure(inputs: list[Input], field: str, report: Callable[[str, int, int], None]) -> list[Measure]:
    """What `plan` has to know of each input; reads them once, all of them."""
    total, read = sum(map(_size, inputs)), [0] * len(inputs)
    stop = threading.Event()
    with ThreadPoolExecutor(min(4, cores())) as pool:  # hashing leaves Python's lock alone
        futures = [pool.submit(_measure, one, field, read, i, stop) for i, one in enumerate(inputs)]
        try:
            for future in futures:
                while wait([future], timeout=0.2).not_done:
                    report("reading", sum(read), total)
                future.result()
        finally:
            stop.set()
    report("reading", total, total)
    return [future.result() for future in futures]


def check_unchanged(inputs: list[Input], measured: list[Measure]) -> None:
    for one, then in zip(inputs, measured, strict=True):
        if one.path is not None:
            now = one.path.stat()
            if (now.st_size, now.st_mtime_ns) != (then.n_bytes, then.changed_ns):
                raise InvalidValue(f"{one.name} changed while it was read. Run the command again.")


def in_val(number: int, fraction: Fraction) -> bool:
    """Whether document `number`, from 0, is for validation: every 1/fraction-th."""
    return int((number + 1) * fraction) > int(number * fraction)


def plan(inputs: list[Input], measured: list[Measure], val_fraction: Fraction) -> tuple[list[Segment], dict]:
    """The segments in order, and what is to be said about the split.

    Documents are split by number. Plain texts too few for that are one text, joined in order, whose last
    `val_fraction` of characters is for validation.
    """
    if all(m.blank for m in measured):
        raise InvalidValue(
            f"expected a text in {inputs[0].name}; {len(inputs)} file(s) hold "
            f"{sum(m.n_chars for m in measured)} blank characters."
        )
    n_documents = sum(m.n_documents for m in measured)
    n_val = int(n_documents * val_fraction)
    if n_val == 0 and all(one.kind == "text" for one in inputs):
        return _split_at_end(inputs, measured, val_fraction)
    if n_val == 0 or n_val == n_documents:
        raise InvalidValue(
            f"{n_documents} documents with val_fraction = {float(val_fraction)} leave {n_documents - n_val} "
            f"to train on and {n_val} to validate on; expected at least 1 in each. Give more documents, or "
            "another val_fraction."
        )
    segments, number = [], 0
    for i, (one, m) in enumerate(zip(inputs, measured, strict=True)):
        end = m.n_documents if one.kind == "rows" else m.n_bytes
        split = int(in_val(number, val_fraction)) if one.kind == "text" else None
        if end > m.start:
            first = 0 if one.kind == "text" else number
            segments.append(Segment(i, m.start, end, first, split, split))
        number += m.n_documents
    return segments, {"split": "documents", "n_documents": n_documents}


def _split_at_end(inputs, measured, val_fraction: Fraction) -> tuple[list[Segment], dict]:
    n_chars = sum(m.n_chars for m in measured) + len(inputs) - 1  # a separator counts as a character
    n_val = int(n_chars * float(val_fraction))
    n_train = n_chars - n_val
    if min(n_train, n_val) < 2:
        raise InvalidValue(
            f"a text of {n_chars} characters with val_fraction = {float(val_fraction)} leaves {n_train} to "
            f"train on and {n_val} to validate on; expected at least 2 in each. Take a longer text or "
            "another val_fraction."
        )
    segments, before = [], 0
    for i, (one, m) in enumerate(zip(inputs, measured, strict=True)):
        cut = min(max(n_train - before, 0), m.n_chars)  # characters of this file to train on
        middle = _byte_of_char(one, m, cut)
        before += m.n_chars
        ends = None if i == len(inputs) - 1 else int(before >= n_train)
        before += 1
        pieces = [Segment(i, m.start, middle, 0, 0, None), Segment(i, middle, m.n_bytes, cut, 1, None)]
        pieces = [piece for piece in pieces if piece.start < piece.end] or pieces[:1]
        segments += [*pieces[:-1], pieces[-1]._replace(ends=ends)]
    return segments, {"split": "end", "n_documents": len(inputs), "n_chars": n_chars}


def read(
    inputs: list[Input], measured: list[Measure], segments: list[Segment], field: str, place: Place
) -> Iterator[Chunk]:
    """Everything behind `place`, in order."""
    sizes = np.cumsum([0, *(m.n_bytes for m in measured)])
    parts: list[Part] = []
    size = 0
    for at in range(place.segment, len(segments)):
        segment = segments[at]
        one, m = inputs[segment.input], measured[segment.input]
        offset, number = (place.offset, place.number) if at == place.segment else (0, 0)
        for data, n_data, after, n_documents in _bits(one, segment, offset, field):
            finished = segment.start + after == segment.end
            ends = segment.ends if finished else None
            first = segment.number + number
            parts.append(Part(one.name, one.kind, data, number, first, segment.split, ends))
            number, size = number + n_documents, size + n_data + OVERHEAD
            if size >= CHUNK:
                share = (segment.start + after) / (m.n_documents if one.kind == "rows" else m.n_bytes)
                done = int(sizes[segment.input] + share * m.n_bytes)
                following = Place(at + 1) if finished else Place(at, after, number)
                yield Chunk(parts, following, done)
                parts, size = [], 0
    if parts:
        yield Chunk(parts, Place(len(segments)), int(sizes[-1]))


def texts(part: Part, field: str) -> Iterator[tuple[str, int | None]]:
    """(text, its document's number) of a part; the number is None for a piece of a text file."""
    if part.kind == "text":
        yield part.data, None
        return
    rows = part.data if part.kind == "rows" else part.data.split(b"\n")
    for i, row in enumerate(rows):
        if part.kind == "lines":
            if not row.strip():
                continue
            row = _field_of_line(row, field, f"{part.name}, {part.unit} {part.row + i + 1}")
        if not isinstance(row, str):
            raise InvalidValue(
                f"{part.name}, {part.unit} {part.row + i + 1}: expected a text in {field!r}; got "
                f"{json.dumps(row)[:40]}. Leave the {part.unit} out, or name another field."
            )
        if row:
            yield row, part.number + i


# ----------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def _opened(one: Input) -> Iterator[BinaryIO]:
    with io.BytesIO(one.data) if one.path is None else open(one.path, "rb") as file:
        yield file


def _size(one: Input) -> int:
    return len(one.data) if one.path is None else one.path.stat().st_size


def _measure(one: Input, field: str, read: list[int], index: int, stop: threading.Event) -> Measure:
    digest, n_bytes, n_lines, n_chars, blank, start, last = hashlib.sha256(), 0, 0, 0, True, 0, b"\n"
    changed_ns = 0 if one.path is None else one.path.stat().st_mtime_ns
    with _opened(one) as file:
        while block := file.read(BLOCK):
            if stop.is_set():
                break  # another input failed, or the user left
            digest.update(block)
            if n_bytes == 0 and one.kind != "rows" and block.startswith(BOM):
                start = len(BOM)
            n_bytes += len(block)
            read[index] = n_bytes
            n_lines, last = n_lines + block.count(b"\n"), block[-1:]
            if one.kind == "text":
                n_chars += int(_starts(block).sum())
            blank = blank and not block.removeprefix(BOM).strip()
    n_documents = {"text": 1, "lines": n_lines + (last != b"\n")}.get(one.kind)
    if n_documents is None:
        n_documents = _rows_in(one, field)
        blank = n_documents == 0
    n_chars -= start > 0
    return Measure(n_bytes, digest.hexdigest(), changed_ns, start, n_documents, n_chars, blank)


def _starts(block: bytes) -> np.ndarray:
    """Which bytes begin a character of UTF-8."""
    return (np.frombuffer(block, np.uint8) & 0xC0) != 0x80


def _byte_of_char(one: Input, m: Measure, char: int) -> int:
    """Where in the file character `char` begins, or its end."""
    if char == m.n_chars:
        return m.n_bytes
    seen, at = 0, m.start
    with _opened(one) as file:
        file.seek(at)
        while block := file.read(BLOCK):
            starts = np.flatnonzero(_starts(block))
            if char < seen + len(starts):
                return at + int(starts[char - seen])
            seen, at = seen + len(starts), at + len(block)
    raise InvalidValue(f"{one.name} changed while it was read. Run the command again.")


def _bits(one: Input, segment: Segment, offset: int, field: str) -> Iterator[tuple[Any, int, int, int]]:
    """(data, its size, offset behind it, documents) of a segment from `offset` on."""
    if one.kind == "rows":
        yield from _rows(one, segment.start + offset, segment.end, field)
        return
    with _opened(one) as file:
        file.seek(segment.start + offset)
        bits = _pieces if one.kind == "text" else _lines
        for data, after, n_documents in bits(one.name, file, segment.end - segment.start - offset):
            yield data, len(data), offset + after, n_documents


def _pieces(name: str, file: BinaryIO, n_bytes: int) -> Iterator[tuple[str, int, int]]:
    """The next `n_bytes` of a text; the cuts depend on what lies behind `file`'s place only."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, at, left = "", 0, n_bytes
    while True:
        while len(rest) <= PIECE and left:
            block = file.read(min(BLOCK, left))
            if not block:
                raise InvalidValue(f"{name} became shorter while it was read. Run the command again.")
            left -= len(block)
            try:
                rest += decoder.decode(block, final=not left)
            except UnicodeDecodeError as error:
                byte = file.tell() - len(error.object) + error.start
                raise InvalidValue(
                    f"{name} is not UTF-8: byte {byte} is 0x{error.object[error.start]:02x} "
                    f"({error.reason}). Convert the file to UTF-8."
                ) from None
        cut = _cut(rest) if len(rest) > PIECE else len(rest)
        piece, rest = rest[:cut], rest[cut:]
        at += len(piece.encode("utf-8"))
        yield piece, at, len(piece)
        if not rest and not left:
            return


def _cut(text: str) -> int:
    """Where to cut a text of more than PIECE characters, at most PIECE, so that its pieces are encoded as the
    whole is: behind a newline or before a space, alone between words."""
    for space, behind in (("\n", 1), (" ", 0)):
        at = PIECE
        while (at := text.rfind(space, PIECE // 2, at)) > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + behind
    return PIECE


def _lines(name: str, file: BinaryIO, n_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """Whole lines of the next `n_bytes`."""
    rest, at, left = b"", 0, n_bytes
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise InvalidValue(f"{name} became shorter while it was read. Run the command again.")
        left -= len(block)
        end = block.rfind(b"\n") + 1 if left else len(block)
        if end == 0:
            rest += block
            if len(rest) > MAX_LINE:
                raise InvalidValue(
                    f"{name}: a line at byte {file.tell() - len(rest)} is longer than {MAX_LINE} bytes. "
                    "Is it JSON-lines, one object a line?"
                )
            continue
        lines, rest = rest + block[:end], block[end:]
        at += len(lines)
        yield lines, at, lines.count(b"\n") + (not lines.endswith(b"\n"))


def _field_of_line(line: bytes, field: str, where: str):
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{where}: no JSON ({error}). JSON-lines have one object a line.") from None
    if not isinstance(row, dict) or field not in row:
        found = f"fields {sorted(row)[:10]}" if isinstance(row, dict) else type(row).__name__
        raise InvalidValue(
            f"{where}: expected an object with the field {field!r}; got {found}. Name the field: --field."
        )
    return row[field]


# ----------------------------------------------------------------------------
# Parquet


@contextlib.contextmanager
def _parquet(one: Input) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Unavailable(
            f"{one.name}: reading Parquet takes pyarrow, which is not here. Install it: pip install "
            '"nbtrain[parquet]".'
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(one.path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidValue(f"{one.name} is no Parquet file that can be read: {error}.") from None


def _rows_in(one: Input, field: str) -> int:
    with _parquet(one) as file:
        types = {column.name: str(column.type) for column in file.schema_arrow}
        if not types.get(field, "").startswith(STRINGS):
            raise InvalidValue(
                f"{one.name}: expected a column {field!r} of strings; there are "
                f"{', '.join(f'{name} ({kind})' for name, kind in types.items())}. Name the column: --field."
            )
        return file.metadata.num_rows


def _rows(one: Input, start: int, end: int, field: str) -> Iterator[tuple[list, int, int, int]]:
    with _parquet(one) as file:
        at = 0
        for group in range(file.num_row_groups):
            n_rows = file.metadata.row_group(group).num_rows
            if at + n_rows <= start:
                at += n_rows
                continue
            for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
                rows = batch.column(0).to_pylist()[max(0, start - at) :]
                at += batch.num_rows
                if rows:
                    yield rows, sum(len(row or "") for row in rows), at, len(rows)
