"""Tokenizers: text <-> int32 ids, kept as JSON.

A tokenizer has `kind`, `vocab_size`, `encode(text)` -> (n,) int32, `decode(ids)` -> str, `eot` (the id that
ends a text, or None), `to_dict()` and `save(path)`. `from_dict` and `load_tokenizer` make whichever kind they
are given. CharTokenizer and ByteTokenizer need nothing but a text; BPETokenizer stands around the library
tokenizers: GPT-2's byte-pair encoding (Sennrich et al., 2016), or what a tokenizer.json holds.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nbtrain.bpe import (
    END_OF_TEXT,
    MAX_FILE_BYTES,
    MAX_VOCAB_SIZE,
    byte_level_json,
    checked_json,
    gpt2_json,
    guarded,
    library,
    merges_of,
    parsed,
)
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import read_bounded, write_atomically

# What ends a text in well-known vocabularies, where no tokenizer_config.json says it.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# File names of GPT-2's vocabulary and merges: as transformers names them, as OpenAI did.
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class _Tokenizer:
    kind: str
    vocab_size: int
    eot: int | None = None  # id that ends a text

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer as JSON; `load_tokenizer` reads it."""
        data = json.dumps(self.to_dict()).encode("ascii")
        write_atomically(path, lambda file: file.write(data))

    def to_dict(self) -> dict:
        return {"kind": self.kind}

    def vocabulary(self):
        """What its ids stand for; ids of one tokenizer mean the same to another with an equal vocabulary."""
        return self.to_dict()

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
        _check_text(text, "CharTokenizer.from_text")
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
        _check_text(text)
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
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids) -> str:
        """The text of ids (n,); bytes that are no UTF-8, as a model may sample them, become U+FFFD."""
        return self._checked_ids(ids).astype(np.uint8).tobytes().decode("utf-8", "replace")


class BPETokenizer(_Tokenizer):
    """A tokenizer of the library tokenizers: trained here, GPT-2's, or whatever a tokenizer.json describes.

    Special tokens are never read out of a text: an end-of-text in a document's own words stays words. What a
    tokenizer.json says about templates, truncation, padding and dropout is not applied, so that an encoding
    is the text's and always the same. `decode(encode(text)) == text` for byte-level ones without a
    normalizer, such as GPT-2's and those trained here. `eot_token` ends a text; None: found by its name, or
    there is none.
    """

    kind = "bpe"

    def __init__(self, library_json: str, eot_token: str | None = None):
        if not isinstance(library_json, str) or not isinstance(eot_token, str | None):
            raise InvalidType(
                "BPETokenizer expects the library's JSON as a str, and eot_token as a str or None."
            )
        d = checked_json(library_json)
        self._library = guarded(lambda: library().Tokenizer.from_str(json.dumps(d)))
        self._library.encode_special_tokens = True
        self._json = self._library.to_str()
        self.encode("a b")  # parts that cannot work together are found now, not at the first document
        if (n_bytes := len(json.dumps(self._json))) > MAX_FILE_BYTES:
            raise InvalidValue(f"expected at most {MAX_FILE_BYTES} bytes of JSON, there are {n_bytes}.")
        ids = self._library.get_vocab(with_added_tokens=True)
        for token in d["added_tokens"]:
            if ids.get(token["content"]) != token["id"]:
                raise InvalidValue(
                    f"added token {token['content'][:40]!r} has id {token['id']}, the vocabulary gives "
                    f"{ids.get(token['content'])}. Take the tokenizer's original files."
                )
        self.vocab_size = max(ids.values()) + 1
        special = [token["content"] for token in d["added_tokens"] if token.get("special") is True]
        named = next((name for name in END_OF_TEXT_NAMES if name in special), None)
        if eot_token is not None and eot_token not in ids:
            raise InvalidValue(f"the end of a text is {eot_token[:40]!r}, which is not in the vocabulary.")
        self.eot_token = named if eot_token is None else eot_token
        self._eot_is_told = self.eot_token != named
        self.eot = None if self.eot_token is None else ids[self.eot_token]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "BPETokenizer":
        """The tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt (encoder.json and
        vocab.bpe are the same under OpenAI's names)."""
        folder = Path(folder)
        eot_token = _eos_token(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").is_file():
            return _named(folder / "tokenizer.json", lambda text: cls._from_json(text, eot_token))
        for vocab, merges in GPT2_FILES:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                tokens = _named(folder / vocab, parsed), _named(folder / merges, merges_of)
                try:
                    return cls(gpt2_json(*tokens), eot_token)
                except InvalidValue as error:
                    raise InvalidValue(f"{folder / vocab} and {merges}: {error}") from None
        raise InvalidValue(
            f"expected tokenizer.json, or {' or '.join(' and '.join(pair) for pair in GPT2_FILES)}, in "
            f"{folder}, {'which is no folder' if not folder.is_dir() else 'where they are not'}."
        )

    @classmethod
    def _from_json(cls, text: str, eot_token: str | None) -> "BPETokenizer":
        d = parsed(text)
        if _kind_of(d) != cls.kind:
            raise InvalidValue(
                f"expected a tokenizer of the library tokenizers; it has kind {_kind_of(d)!r}."
            )
        return cls.from_dict(d) if "kind" in d else cls(text, eot_token)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """A byte-level BPE of at most `vocab_size` ids, learnt from `texts`: 256 bytes, one end-of-text, and
        the pairs that occur most.

        The same texts give the same tokenizer. A short text has fewer pairs to merge than asked for.
        """
        if isinstance(texts, str):
            raise InvalidType("BPETokenizer.train expects several texts; got one str. Wrap it: [text].")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
            raise InvalidType(f"vocab_size must be an int; got {vocab_size!r}.")
        if not 257 <= vocab_size <= MAX_VOCAB_SIZE:
            raise InvalidValue(
                f"vocab_size must lie in 257..{MAX_VOCAB_SIZE}, 256 bytes and an end-of-text at least; got "
                f"{vocab_size}."
            )
        tokenizers, n_chars = library(), 0

        def counted():
            nonlocal n_chars
            for text in texts:
                _utf8(text)
                n_chars += len(text)
                yield text

        fresh = tokenizers.Tokenizer.from_str(json.dumps(byte_level_json({}, [], [])))
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        guarded(lambda: fresh.train_from_iterator(counted(), trainer))
        if n_chars == 0:
            raise InvalidValue("BPETokenizer.train expects texts; got 0 characters.")
        return cls(fresh.to_str())

    @classmethod
    def from_dict(cls, d: dict) -> "BPETokenizer":
        _check_fields(d, cls.kind, {"kind", "tokenizer", "eot_token"})
        return cls(d["tokenizer"], d["eot_token"])

    def to_dict(self) -> dict:
        """`tokenizer` is the library's JSON, a str: what Tokenizer.from_str takes."""
        eot_token = self.eot_token if self._eot_is_told else None
        return {"kind": self.kind, "tokenizer": self._json, "eot_token": eot_token}

    def vocabulary(self) -> dict[str, int]:
        return self._library.get_vocab(with_added_tokens=True)

    def save(self, path: str | Path) -> None:
        """Writes the library's own JSON, which its other users read too; ours around it where an end of text
        was told that it does not show."""
        if self._eot_is_told:
            return super().save(path)
        write_atomically(path, lambda file: file.write(self._json.encode("utf-8")))

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) int32 of a text; special tokens are taken for text."""
        _utf8(text)
        return np.array(guarded(lambda: self._library.encode(text, add_special_tokens=False).ids), np.int32)

    def decode(self, ids) -> str:
        """The text of ids (n,); bytes that are no UTF-8 become U+FFFD."""
        ids = self._checked_ids(ids).tolist()
        return guarded(lambda: self._library.decode(ids, skip_special_tokens=False))


KINDS: dict[str, Any] = {cls.kind: cls for cls in (CharTokenizer, ByteTokenizer, BPETokenizer)}
Tokenizer = CharTokenizer | ByteTokenizer | BPETokenizer


def from_dict(d: dict) -> Tokenizer:
    """The tokenizer whose `to_dict` gave `d`."""
    kind = d.get("kind") if isinstance(d, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        found = kind if isinstance(d, dict) else type(d).__name__
        raise InvalidValue(
            f"expected a tokenizer with kind {' or '.join(map(repr, KINDS))}; got {str(found)[:40]!r}."
        )
    return KINDS[kind].from_dict(d)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file: one that `save` wrote, or a tokenizer.json of the library tokenizers. A folder
    is read as BPETokenizer.from_folder does."""
    path = Path(path)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            return BPETokenizer.from_folder(path)
        eot_token, path = _eos_token(path / "tokenizer_config.json"), path / "tokenizer.json"
    else:
        eot_token = None

    def made(text: str):
        d = parsed(text)
        return BPETokenizer(text, eot_token) if _kind_of(d) == "bpe" and "kind" not in d else from_dict(d)

    return _named(path, made)


def _named(path: Path, make: Callable[[str], Any]):
    """What `make` makes of a file's text; errors name the file."""
    if not path.is_file():
        raise InvalidValue(f"expected a tokenizer's file at {path}, where there is none.")
    content = read_bounded(path, MAX_FILE_BYTES, "a tokenizer of at most {} bytes")
    try:
        return make(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is no tokenizer's JSON ({len(content)} bytes): {error}.") from None
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{path}: {error}") from None


def _kind_of(d) -> str | None:
    """The kind that a tokenizer's JSON shows: ours by its field, the library's by its model."""
    if isinstance(d, dict) and "kind" not in d and isinstance(d.get("model"), dict):
        return BPETokenizer.kind
    return d.get("kind") if isinstance(d, dict) else None


def _check_text(text: str, what: str = "encode") -> None:
    if not isinstance(text, str):
        raise InvalidType(f"{what} expects a str; got {type(text).__name__}.")


def _utf8(text: str) -> bytes:
    _check_text(text)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"character {text[error.start]!r} at position {error.start} is half of a surrogate pair, "
            "which UTF-8 does not have. Remove it."
        ) from None


def _eos_token(config: Path) -> str | None:
    """What ends a text by a tokenizer_config.json, if there is one and it says so."""
    if not config.is_file():
        return None
    d = _named(config, parsed)
    eos = d.get("eos_token") if isinstance(d, dict) else None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(eos, str | None):
        raise InvalidValue(f'{config}: expected "eos_token" to be a str; got {type(eos).__name__}.')
    return eos


def _code_points(text: str) -> np.ndarray:
    """(n,) uint32, one a character; lone surrogates, which a str can hold, included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _check_fields(d: dict, kind: str, fields: set[str]) -> None:
    if not isinstance(d, dict) or set(d) != fields or d["kind"] != kind:
        got = sorted(map(str, d)) if isinstance(d, dict) else type(d).__name__
        raise InvalidValue(
            f"a {kind!r} tokenizer is a dict of {sorted(fields)} with kind {kind!r}; got {got}."
        )
