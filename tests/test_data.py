import gc
import json
import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from nbtrain import data
from nbtrain.data import Batch, TokenFile, batches, check_batch, eval_batches, write_tokens
from nbtrain.errors import InvalidType, InvalidValue, Unavailable

N_TOKENS = 500
ZEROS = np.zeros((2, 3), np.int64)


def _ids(n, vocab_size=50304, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, n)


def _file(folder, n=N_TOKENS, name="train.bin", *, ids=None, vocab_size=50304):
    """A token file whose ids are their own positions unless given."""
    write_tokens(folder / name, np.arange(n) if ids is None else ids, vocab_size=vocab_size)
    return folder / name


def _llmc(magic, version, ids, dtype):
    return struct.pack("<256i", magic, version, len(ids), *[0] * 253) + np.asarray(ids, dtype).tobytes()


def _take(source, n):
    return [next(source) for _ in range(n)]


def _prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "nbtrain-prefetch"]


def _same(a, b):
    return all(x.dtype == y.dtype and (x == y).all() for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    yield
    if _prefetching():
        gc.collect()
    assert not _prefetching()


# Token files


@pytest.mark.parametrize(
    "vocab_size, dtype", [(2, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**31 - 1, "uint32")]
)
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_written_tokens_are_read_back(n, vocab_size, dtype, tmp_path):
    ids = _ids(n, vocab_size)
    ids[-1] = vocab_size - 1
    path = _file(tmp_path, ids=ids, vocab_size=vocab_size)
    file = TokenFile(path)
    assert file.format == "nbtrain" and file.tokens.dtype == dtype and (file.tokens == ids).all()
    assert path.stat().st_size == 24 + n * file.tokens.itemsize
    assert os.listdir(tmp_path) == ["train.bin"]  # no temporary file stays


def test_the_layout_is_the_documented_one(tmp_path):
    path = _file(tmp_path, ids=[7, 258])
    assert path.read_bytes() == b"nbtokens" + bytes([1, 0, 0, 0, 2, 0, 0, 0, 2] + [0] * 7 + [7, 0, 2, 1])


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_shards_of_llmc_are_recognised(magic, version, dtype, tmp_path):
    ids = _ids(100)
    path = tmp_path / "shard.bin"
    path.write_bytes(_llmc(magic, version, ids, dtype))
    for format in ("auto", "llm.c"):
        file = TokenFile(path, format)
        assert file.format == "llm.c" and file.tokens.dtype == dtype and (file.tokens == ids).all()
    with pytest.raises(InvalidValue, match="has llm.c's header, but format='nanogpt'"):
        TokenFile(path, "nanogpt")


def test_headerless_tokens_are_read_only_when_named(tmp_path):
    ids = _ids(100)
    path = tmp_path / "val.bin"
    path.write_bytes(ids.astype("<u2").tobytes())
    assert (TokenFile(path, "nanogpt").tokens == ids).all()
    for format in ("auto", "nbtrain", "llm.c"):
        with pytest.raises(
            InvalidValue, match=r'val\.bin has no header.*there are 200 bytes.*format="nanogpt"'
        ):
            TokenFile(path, format)
    with pytest.raises(InvalidValue, match="20240520 or 20240801"):
        TokenFile(path)


def _damaged():
    def ours(version=1, dtype=2, count=3, ids=bytes(6)):
        return struct.pack("<8sIIQ", b"nbtokens", version, dtype, count) + ids

    llmc = _llmc(20240520, 1, [1, 2, 3], "<u2")
    below_0 = struct.pack("<256i", 20240520, 1, -1, *[0] * 253)
    return {
        "cut by a byte": (ours()[:-1], "auto", "need 30 bytes, there are 29"),
        "a byte too long": (ours() + b"\0", "auto", "need 30 bytes, there are 31"),
        "count 0": (ours(count=0, ids=b""), "auto", "0 tokens: expected more than 24 bytes, there are 24"),
        "count beyond any file": (
            ours(count=2**64 - 1),
            "auto",
            "need 36893488147419103254 bytes, there are 30",
        ),
        "header cut": (ours()[:23], "auto", "needs 24 bytes, there are 23"),
        "version 2": (ours(version=2), "auto", r"version 2 .*\(30 bytes\).*version 1"),
        "dtype 3": (ours(dtype=3), "auto", "code must be 2 .* it is 3"),
        "empty": (b"", "auto", "no header.*there are 0 bytes"),
        "llm.c cut by a byte": (llmc[:-1], "auto", "need 1030 bytes, there are 1029"),
        "llm.c header cut": (llmc[:1023], "auto", "needs 1024 bytes, there are 1023"),
        "llm.c count 0": (_llmc(20240520, 1, [], "<u2"), "auto", "more than 1024 bytes, there are 1024"),
        "llm.c count below 0": (below_0, "auto", "counts -1 tokens; there are 1024"),
        "llm.c version 7 of GPT-2": (_llmc(20240520, 7, [1], "<u2"), "auto", "version 7 .*reads version 1"),
        "llm.c version 1 of Llama": (_llmc(20240801, 1, [1], "<u4"), "auto", "version 1 .*reads version 7"),
        "nanogpt cut by a byte": (bytes(7), "nanogpt", "expected 6 or 8, there are 7"),
        "nanogpt empty": (b"", "nanogpt", "0 tokens: expected more than 0 bytes, there are 0"),
    }


@pytest.mark.parametrize("what", _damaged())
def test_damaged_file_is_named_with_its_bytes(what, tmp_path):
    content, format, message = _damaged()[what]
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message) as caught:
        TokenFile(path, format)
    assert str(path) in str(caught.value)


def test_absent_files_folders_and_formats_are_named(tmp_path):
    with pytest.raises(InvalidValue, match=r"absent\.bin, which does not exist"):
        TokenFile(tmp_path / "absent.bin")
    with pytest.raises(InvalidValue, match="which is a folder"):
        TokenFile(tmp_path)
    with pytest.raises(InvalidValue, match="format must be one of 'auto', .*; got 'bin'"):
        TokenFile(tmp_path, "bin")


@pytest.mark.parametrize(
    "ids, vocab_size, error, message",
    [
        ([1, 2, 65000], 50304, InvalidValue, r"token 65000 at position 2 lies outside 0\.\.50303"),
        ([50303, 50304], 50304, InvalidValue, "token 50304 at position 1"),
        ([1, -4], 50304, InvalidValue, "token -4 at position 1"),
        ([], 50304, InvalidValue, r"at least one token .*\(0,\)"),
        ([[1, 2]], 50304, InvalidValue, r"got shape \(1, 2\)"),
        ([1.0], 50304, InvalidType, "float64"),
        ([1], 0, InvalidValue, "vocab_size must lie in"),
        ([1], 2**31, InvalidValue, "vocab_size must lie in"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(ids, vocab_size, error, message, tmp_path):
    path = _file(tmp_path)
    before = path.read_bytes()
    with pytest.raises(error, match=message):
        write_tokens(path, ids, vocab_size=vocab_size)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["train.bin"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = _file(tmp_path)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, call, interrupted)
            write_tokens(path, [1, 2, 3], vocab_size=4)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["train.bin"]
    with pytest.raises(InvalidValue, match="no folder .*absent"):
        write_tokens(tmp_path / "absent" / "train.bin", [1], vocab_size=4)


# Batch


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("vocab_size", [3, 100])
def test_order_is_the_stable_sort_of_each_micro_batch(vocab_size, dtype):
    tokens, targets = (_ids((2, 3, 50), vocab_size, seed).astype(dtype) for seed in (1, 2))
    batch = Batch.of(tokens, targets)
    assert (batch.tokens == tokens).all() and (batch.targets == targets).all()
    assert [array.dtype for array in batch] == [np.int32] * 3
    for a in range(2):
        flat = tokens[a].ravel().tolist()
        assert batch.order[a].tolist() == sorted(range(150), key=lambda i: (flat[i], i))
    check_batch(batch, vocab_size)


def test_order_sorts_ids_beyond_16_bits_and_below_0():
    large, negative = np.array([[70000, 65536, 0, 70000]]), np.array([[3, -1, 2]])
    assert Batch.of(large, large).order.tolist() == [[2, 1, 0, 3]]
    assert Batch.of(negative, negative).order.tolist() == [[1, 2, 0]]


def test_batch_of_two_dimensions_is_one_micro_batch_and_a_copy():
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = Batch.of(tokens, np.asfortranarray(tokens))
    tokens[:] = 0
    assert batch.tokens.tolist() == batch.targets.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert batch.order.shape == (1, 6) and all(array.flags.c_contiguous for array in batch)


@pytest.mark.parametrize(
    "tokens, targets, error, message",
    [
        (ZEROS, ZEROS.T, InvalidValue, r"got \(1, 3, 2\) and \(1, 2, 3\)"),
        (ZEROS[0], ZEROS[0], InvalidValue, r"tokens must have shape .* got \(3,\)"),
        (ZEROS[:, :0], ZEROS[:, :0], InvalidValue, r"without a 0; got \(2, 0\)"),
        (ZEROS.astype(float), ZEROS, InvalidType, "tokens must be an integer array; got float64"),
        (ZEROS, ZEROS.astype(bool), InvalidType, "targets must be .* got bool"),
        ([[1, 2]], ZEROS, InvalidType, "list"),
        (None, None, InvalidType, "NoneType"),
        (
            ZEROS + [0, 0, 2**31],
            ZEROS,
            InvalidValue,
            r"-2147483648\.\.2147483647; got tokens\[0, 0, 2\] = 2147483648",
        ),
        (ZEROS, ZEROS.astype("u8") + 2**63, InvalidValue, r"targets\[0, 0, 0\] = 9223372036854775808"),
    ],
)
def test_batch_of_refuses(tokens, targets, error, message):
    with pytest.raises(error, match=message):
        Batch.of(tokens, targets)


@pytest.mark.parametrize("array", ["tokens", "targets"])
@pytest.mark.parametrize("value", [65000, 50304, -1, -4, -100])
def test_ids_outside_the_vocabulary_are_named_with_their_position(array, value):
    tokens, targets = _ids((2, 2, 3)), _ids((2, 2, 3), seed=1)
    {"tokens": tokens, "targets": targets}[array][1, 0, 2] = value
    batch = Batch.of(tokens, targets)
    if array == "targets" and value == -100:
        check_batch(batch, 50304)
        value, match = -100, r"0\.\.50303 or ignore_index = -1; got targets\[1, 0, 2\] = -100"
        with pytest.raises(InvalidValue, match=match):
            check_batch(batch, 50304, ignore_index=-1)
        return
    with pytest.raises(InvalidValue, match=rf"0\.\.50303.*; got {array}\[1, 0, 2\] = {value}\."):
        check_batch(batch, 50304)


def test_targets_0_1_minus_4_and_vocab_size_are_refused():
    tokens = np.zeros((1, 3), int)
    with pytest.raises(ValueError, match=r"targets\[0, 0, 2\] = -4"):
        check_batch(Batch.of(tokens, np.array([[0, 1, -4]])), 5)
    with pytest.raises(ValueError, match=r"0\.\.4 or ignore_index = -100; got targets\[0, 0, 1\] = 5"):
        check_batch(Batch.of(tokens, np.array([[0, 5, 1]])), 5)
    check_batch(Batch.of(tokens, np.array([[0, 4, -100]])), 5)


def test_check_batch_refuses_other_shapes_dtypes_and_orders():
    tokens = _ids((2, 2, 3), 3)
    batch = Batch.of(tokens, tokens)
    for unlike, message in [
        (batch._replace(targets=batch.targets[:1]), r"\(2, 2, 3\) and \(1, 2, 3\)"),
        (batch._replace(tokens=batch.tokens[0], targets=batch.targets[0]), r"got \(2, 3\)"),
        (batch._replace(order=batch.order[:1]), r"\(A, B\*T\) = \(2, 6\); got \(1, 6\)"),
        (batch._replace(order=batch.order[:, ::-1]), "order is not the stable argsort"),
        (batch._replace(order=batch.order + 1), "order is not the stable argsort"),
        (batch._replace(order=np.zeros_like(batch.order)), "order is not the stable argsort"),
    ]:
        with pytest.raises(InvalidValue, match=message):
            check_batch(unlike, 3)
    for unlike in (batch._replace(tokens=tokens), batch._replace(order=batch.order.tolist())):
        with pytest.raises(InvalidType, match="NumPy arrays of int32"):
            check_batch(unlike, 3)


def test_a_sort_that_is_not_stable_is_refused():
    batch = Batch.of(np.zeros((1, 3), int), np.zeros((1, 3), int))
    with pytest.raises(InvalidValue, match="order is not the stable argsort"):
        check_batch(batch._replace(order=np.array([[0, 2, 1]], np.int32)), 1)


# Batches


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("micro, ranks", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_an_epoch_takes_each_window_once_over_all_ranks(micro, ranks, shuffle, tmp_path):
    B, T = 2, 8
    paths = [_file(tmp_path, 101, "a.bin"), _file(tmp_path, 300, "b.bin", ids=np.arange(1000, 1300))]
    wanted = [0 + T * i for i in range(12)] + [1000 + T * i for i in range(37)]
    n_steps = len(wanted) // (micro * B * ranks)
    epochs = []
    for _ in range(2):
        epochs.append([])
    for rank in range(ranks):
        with batches(paths, B=B, T=T, micro=micro, rank=rank, ranks=ranks, shuffle=shuffle) as source:
            assert source.batches_per_epoch == n_steps
            for epoch in epochs:
                for batch in _take(source, n_steps):
                    assert batch.tokens.shape == (micro, B, T)
                    assert (np.diff(batch.tokens, axis=2) == 1).all() and (
                        batch.targets == batch.tokens + 1
                    ).all()
                    assert _same(batch, Batch.of(batch.tokens, batch.targets))
                    epoch += batch.tokens[:, :, 0].ravel().tolist()
                assert source.state()["position"] == 0  # all ranks roll over on the same step
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == n_steps * micro * B * ranks and set(epoch) <= set(wanted)
    assert (epochs[0] == epochs[1]) is not shuffle


def test_in_order_the_ranks_share_a_global_batch_in_turn(tmp_path):
    path = _file(tmp_path, 100)
    for rank in range(2):
        with batches(path, B=2, T=3, micro=2, rank=rank, ranks=2, shuffle=False) as source:
            first, second = _take(source, 2)
        start = rank * 4 * 3  # micro * B windows of T tokens
        assert first.tokens[:, :, 0].tolist() == [[start, start + 3], [start + 6, start + 9]]
        assert (second.tokens == first.tokens + 8 * 3).all()


def test_a_hundred_tokens_make_one_global_batch_for_four_ranks(tmp_path):
    path = _file(tmp_path, 100)
    for rank in range(4):
        with batches(path, B=2, T=8, rank=rank, ranks=4) as source:
            assert source.batches_per_epoch == 1
            for epoch in range(3):
                assert (source.state()["epoch"], source.state()["position"]) == (epoch, 0)
                next(source)


def test_the_seed_decides_the_permutation(tmp_path):
    path = _file(tmp_path)

    def first(seed):
        with batches(path, B=2, T=8, seed=seed) as source:
            return np.stack([batch.tokens for batch in _take(source, 20)])

    assert (first(1) == first(1)).all() and (first(0) == first(None)).all()
    assert not (first(1) == first(2)).all()


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_state_continues_bit_for_bit(prefetch, tmp_path):
    path = _file(tmp_path, ids=_ids(N_TOKENS, 50))
    spec = dict(
        B=2, T=8, micro=2, rank=1, ranks=2, seed=3, prefetch=prefetch
    )  # 62 windows, 7 batches an epoch
    with batches(path, **spec) as source:
        states, wanted = [], []
        for _ in range(30):
            states.append(json.loads(json.dumps(source.state())))
            wanted.append(next(source))
    for at in np.random.default_rng(0).choice(25, 8, replace=False).tolist() + [6, 7, 14]:
        del spec["seed"]
        with batches(path, **spec, state=states[at]) as source:
            assert source.state() == states[at]
            assert all(_same(batch, want) for batch, want in zip(_take(source, 5), wanted[at:], strict=False))
            assert source.state() == states[at + 5]
        spec["seed"] = 3


def test_a_state_follows_its_files_to_another_folder(tmp_path):
    path = _file(tmp_path)
    (tmp_path / "moved").mkdir()
    moved = _file(tmp_path / "moved")
    with batches(path, B=2, T=8) as source:
        next(source)
        state, want = source.state(), next(source)
    with batches(moved, B=2, T=8, state=state) as source:
        assert _same(next(source), want)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(B=3), "B 2 then and 3 now"),
        (dict(T=9), "T 8 then and 9 now"),
        (dict(micro=2), "micro 1 then and 2 now"),
        (dict(rank=0, ranks=2), "ranks 1 then and 2 now"),
        (dict(seed=4), "seed 3 then and 4 now"),
        (dict(shuffle=False), "shuffle True then and False now"),
    ],
)
def test_a_state_of_another_shape_is_refused(change, message, tmp_path):
    path = _file(tmp_path)
    with batches(path, B=2, T=8, seed=3) as source:
        state = source.state()
    with pytest.raises(InvalidValue, match=f"other data or another shape: {message}"):
        batches(path, **(dict(B=2, T=8, seed=3) | change), state=state)


def test_a_state_of_other_data_is_refused(tmp_path):
    with batches(_file(tmp_path), B=2, T=8) as source:
        state = source.state()
    with pytest.raises(InvalidValue, match="tokens 500 then and 501 now"):
        batches(_file(tmp_path, N_TOKENS + 1), B=2, T=8, state=state)
    with pytest.raises(InvalidValue, match="the files have other names or tokens"):
        batches(_file(tmp_path, name="other.bin"), B=2, T=8, state=state)
    with pytest.raises(InvalidValue, match="files 1 then and 2 now"):
        batches([_file(tmp_path), _file(tmp_path)], B=2, T=8, state=state)


@pytest.mark.parametrize("longer_than", [1 << 20, 100])
def test_a_state_of_as_many_other_tokens_is_refused(longer_than, tmp_path, monkeypatch):
    """A text of the same length in place of the one that a run was begun with."""
    monkeypatch.setattr(data, "HASHED_WHOLE", longer_than)
    monkeypatch.setattr(data, "SAMPLE", 20)
    ids = np.arange(N_TOKENS) % 50
    write_tokens(tmp_path / "train.bin", ids, vocab_size=50)
    with batches(tmp_path / "train.bin", B=2, T=8) as source:
        state = source.state()
    write_tokens(tmp_path / "train.bin", ids[::-1], vocab_size=50)
    with pytest.raises(InvalidValue, match="the files have other names or tokens"):
        batches(tmp_path / "train.bin", B=2, T=8, state=state)
    write_tokens(tmp_path / "train.bin", ids, vocab_size=50)
    with batches(tmp_path / "train.bin", B=2, T=8, state=state) as source:
        assert source.state() == state


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(version=1), "state has version 1; this nbtrain reads version 2"),
        (dict(position=31), "position below the epoch's 31 batches; got"),
        (dict(position=-1), "damaged"),
        (dict(epoch="0"), "damaged"),
        (dict(seed=-1), "damaged"),
        (dict(data=[]), "a dict of version, seed, epoch, position, data"),
        (dict(extra=1), "a dict of version, seed, epoch, position, data; got .*extra"),
    ],
)
def test_a_damaged_state_is_refused(change, message, tmp_path):
    path = _file(tmp_path)
    with batches(path, B=2, T=8) as source:
        state = source.state()
    with pytest.raises(InvalidValue, match=message):
        batches(path, B=2, T=8, state=state | change)
    with pytest.raises(InvalidValue, match="got str"):
        batches(path, B=2, T=8, state="epoch 3")


def test_patterns_are_expanded_in_the_order_of_names(tmp_path):
    for i, name in enumerate(["b.bin", "a.bin", "c[1].bin"]):
        _file(tmp_path, name=name, ids=np.arange(9) + 100 * i)
    with batches(tmp_path / "*.bin", B=3, T=8, shuffle=False) as source:
        assert next(source).tokens[0, :, 0].tolist() == [100, 0, 200]
    with batches([str(tmp_path / "c[1].bin"), tmp_path / "a.bin"], B=2, T=8, shuffle=False) as source:
        assert next(source).tokens[0, :, 0].tolist() == [200, 100]  # a name that exists is no pattern


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(T=256),
            r"100 tokens in 1 file\(s\) .*make 0 windows of T \+ 1 = 257 tokens.*= 1 \* 2 \* 1 = 2",
        ),
        (dict(B=13), r"make 12 windows of T \+ 1 = 9 tokens, a global batch needs .*1 \* 13 \* 1 = 13"),
        (dict(B=2, micro=2, ranks=4), r"= 2 \* 2 \* 4 = 16"),
        (dict(B=0), "B must be an integer, 1 or more; got 0"),
        (dict(B=True), "B must be an integer, 1 or more; got True"),
        (dict(T=8.0), "T must be an integer, 1 or more; got 8.0"),
        (dict(micro=-1), "micro must"),
        (dict(ranks=0), "ranks must"),
        (dict(prefetch=0), "prefetch must"),
        (dict(rank=1), r"rank must lie in 0\.\.ranks - 1 = 0; got 1"),
        (dict(rank=-1), "rank must lie"),
        (dict(seed=-1), "seed must be an integer, 0 or more; got -1"),
        (dict(vocab_size=0), "vocab_size must lie in"),
        (dict(device="gpu"), 'device must be "cpu", "cuda:<index>" or "hip:<index>"; got \'gpu\''),
        (dict(device=None), "got None"),
        (dict(device="cuda:-1"), "got 'cuda:-1'"),
        (dict(format="raw"), "format must be one of"),
    ],
)
def test_batches_refuses(change, message, tmp_path):
    path = _file(tmp_path, 100)
    with pytest.raises(InvalidValue, match=message):
        batches(path, **(dict(B=2, T=8) | change))
    assert not _prefetching()


@pytest.mark.parametrize(
    "paths, got",
    [(np.arange(100), "ndarray"), ([1, 2], "list"), (None, "NoneType"), (3, "int"), (b"a", "bytes")],
)
def test_ids_are_no_token_files(paths, got):
    for make in (batches, eval_batches):
        with pytest.raises(InvalidType, match=rf"a path of token files, .*; got {got}\. .*write_tokens\("):
            make(paths, B=2, T=8)
    assert not _prefetching()


def test_files_may_come_from_any_iterable(tmp_path):
    path = _file(tmp_path, 100)
    with batches((p for p in (path, str(path))), B=2, T=8) as source:
        assert source.state()["data"]["files"] == 2


def test_absent_or_empty_data_is_named(tmp_path):
    for make in (batches, eval_batches):
        with pytest.raises(InvalidValue, match=r"no token file matches '.*train_\*\.bin'"):
            make(tmp_path / "train_*.bin", B=2, T=8)
        with pytest.raises(InvalidValue, match="empty list"):
            make([], B=2, T=8)
        with pytest.raises(InvalidValue, match="is a folder"):
            make(tmp_path, B=2, T=8)
        (tmp_path / "val.bin").write_bytes(struct.pack("<8sIIQ", b"nbtokens", 1, 2, 0))
        with pytest.raises(InvalidValue, match=r"val\.bin holds 0 tokens"):
            make(tmp_path / "val.bin", B=2, T=8)


def test_a_gpu_without_its_library_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # import cupy raises ImportError
    path = _file(tmp_path)
    for device, extra in [("cuda:0", "cuda13"), ("hip:0", "rocm")]:
        for make in (batches, eval_batches):
            with pytest.raises(Unavailable, match=rf"{device} needs CuPy.*nbtrain\[{extra}"):
                make(path, B=2, T=8, device=device)
    assert not _prefetching()


def test_an_id_beyond_the_vocabulary_is_named_and_stays_an_error(tmp_path):
    ids = _ids(100, 50304)
    ids[42] = 65000
    path = _file(tmp_path, ids=ids, vocab_size=65536)
    for make in (batches, eval_batches):
        source = make(path, B=4, T=8, vocab_size=50304)
        with pytest.raises(
            InvalidValue, match=r"train\.bin: token 65000 at position 42 lies outside 0\.\.50303"
        ):
            _take(source, 4)
    source = batches(path, B=12, T=8, vocab_size=50304)
    for _ in range(2):
        with pytest.raises(InvalidValue, match="token 65000 at position 42"):
            next(source)
    assert source.state()["position"] == 0
    with batches(path, B=12, T=8, vocab_size=65001) as source:
        assert (next(source).tokens == 65000).any()


def test_ids_beyond_int32_are_refused_without_a_vocabulary(tmp_path):
    path = tmp_path / "shard.bin"
    path.write_bytes(_llmc(20240801, 7, [1, 2**31 - 1, 3, 4, 2**31, 6], "<u4"))
    with batches(path, B=1, T=2, shuffle=False) as source:
        assert next(source).tokens.tolist() == [[[1, 2**31 - 1]]]
        with pytest.raises(InvalidValue, match="token 2147483648 at position 4"):
            next(source)


def test_closed_batches_end_their_thread_and_keep_their_state(tmp_path):
    path = _file(tmp_path)
    with batches(path, B=2, T=8) as source:
        _take(source, 3)
        assert _prefetching()
    assert not _prefetching() and source.state()["position"] == 3
    with pytest.raises(InvalidValue, match="closed"):
        next(source)
    source.close()  # twice is once


def test_dropped_batches_end_their_thread(tmp_path):
    source = batches(_file(tmp_path), B=2, T=8)
    next(source)
    assert _prefetching()
    del source
    gc.collect()
    assert not _prefetching()


def test_the_interpreter_ends_with_batches_still_open(tmp_path):
    path = _file(tmp_path)
    script = f"from nbtrain.data import batches; b = batches({str(path)!r}, B=2, T=8); next(b); print('left')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


# Evaluation


@pytest.mark.parametrize("n", [2, 8, 9, 10, 17, 18, 100, 129, 130])
@pytest.mark.parametrize("B", [1, 3])
def test_evaluation_counts_each_target_once(B, n, tmp_path):
    paths = [_file(tmp_path, n, "a.bin"), _file(tmp_path, 30, "b.bin", ids=np.arange(1000, 1030))]
    got = list(eval_batches(paths, B=B, T=8))
    tokens, targets = (np.concatenate([batch[i].reshape(-1) for batch in got]) for i in (0, 1))
    counted = targets != -100
    assert targets[counted].tolist() == [*range(1, n), *range(1001, 1030)]
    assert (tokens[counted] == targets[counted] - 1).all() and (tokens[~counted] == 0).all()
    n_windows = -(-(n - 1) // 8) + 4
    assert len(got) == -(-n_windows // B)
    for batch in got:
        assert batch.tokens.shape == (1, B, 8) and _same(batch, Batch.of(batch.tokens, batch.targets))
        check_batch(batch, 50304)


def test_evaluation_stops_after_max_batches(tmp_path):
    path = _file(tmp_path)
    every = list(eval_batches(path, B=2, T=8))
    some = list(eval_batches(path, B=2, T=8, max_batches=3))
    assert len(some) == 3 and all(map(_same, some, every))
    assert len(list(eval_batches(path, B=2, T=8, max_batches=1000))) == len(every) == 32


def test_evaluation_without_a_target_is_refused(tmp_path):
    path = _file(tmp_path, 1)
    with pytest.raises(
        InvalidValue, match=r"1 tokens in 1 file\(s\) .* have no target; .* at least 2 tokens"
    ):
        eval_batches(path, B=2, T=8)
    for change in (dict(B=0), dict(T=0), dict(max_batches=0)):
        with pytest.raises(InvalidValue, match="must be an integer, 1 or more; got 0"):
            eval_batches(path, **(dict(B=2, T=8) | change))


# On a GPU


@pytest.mark.gpu
def test_batches_on_the_gpu_equal_those_on_the_host(tmp_path):
    """Each step's kernels are slow, so copies and reuse of memory would show a missing wait."""
    cupy = pytest.importorskip("cupy")
    device = "hip:0" if cupy.cuda.runtime.is_hip else "cuda:0"
    path = _file(tmp_path, 20_000, ids=_ids(20_000))
    spec = dict(B=4, T=64, micro=2, seed=1)
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream, batches(path, **spec) as host, batches(path, **spec, device=device) as gpu:
            busy = cupy.ones((2048, 2048), cupy.float32)
            copies, wanted = [], _take(host, 100)
            for _ in range(100):
                batch = next(gpu)
                for _ in range(3):
                    busy = busy @ busy * 1e-4
                copies.append([array.copy() for array in batch])  # reads the batch behind the slow kernels
            for got, want in zip(copies, wanted, strict=True):
                assert _same([array.get() for array in got], want)
            assert gpu.state() == host.state()


@pytest.mark.gpu
def test_batch_of_arrays_on_the_gpu_stays_there():
    cupy = pytest.importorskip("cupy")
    tokens, targets = _ids((2, 3, 50), 30), _ids((2, 3, 50), 30, seed=1)
    want = Batch.of(tokens, targets)
    for dtype in ("int32", "uint16", "int64", "uint64"):
        got = Batch.of(cupy.asarray(tokens.astype(dtype)), cupy.asarray(targets.astype(dtype)))
        assert all(isinstance(array, cupy.ndarray) for array in got)
        assert _same([array.get() for array in got], want)
    with pytest.raises(InvalidType, match="targets on the host"):
        Batch.of(cupy.asarray(tokens), targets)
    far = cupy.full((1, 2), 2**40)
    assert Batch.of(far, far).tokens.get().tolist() == [[[2**31 - 1] * 2]]


@pytest.mark.gpu
def test_evaluation_on_the_gpu_equals_that_on_the_host(tmp_path):
    cupy = pytest.importorskip("cupy")
    device = "hip:0" if cupy.cuda.runtime.is_hip else "cuda:0"
    path = _file(tmp_path, 5_000, ids=_ids(5_000))
    gpu = [[array.get() for array in batch] for batch in eval_batches(path, B=3, T=64, device=device)]
    host = list(eval_batches(path, B=3, T=64))
    assert len(gpu) == len(host) and all(map(_same, gpu, host))
