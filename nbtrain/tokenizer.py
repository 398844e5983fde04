"""Tokenizers that need nothing but a text: text <-> int32 ids, kept as JSON.

A tokenizer has `encode(text)` -> (n,) int32, `decode(ids)` -> str, `vocab_size`, `to_dict()`, `from_dict(d)`
and `save(path)`; `decode(encode(text)) == text`. `load_tokenizer` reads whichever kind a file holds.
"""

import json
from pathlib import Path

import numpy as np

from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import write_atomically

MAX_FILE_BYTES = 2**24  # every code point of Unicode, escaped, is 13 MB


class _Tokenizer:
    kind: str
    vocab_size: int

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer as JSON; `load_tokenizer` reads it."""
        data = json.dumps(self.to_dict()).encode("ascii")
        write_atomically(path, lambda file: file.write(data))

    def to_dict(self) -> dict:
        return {"kind": self.kind}

    def _checked_ids(self, ids) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidType(
                f"decode expects integer ids of shape (n,); got {ids.dtype} of shape {ids.shape}."
            )
        bad = (ids < 0) | (ids >= self.vocab_size)
        if bad.any():
            at = int(bad.argmax())
            raise InvalidValue(
                f"id {ids[at]} at position {at} lies outside 0..{self.vocab_size - 1}, the vocabulary."
            )
        return ids


class CharTokenizer(_Tokenizer):
    """One id a character: its place among `chars`, the sorted characters of the vocabulary."""

    kind = "char"

    def __init__(self, chars: str):
        if not isinstance(chars, str):
            raise InvalidType(f"CharTokenizer expects its characters as one str; got {type(chars).__name__}.")
        self._points = _code_points(chars)
        if len(chars) == 0 or (np.diff(self._points.astype(np.int64)) <= 0).any():
            raise InvalidValue(
                f"CharTokenizer expects at least one character, sorted, each once; got {chars[:40]!r} "
                f"({len(chars)} in all). CharTokenizer.from_text(text) takes them from a text."
            )
        self.chars = chars
        self.vocab_size = len(chars)

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """The tokenizer of the characters that occur in `text`."""
        if not text:
            raise InvalidValue("CharTokenizer.from_text expects a text; got 0 characters.")
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_dict(cls, d: dict) -> "CharTokenizer":
        _check_fields(d, cls.kind, {"kind", "chars"})
        return cls(d["chars"])

    def to_dict(self) -> dict:
        return {"kind": self.kind, "chars": self.chars}

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) int32 of a text's n characters."""
        points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._points, points), self.vocab_size - 1)
        unknown = self._points[ids] != points
        if unknown.any():
            at = int(unknown.argmax())
            raise InvalidValue(
                f"unknown character {text[at]!r} (U+{ord(text[at]):04X}) at position {at}: it is not among "
                f"the tokenizer's {self.vocab_size} characters. Remove it, or make the tokenizer from a text "
                "that has it."
            )
        return ids.astype(np.int32)

    def decode(self, ids) -> str:
        """The text of ids (n,)."""
        return (
            self._points[self._checked_ids(ids).astype(np.int64)]
            .tobytes()
            .decode("utf-32-le", "surrogatepass")
        )


class ByteTokenizer(_Tokenizer):
    """One id a byte of the text's UTF-8: 256 ids, no unknown character."""

    kind = "byte"
    vocab_size = 256

    @classmethod
    def from_dict(cls, d: dict) -> "ByteTokenizer":
        _check_fields(d, cls.kind, {"kind"})
        return cls()

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) int32 of the n bytes of a text's UTF-8."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidValue(
                f"character {text[error.start]!r} at position {error.start} is half of a surrogate pair, "
                "which UTF-8 does not have. Remove it."
            ) from None
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids) -> str:
        """The text of ids (n,); bytes that are no UTF-8, as a model may sample them, become U+FFFD."""
        return self._checked_ids(ids).astype(np.uint8).tobytes().decode("utf-8", "replace")


KINDS = {cls.kind: cls for cls in (CharTokenizer, ByteTokenizer)}


def load_tokenizer(path: str | Path) -> CharTokenizer | ByteTokenizer:
    """The tokenizer that `save` wrote to `path`."""
    path = Path(path)
    if not path.is_file():
        raise InvalidValue(f"expected a tokenizer's JSON file at {path}, where there is none.")
    n_bytes = path.stat().st_size
    if n_bytes > MAX_FILE_BYTES:
        raise InvalidValue(
            f"{path}: expected a tokenizer of at most {MAX_FILE_BYTES} bytes, there are {n_bytes}."
        )
    try:
        d = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(
            f"{path} is no tokenizer's JSON ({n_bytes} bytes): {error}. Write it again."
        ) from None
    if not isinstance(d, dict) or not isinstance(d.get("kind"), str) or d["kind"] not in KINDS:
        kinds = " or ".join(map(repr, KINDS))
        found = d.get("kind") if isinstance(d, dict) else type(d).__name__
        raise InvalidValue(f"{path}: expected a tokenizer with kind {kinds}; got {str(found)[:40]!r}.")
    try:
        return KINDS[d["kind"]].from_dict(d)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{path}: {error}") from None


def _code_points(text: str) -> np.ndarray:
    """(n,) uint32, one a character; lone surrogates, which a str can hold, included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _check_fields(d: dict, kind: str, fields: set[str]) -> None:
    if not isinstance(d, dict) or set(d) != fields or d["kind"] != kind:
        got = sorted(map(str, d)) if isinstance(d, dict) else type(d).__name__
        raise InvalidValue(
            f"a {kind!r} tokenizer is a dict of {sorted(fields)} with kind {kind!r}; got {got}."
        )
