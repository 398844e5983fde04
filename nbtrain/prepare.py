"""Texts -> token files: encoded by several processes, written in order, continued where a run was cut off.

One process reads (`documents.read`), others encode, and the first appends what they made, in the order of
the inputs. Every few seconds the shards so far are flushed and progress.json says how far they go, so that a
run killed at any moment goes on from there when the same command is given again, to the same bytes that an
unbroken one writes. meta.json comes last, when everything else is on the disk.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from nbtrain.documents import SPLITS, Input, Place, check_unchanged, find_inputs, measure, plan
from nbtrain.encoding import Encoder, Report, Source, in_order, make_tokenizer
from nbtrain.errors import InvalidType, InvalidValue, NbtrainError
from nbtrain.files import write_atomically
from nbtrain.token_file import MAX_LLMC_TOKENS, WRITABLE, ShardWriter, header, shard_names
from nbtrain.tokenizer import load_tokenizer

VERSION = 2
TOKENIZER, META, PROGRESS, STDIN = "tokenizer.json", "meta.json", "progress.json", ".stdin.part"
UNFINISHED = re.compile(rf"\.({TOKENIZER}|{META}|{PROGRESS})\.[0-9a-f]+\.tmp")
SHARD_TOKENS = 10**8
COMMIT_S = 2.0  # between two flushes to the disk
BYTES_A_WORKER = 2**22  # less is encoded before another process has started


class Prepared(NamedTuple):
    train: Path  # pattern of the token files, for `batches`
    val: Path  # pattern of the token files
    tokenizer: Path  # JSON, for load_tokenizer
    meta: Path  # JSON: what the folder was made from; written last
    n_train: int  # tokens
    n_val: int  # tokens
    vocab_size: int


def prepare(
    inputs,
    out_dir: str | Path,
    *,
    tokenizer: Any = "char",
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    shard_tokens: int = SHARD_TOKENS,
    field: str | None = None,
    format: str = "nbtrain",
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda what, done, total: None,
) -> Prepared:
    """Writes train_000000.bin ..., val_000000.bin ..., tokenizer.json and meta.json to `out_dir`.

    `inputs` are text files, .jsonl and .parquet files (the texts in their `field`, "text" where None),
    folders of such, `Input`s, and "-", stdin: a text, or JSON-lines where `field` is given. `tokenizer` is a
    tokenizer, or "char", "byte" or "bpe", made from the inputs; "bpe" with at most `vocab_size` ids. Every
    1/val_fraction-th document is for validation; plain texts too few for that are one text, split at its end.
    An end-of-text stands behind each document, a newline where the tokenizer has none.

    The same call continues one that was cut off, and leaves a finished one alone. What another call left in
    `out_dir` is an InvalidValue; `overwrite` begins anew. More than one of `workers` are processes: a script
    that asks for them runs under `if __name__ == "__main__"`.
    """
    options: dict = dict(val_fraction=val_fraction, shard_tokens=shard_tokens, format=format)
    _check_options(tokenizer, vocab_size, workers, **options)
    folder = Path(out_dir)
    paths = [inputs] if isinstance(inputs, str | os.PathLike | Input) else list(inputs)
    stdin = [i for i, path in enumerate(paths) if str(path) == "-"]
    if len(stdin) > 1:
        raise InvalidValue("stdin, '-', can be read once only.")
    with _entered(folder):
        spooled = folder / STDIN
        try:
            if stdin:
                found = find_inputs(paths[: stdin[0]], None) if stdin[0] else []
                behind = paths[stdin[0] + 1 :]
                _spool(spooled)
                found.append(Input("stdin", spooled, "text" if field is None else "lines"))
                found += find_inputs(behind, None) if behind else []
            else:
                found = find_inputs(paths, field)
            options |= dict(field=field or "text", workers=workers, overwrite=overwrite, report=report)
            return _prepare(found, folder, tokenizer, vocab_size=vocab_size, **options)
        finally:
            spooled.unlink(missing_ok=True)


class Occupied(InvalidValue):
    """A folder holds what another call of `prepare` left in it."""


def prepare_text(
    text: str, out_dir: str | Path, tokenizer, val_fraction: float = 0.1, *, overwrite: bool = True
) -> Prepared:
    """`prepare` for one text, a str, whose last `val_fraction` of characters is for validation; it
    replaces what `out_dir` holds, or raises Occupied without `overwrite`. A text that cannot be encoded
    leaves no file."""
    if not isinstance(text, str):
        raise InvalidType(f"prepare_text expects the text as a str; got {type(text).__name__}.")
    try:
        one = Input("the text", None, "text", text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"character {text[error.start]!r} at position {error.start} is half of a surrogate pair, "
            "which UTF-8 does not have. Remove it."
        ) from None
    return prepare([one], out_dir, tokenizer=tokenizer, val_fraction=val_fraction, overwrite=overwrite)


def _prepare(
    inputs: list[Input],
    folder: Path,
    tokenizer,
    *,
    vocab_size: int | None,
    val_fraction: float,
    shard_tokens: int,
    field: str,
    format: str,
    workers: int,
    overwrite: bool,
    report: Report,
) -> Prepared:
    fraction = Fraction(str(val_fraction))
    measured = measure(inputs, field, report)
    segments, split = plan(inputs, measured, fraction)
    source = Source(inputs, measured, segments, field, report)
    content = _digest([[one.kind, m.sha256] for one, m in zip(inputs, measured, strict=True)])
    made_from = {
        "inputs": f"{len(inputs)} of {source.n_bytes} bytes, sha256 {content}",
        "tokenizer": _described(tokenizer, vocab_size),
        "field": field if any(one.kind != "text" for one in inputs) else None,
        "val_fraction": val_fraction,
        "shard_tokens": shard_tokens,
        "format": format,
    }
    meta, progress = _earlier(folder, made_from, overwrite)
    if meta is None:
        workers = max(1, min(workers, source.n_bytes // BYTES_A_WORKER))
        if progress is None:
            tokenizer = make_tokenizer(tokenizer, vocab_size, source, workers)
        else:
            tokenizer = load_tokenizer(folder / TOKENIZER)
        made = _write_shards(folder, source, tokenizer, fraction, made_from, workers, progress)
        check_unchanged(inputs, measured)
        meta = {
            "version": VERSION,
            "tokenizer": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            **made,
            **split,
            "from": made_from,
            "inputs": [
                {"name": one.name, "kind": one.kind, "bytes": m.n_bytes, "sha256": m.sha256}
                for one, m in zip(inputs, measured, strict=True)
            ],
        }
        _write_json(folder / META, meta)
    (folder / PROGRESS).unlink(missing_ok=True)
    patterns = Path(glob.escape(str(folder.absolute())))
    return Prepared(
        patterns / "train_*.bin",
        patterns / "val_*.bin",
        folder / TOKENIZER,
        folder / META,
        meta["n_train"],
        meta["n_val"],
        meta["vocab_size"],
    )


def _write_shards(
    folder: Path, source: Source, tokenizer, fraction: Fraction, made_from: dict, workers: int, progress
) -> dict:
    """Writes the tokenizer and the shards, from where `progress` says on; returns their numbers of tokens."""
    place, at = Place(), {name: (0, 0) for name in SPLITS}
    if progress is not None:
        place, at = Place(*progress["place"]), progress["shards"]
    spec: dict = {name: made_from[name] for name in ("shard_tokens", "format")}
    spec["vocab_size"] = tokenizer.vocab_size
    with contextlib.ExitStack() as stack:
        writers = [ShardWriter(folder, name, at=tuple(at[name]), **spec) for name in SPLITS]

        def commit(place: Place) -> float:
            shards = {name: writer.commit() for name, writer in zip(SPLITS, writers, strict=True)}
            _write_json(folder / PROGRESS, {"from": made_from, "place": place, "shards": shards})
            return time.monotonic()

        kept = progress is not None

        def leave() -> None:
            for writer in writers:
                writer.close(keep=kept)
            if not kept:
                for name in (PROGRESS, TOKENIZER):
                    (folder / name).unlink(missing_ok=True)

        stack.callback(leave)
        committed = commit(
            place
        )  # before a shard can be finished, so that whatever is found has its progress
        if progress is None:
            tokenizer.save(folder / TOKENIZER)
        encoder = Encoder(tokenizer.to_dict(), source.field, fraction)
        encoded = in_order(encoder.encode, source.chunks(place), workers)
        for chunk, ids in stack.enter_context(contextlib.closing(encoded)):
            finished = [writer.finished for writer in writers]
            for writer, some in zip(writers, ids, strict=True):
                writer.add(some)
            source.report("encoding", chunk.n_bytes, source.n_bytes)
            if finished != [w.finished for w in writers] or time.monotonic() - committed > COMMIT_S:
                committed, kept = commit(chunk.after), True
        n_train, n_val = (writer.n_tokens for writer in writers)
        if min(n_train, n_val) < 2:
            raise InvalidValue(
                f"the documents make {n_train} tokens to train on and {n_val} to validate on; expected at "
                "least 2 in each. Give more documents, or another val_fraction."
            )
        commit(Place(len(source.segments)))
        kept = True
        train, val = (writer.finish() for writer in writers)
    return {"n_train": n_train, "n_val": n_val, "shards": train | val}


# ----------------------------------------------------------------------------
# The folder


def _earlier(folder: Path, made_from: dict, overwrite: bool) -> tuple[dict | None, dict | None]:
    """What an earlier run of the same inputs and options left: (meta.json of one that finished, None) or
    (None, progress.json of one cut off). Files of another are refused, or removed with `overwrite`."""
    for entry in list(folder.iterdir()):
        if UNFINISHED.fullmatch(entry.name):
            entry.unlink()  # write_atomically was killed
    meta, progress = (_read_json(folder / name) for name in (META, PROGRESS))
    of_us = [found for found in (meta, progress) if found is not None and found.get("from") == made_from]
    if of_us and not overwrite:
        if of_us[0] is meta and _is_whole(folder, meta):
            return meta, None
        if progress in of_us and _is_progress(progress) and (folder / TOKENIZER).is_file():
            return None, progress
    shards = [name for split in SPLITS for name in shard_names(folder, split)]
    ours = [name for name in (META, PROGRESS, TOKENIZER, *shards) if (folder / name).exists()]
    visible = [name for name in ours if not name.startswith(".")]
    if visible and not (of_us or overwrite):
        earlier = next((found["from"] for found in (meta, progress) if found and "from" in found), None)
        unlike = [
            f"{key} was {earlier.get(key)!r} and is {value!r} now"
            for key, value in made_from.items()
            if isinstance(earlier, dict) and earlier.get(key) != value
        ]
        raise Occupied(
            f"{folder} holds {visible[0]} of other inputs or options"
            f"{': ' + '; '.join(unlike) if unlike else ''}. Take another folder, or begin anew: --overwrite."
        )
    for name in ours:  # meta.json first: without it, what is left is no data
        (folder / name).unlink()
    return None, None


def _is_progress(progress: dict) -> bool:
    """Whether a progress.json has its form."""
    place, shards = progress.get("place"), progress.get("shards")
    if not isinstance(place, list) or not isinstance(shards, dict) or set(shards) != set(SPLITS):
        return False
    numbers = [place, *shards.values()]
    return [len(some) for some in numbers if isinstance(some, list)] == [len(Place()), 2, 2] and all(
        type(n) is int and n >= 0 for some in numbers for n in some
    )


def _is_whole(folder: Path, meta: dict) -> bool:
    """Whether the files are there that a meta.json tells of, each of its size."""
    try:
        for name, count in meta["shards"].items():
            head, dtype = header(count, vocab_size=meta["vocab_size"], format=meta["from"]["format"])
            if (folder / name).stat().st_size != len(head) + count * dtype.itemsize:
                return False
        return (folder / TOKENIZER).is_file()
    except (OSError, KeyError, TypeError, AttributeError, NbtrainError):
        return False


@contextlib.contextmanager
def _entered(folder: Path) -> Iterator[None]:
    """The folder, made if need be and removed if nothing comes of it, for one run at a time."""
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock ends with the process, however that ends."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another run is writing into {folder}. Wait for it, or take another folder."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _spool(path: Path) -> None:
    """stdin as a file: it is read more than once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        while block := sys.stdin.buffer.read(2**20):
            file.write(block)


def _write_json(path: Path, value: dict) -> None:
    data = json.dumps(value, indent=1).encode("ascii")
    write_atomically(path, lambda file: file.write(data))


def _read_json(path: Path) -> dict | None:
    """A dict, empty where the file holds none; None where there is no file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _described(tokenizer, vocab_size: int | None) -> str:
    if isinstance(tokenizer, str):
        return f"{tokenizer} of the inputs" + (f", at most {vocab_size} ids" if vocab_size else "")
    return f"{tokenizer.kind}, sha256 {_digest(tokenizer.to_dict())}"


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("ascii")).hexdigest()


def _check_options(tokenizer, vocab_size, workers, val_fraction, shard_tokens, format) -> None:
    if not 0 < val_fraction < 1:
        raise InvalidValue(f"val_fraction must lie between 0 and 1; got {val_fraction}.")
    if format not in WRITABLE:
        raise InvalidValue(f"format must be {' or '.join(map(repr, WRITABLE))} to write; got {format!r}.")
    for name, value, least in (("shard_tokens", shard_tokens, 2), ("workers", workers, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidValue(f"{name} must be an int, {least} or more; got {value!r}.")
    if format == "llm.c" and shard_tokens > MAX_LLMC_TOKENS:
        raise InvalidValue(f"a shard of llm.c holds at most {MAX_LLMC_TOKENS} tokens; got {shard_tokens}.")
    if isinstance(tokenizer, str) and tokenizer not in ("char", "byte", "bpe"):
        raise InvalidValue(f"tokenizer must be 'char', 'byte', 'bpe' or a tokenizer; got {tokenizer!r}.")
    if (vocab_size is not None) != (tokenizer == "bpe"):
        raise InvalidValue(
            f"vocab_size goes with tokenizer 'bpe', and 'bpe' with it; got {vocab_size} and "
            f"{tokenizer if isinstance(tokenizer, str) else tokenizer.kind!r}."
        )
