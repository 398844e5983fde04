"""Whatever lies in a file, reading it gives exactly its ids or an InvalidValue that names the file."""

import json
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.errors import InvalidValue
from nbtrain.token_file import FORMATS, TokenFile, write_tokens
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, from_dict, load_tokenizer
from tests.fuzz import examples

ids = st.lists(st.integers(0, 70_000), min_size=1, max_size=40)
BPE = BPETokenizer.train(["a rose is a rose is a rose\n" * 3], 270)
LIBRARY = json.loads(BPE.to_dict()["tokenizer"])


@st.composite
def headers(draw):
    """Headers that are right or nearly so, before any number of bytes."""
    n = draw(st.integers(0, 40))
    count = draw(st.sampled_from([n, n // 2, n // 4, 0]) | st.integers(0, 2**31 - 1))
    version = draw(st.sampled_from([1, 7]) | st.integers(0, 2**31 - 1))
    if draw(st.booleans()):
        head = struct.pack(
            "<8sIIQ", b"nbtokens", version, draw(st.sampled_from([2, 4]) | st.integers(0, 9)), count
        )
    else:
        head = struct.pack("<256i", draw(st.sampled_from([20240520, 20240801])), version, count, *[0] * 253)
    content = head + draw(st.binary(min_size=n, max_size=n))
    return content[: draw(st.just(len(content)) | st.integers(0, len(content)))]


@examples
@given(content=headers() | st.binary(max_size=60), format=st.sampled_from(FORMATS))
def test_any_file_is_read_whole_or_named(content, format, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(content)
    try:
        file = TokenFile(path, format)
    except InvalidValue as error:
        assert str(path) in str(error)
        return
    offset = {"nbtrain": 24, "llm.c": 1024, "nanogpt": 0}[file.format]
    assert len(file) > 0 and file.tokens.tobytes() == content[offset:]
    assert format in ("auto", file.format) and not (format == "auto" and file.format == "nanogpt")


@examples
@given(ids=ids, at=st.integers(0, 10**6), data=st.data())
def test_a_written_file_is_read_back_and_no_cut_or_longer_one_is(ids, at, data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "written.bin"
    write_tokens(path, ids, vocab_size=data.draw(st.integers(max(ids) + 1, 80_000)))
    assert TokenFile(path).tokens.tolist() == ids
    content = path.read_bytes()
    for wrong in (content[: at % len(content)], content + bytes(1 + at % 5)):
        path.write_bytes(wrong)
        try:
            raise AssertionError(f"{TokenFile(path)} was read from {len(wrong)} bytes")
        except InvalidValue as error:
            assert str(path) in str(error) and str(len(wrong)) in str(error)


@examples
@given(text=st.text(min_size=1), other=st.text())
def test_tokenizers_invert_themselves_or_name_the_character(text, other):
    for tokenizer in (CharTokenizer.from_text(text), ByteTokenizer(), BPE):
        again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert again.decode(again.encode(text)) == text
        assert again.encode(text).max() < again.vocab_size
        try:
            assert again.decode(again.encode(other)) == other
        except InvalidValue as error:
            at = next(i for i, char in enumerate(other) if char not in text)
            assert isinstance(again, CharTokenizer) and f"at position {at}:" in str(error)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    leaves | st.sampled_from(["char", "byte"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "chars", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@examples
@given(content=json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_any_tokenizer_file_is_loaded_or_named(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    path.write_bytes(content)
    try:
        tokenizer = load_tokenizer(path)
    except InvalidValue as error:
        assert str(path) in str(error)
        return
    assert tokenizer.to_dict() == json.loads(content)
    assert np.array_equal(tokenizer.encode(tokenizer.decode([0])), [0])


@st.composite
def library_files(draw):
    """The library's JSON of a tokenizer in which a few things were replaced, removed or added."""
    d = json.loads(json.dumps(LIBRARY))
    for _ in range(draw(st.integers(0, 3))):
        at, key = d, draw(st.sampled_from(sorted(d)))
        while isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
            at = at[key]
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        value = draw(
            leaves
            | st.sampled_from(
                [[], {}, LIBRARY["model"], LIBRARY["pre_tokenizer"], [["a", "b"]], 2**31, 2**63]
            )
            | st.sampled_from(KINDS_OF_PARTS).map(lambda kind: {"type": kind})
        )
        if isinstance(at, dict) and draw(st.integers(0, 4)) == 0:
            del at[key]
        else:
            at[key] = json.loads(json.dumps(value))  # what is drawn is not to change
    content = json.dumps(d).encode()
    return content[: draw(st.just(len(content)) | st.integers(0, len(content)))]


KINDS_OF_PARTS = (
    "ByteLevel",
    "Sequence",
    "Split",
    "Digits",
    "Metaspace",
    "NFC",
    "Strip",
    "BPE",
    "Unigram",
    "x",
)


@examples
@given(content=library_files(), text=st.text(max_size=20))
def test_any_library_file_is_loaded_and_keeps_text_or_is_named(content, text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    path.write_bytes(content)
    try:
        tokenizer = load_tokenizer(path)
    except InvalidValue as error:
        assert str(path) in str(error)
        return
    assert from_dict(json.loads(json.dumps(tokenizer.to_dict()))).to_dict() == tokenizer.to_dict()
    assert tokenizer.eot is None or 0 <= tokenizer.eot < tokenizer.vocab_size
    try:
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
    except InvalidValue:
        return  # parts of a file can be at odds with a text only
    assert ids.dtype == np.int32 and (ids < tokenizer.vocab_size).all() and isinstance(decoded, str)


@examples
@given(vocab=library_files() | st.binary(max_size=40), merges=st.text("ab #\n\r\x00", max_size=20))
def test_any_vocab_and_merges_are_loaded_or_named(vocab, merges, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "gpt2"
    folder.mkdir(exist_ok=True)
    tokens = json.dumps(LIBRARY["model"]["vocab"]).encode()
    (folder / "vocab.json").write_bytes(vocab if len(vocab) % 2 else tokens)
    (folder / "merges.txt").write_text(merges)
    try:
        tokenizer = load_tokenizer(folder)
    except InvalidValue as error:
        assert str(folder) in str(error)
        return
    assert tokenizer.decode(tokenizer.encode("a rose\n")) == "a rose\n"
