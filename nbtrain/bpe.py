"""The library tokenizers, called with care: its JSON is checked before it reads it, its panics are errors."""

import json
from collections.abc import Callable
from typing import Any

from nbtrain.errors import InvalidType, InvalidValue

MAX_FILE_BYTES = 2**25  # of JSON in ASCII: every code point of Unicode is 13 MB, 262144 BPE tokens are 33 MB
MAX_VOCAB_SIZE = 2**24  # a damaged id must not become the height of an embedding
END_OF_TEXT = "<|endoftext|>"


def library():
    import tokenizers  # not above: most of nbtrain does without

    return tokenizers


def guarded(call: Callable[[], Any]):
    """What `call` returns. The library's errors are plain Exceptions, and a panic of its Rust code is none:
    pyo3's PanicException is a BaseException."""
    try:
        return call()
    except (InvalidValue, InvalidType):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InvalidValue(f"the library tokenizers says: {str(error)[:300]}") from None
        raise


def checked_json(text: str) -> dict:
    """The library's JSON, its form checked as far as the library does not, without what would change an
    encoding from one call to the next."""
    if len(text) > MAX_FILE_BYTES:
        raise InvalidValue(f"expected at most {MAX_FILE_BYTES} characters of JSON, there are {len(text)}.")
    d = parsed(text)
    model = d.get("model") if isinstance(d, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise InvalidValue(
            'expected a tokenizer.json of the library tokenizers, with a "vocab" in its "model".'
        )
    vocab, added = model["vocab"], d.get("added_tokens")
    added = [] if added is None else added
    if not isinstance(added, list) or not all(
        isinstance(t, dict) and isinstance(t.get("content"), str) and t["content"] for t in added
    ):
        raise InvalidValue('expected "added_tokens" to be a list of tokens with their "content".')
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    for id in ids + [token.get("id") for token in added]:
        if type(id) is not int or not 0 <= id < MAX_VOCAB_SIZE:
            raise InvalidValue(f"expected ids in 0..{MAX_VOCAB_SIZE - 1}; got {json.dumps(id)[:40]}.")
    if len(set(ids)) != len(ids) or not ids + added:
        raise InvalidValue(f"expected one token or more, each with an id of its own; {len(ids)} tokens have "
                           f"{len(set(ids))} ids.")  # fmt: skip
    is_bpe = model.get("type", "BPE") == "BPE"
    if _has_byte_level(d.get("pre_tokenizer")) or _has_byte_level(d.get("normalizer")):
        missing = set(_byte_symbols()) - set(vocab) if is_bpe and isinstance(vocab, dict) else set()
        if missing:
            raise InvalidValue(
                f"{len(missing)} of the 256 bytes have no token, so that text would be lost. Train the "
                "tokenizer with initial_alphabet=ByteLevel.alphabet()."
            )
    elif is_bpe and not (isinstance(model.get("unk_token"), str) or model.get("byte_fallback") is True):
        raise InvalidValue(
            "the tokenizer has neither bytes nor an unknown token, so that text would be lost. Train a "
            "byte-level one."
        )
    return d | {
        "version": d.get("version", "1.0"),
        "added_tokens": added,
        "truncation": None,
        "padding": None,
        "model": model | ({"dropout": None} if "dropout" in model else {}),
    }


def _has_byte_level(part) -> bool:
    """Whether a normalizer or pre-tokenizer, or one in a sequence of them, maps bytes to symbols."""
    parts = [part]  # a stack: a file may nest them deeper than Python's own
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == "ByteLevel":
                return True
            for key in ("pretokenizers", "normalizers"):
                parts += part[key] if isinstance(part.get(key), list) else []
    return False


def _byte_symbols() -> list[str]:
    """GPT-2's 256 characters for the 256 bytes: itself where it prints, else one from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(others))]


def byte_level_json(vocab: dict, merges: list, added_tokens: list) -> dict:
    """The library's JSON of GPT-2's kind of tokenizer."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": added_tokens,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def gpt2_json(vocab, merges: list) -> str:
    """The library's JSON of what vocab.json and merges.txt hold."""
    if not isinstance(vocab, dict):
        raise InvalidValue(f"expected a dict of tokens and ids; got {type(vocab).__name__}.")
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    end = [dict(id=vocab[END_OF_TEXT], content=END_OF_TEXT, **plain)] if END_OF_TEXT in vocab else []
    return json.dumps(byte_level_json(vocab, merges, end), ensure_ascii=False)


def merges_of(text: str) -> list[list[str]]:
    """The pairs of a merges.txt, one a line behind "#version"."""
    lines = text.removesuffix("\n").split("\n") if text else []
    first = 1 if text.startswith("#version") else 0
    pairs = [line.removesuffix("\r").split(" ") for line in lines[first:]]
    for at, pair in enumerate(pairs):
        if len(pair) != 2 or not all(pair):
            raise InvalidValue(
                f"line {first + at + 1}: expected two tokens with a space between; got "
                f"{lines[first + at][:40]!r}."
            )
    return pairs


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"no tokenizer's JSON ({len(text)} characters): {error}.") from None
