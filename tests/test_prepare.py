import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from nbtrain import documents
from nbtrain.cli import main
from nbtrain.cli.progress import progress
from nbtrain.data import batches
from nbtrain.documents import PIECE, Place, find_inputs, measure, plan, read, texts
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.prepare import prepare
from nbtrain.token_file import ShardWriter, TokenFile, write_tokens
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, load_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old stones".split()


def quiet(what, done, total):
    pass


def prose(seed: int, n: int) -> str:
    """About n characters of lines of words."""
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(1 + n // 30))


def write_lines(path, docs, field="text"):
    path.write_text("".join(json.dumps({field: doc, "id": i}) + "\n" for i, doc in enumerate(docs)))


def tokens(prepared, split="train"):
    """The ids of all shards of a split, in order."""
    files = sorted(prepared.meta.parent.glob(f"{split}_*.bin"))
    return np.concatenate([np.asarray(TokenFile(file).tokens) for file in files]).astype(np.int64)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def docs_of(ids, tokenizer):
    """Documents, split at the id that ends each."""
    text, end = [], tokenizer.eot
    for part in np.split(ids, np.flatnonzero(ids == end) + 1):
        if part.size:
            assert part[-1] == end
            text.append(tokenizer.decode(part[:-1]))
    return text


# What goes where


def test_every_tenth_document_is_for_validation_and_an_end_of_text_follows_each(tmp_path):
    docs = [prose(i, 200) for i in range(35)]
    write_lines(tmp_path / "a.jsonl", docs[:20])
    write_lines(tmp_path / "b.jsonl", docs[20:])
    tokenizer = BPETokenizer.train(docs, 300)
    prepared = prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert docs_of(tokens(prepared, "val"), tokenizer) == docs[9::10]
    assert docs_of(tokens(prepared), tokenizer) == [doc for i, doc in enumerate(docs) if i % 10 != 9]
    meta = json.loads(prepared.meta.read_text())
    assert (meta["split"], meta["n_documents"], meta["eot"]) == ("documents", 35, tokenizer.eot)
    assert [entry["name"] for entry in meta["inputs"]] == [str(tmp_path / n) for n in ("a.jsonl", "b.jsonl")]


def test_many_text_files_are_documents_and_few_are_one_text(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"file {i}")
    prepared = prepare(folder, tmp_path / "many", tokenizer="byte", val_fraction=0.25)
    text = ByteTokenizer().decode(tokens(prepared, "val"))
    assert text == "".join(f"file {i}\n" for i in (3, 7, 11, 15, 19))
    for i in range(4, 20):
        (folder / f"{i:02}.txt").unlink()
    prepared = prepare(folder, tmp_path / "few", tokenizer="byte", val_fraction=0.2)
    joined = "file 0\nfile 1\nfile 2\nfile 3"
    assert ByteTokenizer().decode(tokens(prepared)) == joined[: len(joined) - int(len(joined) * 0.2)]
    assert ByteTokenizer().decode(tokens(prepared, "val")) == joined[-int(len(joined) * 0.2) :]


@pytest.mark.parametrize("n_val", range(2, 16))  # the cut falls into each of the files, and between them
def test_texts_split_at_their_end_keep_each_character_wherever_the_cut_falls(n_val, tmp_path):
    pieces = ["\ufeff" + "é" * 70, "", "🙂b\n", "cd", "éé"]  # the mark at the beginning is no text
    for i, piece in enumerate(pieces):
        (tmp_path / f"{i}.txt").write_text(piece)
    joined = "\n".join(pieces).removeprefix("\ufeff")
    tokenizer = CharTokenizer.from_text(joined)
    fraction = (n_val + 0.5) / len(joined)  # of 5 files this is none, so they are one text
    prepared = prepare(tmp_path, tmp_path / "out", tokenizer=tokenizer, val_fraction=fraction)
    assert tokenizer.decode(tokens(prepared)) == joined[: len(joined) - n_val]
    assert tokenizer.decode(tokens(prepared, "val")) == joined[len(joined) - n_val :]


def test_a_long_text_is_encoded_as_if_it_were_whole(tmp_path, monkeypatch):
    text = prose(0, 60_000) + "\n\n  indented\n" + "x" * 3000 + " " + prose(1, 20_000)
    tokenizer = BPETokenizer.train([text], 400)
    monkeypatch.setattr(documents, "PIECE", 2000)
    monkeypatch.setattr(documents, "BLOCK", 777)  # bytes; cuts must not follow it
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer)
    n_train = len(text) - int(len(text) * 0.1)
    assert tokens(prepared, "val").tolist() == tokenizer.encode(text[n_train:]).tolist()
    got, want = tokens(prepared), tokenizer.encode(text[:n_train])
    assert tokenizer.decode(got) == text[:n_train]
    # 3000 letters have no place between words: only what they become may differ.
    assert (got[:10_000] == want[:10_000]).all() and (got[-2000:] == want[-2000:]).all()
    assert 0 <= len(got) - len(want) <= 20


def test_char_and_bpe_are_made_from_all_documents(tmp_path):
    docs = ["abc", "abd", "abé"] * 5
    write_lines(tmp_path / "a.jsonl", docs)
    prepared = prepare(tmp_path / "a.jsonl", tmp_path / "char", val_fraction=0.4)
    assert load_tokenizer(prepared.tokenizer).chars == "\nabcdé"
    prepared = prepare(
        tmp_path / "a.jsonl", tmp_path / "bpe", tokenizer="bpe", vocab_size=259, val_fraction=0.4
    )
    trained = load_tokenizer(prepared.tokenizer)
    assert trained.vocab_size == 259 and len(trained.encode("ab")) == 1
    assert docs_of(tokens(prepared), trained) + docs_of(tokens(prepared, "val"), trained) != docs
    assert sorted(docs_of(tokens(prepared), trained) + docs_of(tokens(prepared, "val"), trained)) == sorted(
        docs
    )


def test_parquet_and_json_lines_of_the_same_texts_give_the_same_tokens(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    docs = [prose(i, 100) for i in range(700)]
    table = pyarrow.table({"n": list(range(700)), "body": docs})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    write_lines(tmp_path / "a.jsonl", docs, field="body")
    made = [
        prepare(tmp_path / name, tmp_path / name.replace(".", "-"), tokenizer="byte", field="body")
        for name in ("a.parquet", "a.jsonl")
    ]
    for split in ("train", "val"):
        assert tokens(made[0], split).tolist() == tokens(made[1], split).tolist()
    with pytest.raises(
        InvalidValue, match=r"a\.parquet: expected a column 'n' of strings; .*n \(int64\), body"
    ):
        prepare(tmp_path / "a.parquet", tmp_path / "x", field="n")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(InvalidValue, match=r"b\.parquet is no Parquet file that can be read"):
        prepare(tmp_path / "b.parquet", tmp_path / "x", field="body")


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unavailable, match=r'a\.parquet: .*pip install "nbtrain\[parquet\]"'):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


def test_reading_goes_on_from_any_place_with_the_same_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 500)
    monkeypatch.setattr(documents, "CHUNK", 900)
    monkeypatch.setattr(documents, "BLOCK", 333)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(prose(i, 3000).replace("fox", "fuchs🦊"))
        write_lines(tmp_path / f"{i}.jsonl", [prose(j, 150) for j in range(20)])
    table = pytest.importorskip("pyarrow").table({"text": [prose(j, 150) for j in range(40)]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "3.parquet", row_group_size=7)
    inputs = find_inputs([tmp_path], None)
    measured = measure(inputs, "text", quiet)
    segments, _ = plan(inputs, measured, Fraction(1, 10))

    def flat(chunks):
        found = []
        for chunk in chunks:
            for part in chunk.parts:
                found += [(text, part.name, number, part.split) for text, number in texts(part, "text")]
                found.append((part.ends,) if part.ends is not None else ())
        return [entry for entry in found if entry]

    whole = list(read(inputs, measured, segments, "text", Place()))
    assert len(whole) > 12 and whole[-1].n_bytes == sum(m.n_bytes for m in measured)
    assert [chunk.n_bytes for chunk in whole] == sorted(chunk.n_bytes for chunk in whole)
    for i, chunk in enumerate(whole):
        rest = flat(read(inputs, measured, segments, "text", Place(*json.loads(json.dumps(chunk.after)))))
        assert rest == flat(whole[i + 1 :])


# Shards


@pytest.mark.parametrize("format", ["nbtrain", "llm.c"])
@pytest.mark.parametrize(
    "vocab_size, magic, dtype", [(256, 20240520, "uint16"), (70_000, 20240801, "uint32")]
)
def test_shards_hold_the_ids_in_order_in_the_dtype_that_the_vocabulary_needs(
    format, vocab_size, magic, dtype, tmp_path
):
    ids = np.random.default_rng(0).integers(0, vocab_size, 2500)
    writer = ShardWriter(tmp_path, "train", shard_tokens=1000, vocab_size=vocab_size, format=format)
    for some in np.split(ids, [1, 1, 999, 1000, 2400]):
        writer.add(some)
    assert writer.n_tokens == 2500
    assert writer.finish() == {f"train_00000{i}.bin": n for i, n in enumerate((1000, 1000, 500))}
    files = [TokenFile(path) for path in sorted(tmp_path.iterdir())]
    assert [file.format for file in files] == [format] * 3
    assert (np.concatenate([file.tokens for file in files]) == ids).all()
    assert files[0].tokens.dtype == dtype
    if format == "llm.c":
        head = np.fromfile(files[2].path, "<i4", 256)
        assert head[:3].tolist() == [magic, 1 if dtype == "uint16" else 7, 500] and not head[3:].any()
    write_tokens(tmp_path / "one.bin", ids[:1000], vocab_size=vocab_size, format=format)
    assert (tmp_path / "one.bin").read_bytes() == files[0].path.read_bytes()


@pytest.mark.parametrize("after", [0, 1, 700, 999, 1000, 1001, 1900])
def test_a_writer_goes_on_from_its_commit_whatever_came_behind(after, tmp_path):
    ids = np.random.default_rng(1).integers(0, 99, 4321)
    spec = dict(shard_tokens=1000, vocab_size=99, format="nbtrain")
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    whole = ShardWriter(tmp_path / "whole", "val", **spec)
    whole.add(ids)
    whole.finish()
    for committed in (0, 1, 999, 1000, 2300):
        cut = ShardWriter(tmp_path / "cut", "val", **spec)
        cut.add(ids[:committed])
        at = cut.commit()
        cut.add(np.full(after, 7))  # lost; a shard may have been finished with it
        cut.close()
        again = ShardWriter(tmp_path / "cut", "val", at=at, **spec)
        again.add(ids[committed:])
        again.finish()
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_writer_names_a_shard_that_is_not_as_it_was_left(tmp_path):
    spec = dict(shard_tokens=10, vocab_size=99, format="nbtrain")
    writer = ShardWriter(tmp_path, "val", **spec)
    writer.add(np.arange(25))
    at = writer.commit()
    writer.close()
    path = tmp_path / "val_000001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        InvalidValue, match=r"val_000001\.bin: expected 44 bytes from an earlier run, there are 43"
    ):
        ShardWriter(tmp_path, "val", at=at, **spec)


# Again, otherwise, and cut off


def test_the_number_of_processes_does_not_show(tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.prepare.BYTES_A_WORKER", 1)
    monkeypatch.setattr(documents, "CHUNK", 10_000)
    monkeypatch.setattr(documents, "BLOCK", 4000)
    write_lines(tmp_path / "a.jsonl", [prose(i, 600) for i in range(300)])
    for workers in (1, 2):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / f"{workers}",
            shard_tokens=20_000,
            workers=workers,
            format="llm.c",
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert len(contents(tmp_path / "1")) > 10


def test_an_error_of_a_process_says_where_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.prepare.BYTES_A_WORKER", 1)
    write_lines(tmp_path / "a.jsonl", ["abc", "abc", "abX", "ab"])
    with pytest.raises(InvalidValue, match=r"a\.jsonl, line 3: unknown character 'X' .* position 2"):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer=CharTokenizer("\nabc"),
            workers=2,
            val_fraction=0.5,
        )
    assert not (tmp_path / "out").exists()


def test_the_same_command_again_changes_nothing_and_another_is_refused(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, [prose(i, 50) for i in range(30)])
    first = prepare(path, out)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prepare(path, out) == first
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    with pytest.raises(
        InvalidValue, match=r"out holds meta\.json .*val_fraction was 0\.1 and is 0\.2 now.*--overwrite"
    ):
        prepare(path, out, val_fraction=0.2)
    path.write_text(path.read_text() + '{"text": "more"}\n')
    with pytest.raises(InvalidValue, match=r"inputs was '1 of \d+ bytes, .* now\. .*--overwrite"):
        prepare(path, out)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    assert prepare(path, out, overwrite=True).n_train == first.n_train + len("more\n")


def test_a_finished_folder_that_lost_a_file_is_made_again(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, [prose(i, 50) for i in range(30)])
    prepare(path, out)
    before = contents(out)
    for name in ("train_000000.bin", "tokenizer.json"):
        (out / name).unlink()
        (out / ".meta.json.0123abcd.tmp").write_text("{")  # of a run that was killed
        prepare(path, out)
        assert contents(out) == before


def test_files_of_others_are_not_replaced(tmp_path):
    write_lines(tmp_path / "a.jsonl", [prose(i, 50) for i in range(30)])
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    with pytest.raises(InvalidValue, match=r"out holds tokenizer\.json of other inputs"):
        prepare(tmp_path / "a.jsonl", out)
    assert contents(out) == {"tokenizer.json": b"mine"}


def test_progress_that_is_damaged_is_not_gone_on_from(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, [prose(i, 50) for i in range(30)])
    prepare(path, out)
    whole = contents(out)
    made_from = json.loads(whole["meta.json"])["from"]
    counts = {"train": [0, 0], "val": [0, -1]}
    for wrong in ({}, {"place": [0, 0, 0]}, {"place": [0, 0, 0], "shards": counts}):
        (out / "meta.json").unlink()
        (out / "progress.json").write_text(json.dumps({"from": made_from} | wrong))
        prepare(path, out)
        assert contents(out) == whole


KILLED = """
import sys, time
from nbtrain import documents, prepare
documents.BLOCK, documents.CHUNK = 1500, 4000
prepare.COMMIT_S = 0.02
prepare.BYTES_A_WORKER = 1
if __name__ == "__main__":
    path, out, workers = sys.argv[1:]
    print("ready", flush=True)
    options = dict(tokenizer="bpe", vocab_size=300, shard_tokens=7000, workers=int(workers))
    prepare.prepare(path, out, **options, report=lambda *told: time.sleep(0.005))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_killed_at_any_moment_ends_at_the_same_bytes(workers, tmp_path):
    rng = random.Random(workers)
    write_lines(tmp_path / "a.jsonl", [prose(i, 500) for i in range(400)])
    (tmp_path / "run.py").write_text(KILLED)

    def begin(out):
        command = [sys.executable, tmp_path / "run.py", tmp_path / "a.jsonl", out, str(workers)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        return process

    def end(process):
        _, err = process.communicate(timeout=100)  # its processes hold the pipes: they end too
        assert process.returncode in (0, -signal.SIGKILL), err
        return process.returncode != 0

    def place(out):
        path = out / "progress.json"
        return json.loads(path.read_text())["place"][1] if path.exists() else 0

    assert not end(begin(tmp_path / "whole"))
    out, size, places = tmp_path / "out", (tmp_path / "a.jsonl").stat().st_size, []
    aims = (None, 0.1, 0.3, 0.6, 0.9) if workers == 1 else (None, 0.1, 0.6)
    for aim in aims:
        process = begin(out)
        while aim is not None and place(out) < size * aim and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * (0.3 if aim is None else 0.02))
        process.kill()
        places.append(place(out) if end(process) else size)  # it may have been quicker
    assert not end(begin(out))
    assert places == sorted(places) and any(0 < at < size for at in places)
    assert contents(out) == contents(tmp_path / "whole")


def test_two_runs_do_not_share_a_folder(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    write_lines(tmp_path / "a.jsonl", [prose(i, 50) for i in range(30)])
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InvalidValue, match="another run is writing into"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    os.close(descriptor)
    prepare(tmp_path / "a.jsonl", tmp_path / "out")


# What cannot be


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "line 2: no JSON"),
        (b'{"text": "\xff"}', "line 2: no JSON"),
        (b"[" * 100_000, "line 2: no JSON"),
        (b"[1]", r"line 2: expected an object with the field 'text'; got list"),
        (b'{"body": "x"}', r"line 2: .*field 'text'; got fields \['body'\]\. Name the field: --field"),
        (b'{"text": null}', r"line 2: expected a text in 'text'; got null"),
        (b'{"text": "\\ud800"}', r"line 2: character '\\ud800' at position 0 is half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n\n{"text": "two"}\n')
    with pytest.raises(InvalidValue, match=message) as caught:
        prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", val_fraction=0.5)
    assert str(tmp_path / "a.jsonl") in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content, options, message",
    [
        ("ab", {}, "2 characters with val_fraction = 0.1 leaves 2 to train on and 0 to validate on"),
        (" \n ", {}, r"1 file\(s\) hold 3 blank characters"),
        ("some text", {"val_fraction": 1.0}, "between 0 and 1; got 1.0"),
        ("some text", {"shard_tokens": 1}, "shard_tokens must be an int, 2 or more; got 1"),
        ("some text", {"workers": 0}, "workers must be an int, 1 or more; got 0"),
        ("some text", {"format": "nanogpt"}, "'nbtrain' or 'llm.c' to write; got 'nanogpt'"),
        ("some text", {"format": "llm.c", "shard_tokens": 2**31}, "at most 2147483647 tokens"),
        ("some text", {"tokenizer": "bpe"}, "vocab_size goes with tokenizer 'bpe'"),
        ("some text", {"vocab_size": 300}, "vocab_size goes with tokenizer 'bpe'"),
        ("some text", {"tokenizer": "words"}, "'char', 'byte', 'bpe' or a tokenizer; got 'words'"),
        ("some text", {"field": "text"}, "the inputs are plain text"),
        ("some text" * 9, {"tokenizer": "bpe", "vocab_size": 256}, r"vocab_size must lie in 257\.\."),
    ],
)
def test_what_cannot_be_prepared_is_said_and_leaves_no_file(content, options, message, tmp_path):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(InvalidValue, match=message):
        prepare(tmp_path / "a.txt", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_too_few_documents_for_a_split_are_counted(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["one", "two", "three"])
    with pytest.raises(
        InvalidValue, match="3 documents with val_fraction = 0.1 leave 3 to train on and 0 to val"
    ):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    write_lines(tmp_path / "b.jsonl", ["one", "", "three", ""])
    with pytest.raises(InvalidValue, match="10 tokens to train on and 0 to validate on; expected at least 2"):
        prepare(tmp_path / "b.jsonl", tmp_path / "out", val_fraction=0.5)
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9 " * 300_000 + b"\xe9 au lait")
    with pytest.raises(InvalidValue, match=r"a\.txt is not UTF-8: byte 1800000 is 0xe9"):
        prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte")


def test_prepared_files_are_what_batches_takes_even_below_a_folder_with_brackets(tmp_path):
    folder = tmp_path / "run [1]"
    (tmp_path / "a.txt").write_text(prose(3, 3000))
    prepared = prepare(tmp_path / "a.txt", folder, shard_tokens=500, tokenizer="byte")
    assert len(list(folder.glob("train_*.bin"))) > 3
    with batches(prepared.train, B=2, T=16, vocab_size=prepared.vocab_size) as source:
        assert source.batches_per_epoch > 50 and next(source).tokens.shape == (1, 2, 16)


def test_a_cut_lies_between_words(monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 20)
    assert documents._cut("a b\nc d e f g h\ni j k l m") == 16  # behind the newline
    assert documents._cut("aaaaaaaaaaaaaa bbbbb ccccc") == 14  # before a space
    assert documents._cut("aaaaaaaaaaaaaa\n\nbbb  cccccc") == 20  # none stands alone
    assert documents._cut("a" * 30) == 20 and PIECE == 2**18


# The command


def nb(*args, **options):
    """(exit code, stdout, stderr) of a command in a process of its own."""
    command = [sys.executable, "-m", "nbtrain", *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=100, **options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_stdin_is_text_or_with_a_field_json_lines(tmp_path):
    write_lines(tmp_path / "a.jsonl", [prose(i, 50) for i in range(40)], field="body")
    for name, options in (("text", ()), ("lines", ("--field", "body"))):
        (tmp_path / "a.txt").write_bytes((tmp_path / "a.jsonl").read_bytes())
        source = tmp_path / ("a.jsonl" if options else "a.txt")
        common = ("--tokenizer", "byte", "--shard-tokens", 500, *options)
        code, out, err = nb("prepare", "-", "--out", tmp_path / name, *common, input=source.read_bytes())
        assert code == 0, err
        wanted = prepare(
            source,
            tmp_path / f"{name}-file",
            tokenizer="byte",
            shard_tokens=500,
            field="body" if options else None,
        )
        assert f"{tmp_path / name}/train_*.bin: {wanted.n_train:,} tokens\n" in out and "byte, 256 ids" in out
        got, want = contents(tmp_path / name), contents(tmp_path / f"{name}-file")
        assert json.loads(got.pop("meta.json"))["inputs"][0]["name"] == "stdin" and want.pop("meta.json")
        assert got == want


def test_a_tokenizer_can_be_taken_from_elsewhere(tmp_path):
    write_lines(tmp_path / "a.jsonl", [prose(i, 50) for i in range(40)])
    trained = prepare(tmp_path / "a.jsonl", tmp_path / "one", tokenizer="bpe", vocab_size=270)
    for path in (trained.tokenizer, tmp_path / "one"):
        options = ("--tokenizer-from", path, "--format", "llm.c", "--overwrite", "--workers", 1)
        code, out, err = nb("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "two", *options)
        assert code == 0 and "bpe, 270 ids" in out, err
    file = TokenFile(tmp_path / "two" / "train_000000.bin")
    assert file.format == "llm.c" and file.tokens.tolist() == tokens(trained).tolist()
    code, out, err = nb("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "two")
    assert (
        code == 1
        and not out
        and err.startswith("nbtrain: ")
        and "--overwrite" in err
        and err.count("\n") == 1
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ("--tokenizer bpe", "--tokenizer bpe and --vocab-size go together"),
        ("--vocab-size 300", "--tokenizer bpe and --vocab-size go together"),
        ("--tokenizer-from x --tokenizer byte", "goes without --tokenizer"),
        ("--format nanogpt", "nanogpt"),
    ],
)
def test_options_at_odds_are_usage_errors(options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(tmp_path), "--out", str(tmp_path / "out"), *options.split()])
    assert end.value.code == 2 and message in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("nbtrain.cli.progress.LINE_S", 0.0)
    with progress() as report:
        report("encoding", 5_000_000, 20_000_000)
    assert capsys.readouterr().err == "encoding: 25%\n"


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    pty = pytest.importorskip("pty")
    (tmp_path / "a.txt").write_text(prose(0, 5000))
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "nbtrain", "prepare", tmp_path / "a.txt", "--out", tmp_path / "out"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, timeout=100)
    os.close(slave)
    shown = os.read(master, 10**6).decode()
    os.close(master)
    assert done.returncode == 0 and "encoding" in shown and "100%" in shown


def test_an_interrupted_command_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(inputs, out, **options):
        out.mkdir()
        (out / "progress.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("nbtrain.prepare.prepare", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["prepare", "a.txt", "--out", str(tmp_path / "out")])
    assert end.value.code == 130 and capsys.readouterr().err.endswith("the same command goes on from here.\n")
