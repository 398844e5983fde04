"""Whatever lies in a folder of weights, it is loaded as what it is, or an InvalidValue names the file."""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.config import GPTConfig
from nbtrain.errors import InvalidValue
from nbtrain.huggingface import load_pretrained, save_pretrained
from nbtrain.model import init_params
from tests.fuzz import examples

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=11)
WEIGHTS = init_params(CONFIG, seed=1)[0]
SHARDS = ("a.safetensors", "b.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An export: its folder, config.json and the bytes of model.safetensors."""
    folder = save_pretrained(tmp_path_factory.mktemp("fuzz") / "whole", WEIGHTS, CONFIG)
    return (
        folder,
        json.loads((folder / "config.json").read_text()),
        (folder / "model.safetensors").read_bytes(),
    )


@pytest.fixture(scope="module")
def sharded(whole, tmp_path_factory):
    """The same in two shards: the folder, and the index that is right."""
    folder, (_, config, content) = tmp_path_factory.mktemp("fuzz") / "sharded", whole
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (n,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + n])
    tensors = [(name, x) for name, x in head.items() if name != "__metadata__"]
    weight_map = {}
    for shard, mine in zip(SHARDS, (tensors[::2], tensors[1::2]), strict=True):
        own, data = {}, b""
        for name, x in mine:
            first, end = (8 + n + at for at in x["data_offsets"])
            own[name] = x | {"data_offsets": [len(data), len(data) + end - first]}
            data += content[first:end]
            weight_map[name] = shard
        text = json.dumps(own).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder, weight_map


def assert_loaded_or_named(folder):
    """The weights of the export under its own sizes, or an error that says where; n_head and dropout are not
    in the weights."""
    try:
        config, params, tokenizer = load_pretrained(folder, "fp32", "cpu")
    except InvalidValue as error:
        assert str(folder) in str(error) and len(str(error)) < 1000
        return False
    told = (config.n_layer, config.n_embd, config.block_size, config.vocab_size)
    assert told == (1, 8, 4, 11) and np.array_equal(params.buffer, WEIGHTS.buffer) and tokenizer is None
    return True


def test_the_folders_of_these_tests_are_loaded(whole, sharded):
    (sharded[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": sharded[1]}))
    assert assert_loaded_or_named(whole[0]) and assert_loaded_or_named(sharded[0])


numbers = st.sampled_from(
    [0, 1, 2, 4, 8, 11, 16, 32, -1, 2**31, 2**63, 10**30, 1e-5, 0.1, 1e400, float("nan")]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | numbers
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
KEYS = (
    "model_type", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner", "exported_by",
    "activation_function", "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "add_cross_attention", "tie_word_embeddings", "embd_pdrop", "attn_pdrop", "resid_pdrop",
)  # fmt: skip


@examples
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), anything | numbers, min_size=1, max_size=3),
    without=st.lists(st.sampled_from(KEYS), max_size=2),
)
def test_any_sizes_and_options_are_those_of_the_weights_or_named(changes, without, whole):
    folder, config, content = whole
    (folder / "model.safetensors").write_bytes(content)
    values = {name: x for name, x in (config | changes).items() if name not in without}
    (folder / "config.json").write_text(json.dumps(values))
    assert_loaded_or_named(folder)


@examples
@given(
    content=st.binary(max_size=60) | anything.map(lambda x: json.dumps(x).encode()) | st.just(b"[" * 100_000)
)
def test_any_bytes_for_json_are_named(content, whole, sharded):
    for folder, name in ((whole[0], "config.json"), (sharded[0], "model.safetensors.index.json")):
        (folder / name).write_bytes(content)
        assert not assert_loaded_or_named(folder)


edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@examples
@given(edits=edits, cut=st.none() | st.integers(0, 2**16), more=st.binary(max_size=9))
def test_any_header_gives_the_tensors_or_is_named(edits, cut, more, whole):
    folder, config, content = whole
    (folder / "config.json").write_text(json.dumps(config))
    changed = bytearray(content)
    (n,) = struct.unpack("<Q", content[:8])
    for at, byte in edits:  # in the header and its length; bytes of the weights are as good as others
        changed[at % (8 + n)] = byte
    changed = changed[: None if cut is None else cut % len(content)] + more
    (folder / "model.safetensors").write_bytes(changed)
    assert_loaded_or_named(folder)


FIELDS = {
    "dtype": st.sampled_from(["F32", "F16", "BF16", "I32", "F64", "F4", "BOOL", "x"]),
    "shape": st.lists(st.sampled_from([0, 1, 3, 4, 8, 11, 24, 32, 2**32, 2**63, -1]), max_size=4),
    "data_offsets": st.lists(st.sampled_from([0, 32, 352, 384, 2**40]), max_size=3),
}
NAMES = st.sampled_from(["wte.weight", "lm_head.weight", "h.0.attn.bias", "h.1.x", "\0"])


@examples
@given(data=st.data())
def test_any_spelling_of_a_header_gives_the_tensors_or_is_named(data, whole):
    folder, config, content = whole
    (folder / "config.json").write_text(json.dumps(config))
    (n,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + n])
    for _ in range(data.draw(st.integers(0, 3))):
        name, other = (data.draw(st.sampled_from(sorted(head))) for _ in range(2))
        move = data.draw(st.sampled_from(["change", "rename", "drop", "copy"]))
        if move == "change":
            field = data.draw(st.sampled_from(sorted(FIELDS)))
            head[name] = head[name] | {field: data.draw(FIELDS[field] | anything)}
        elif move == "rename":
            head[data.draw(NAMES)] = head.pop(name)
        elif move == "drop" and len(head) > 1:
            del head[name]
        elif move == "copy":
            head[name] = head[other]
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + n :])
    assert_loaded_or_named(folder)


paths = st.sampled_from(
    [
        *SHARDS, "c.safetensors", "../whole/model.safetensors", "..", "/dev/zero", "/dev/stdin",
        "A.SAFETENSORS", "fifo.safetensors", "link.safetensors", "a.safetensors/",
        "./a.safetensors", "a.safetensors\0",
    ]
)  # fmt: skip


@examples
@given(data=st.data())
def test_any_index_gives_the_tensors_or_is_named(data, sharded):
    folder, weight_map = sharded
    if not (folder / "fifo.safetensors").exists():
        os.mkfifo(folder / "fifo.safetensors")  # whose reader would wait for ever
        (folder / "link.safetensors").symlink_to("/dev/zero")
    wrong = dict(weight_map)
    for _ in range(data.draw(st.integers(0, 3))):
        name = data.draw(st.sampled_from(sorted(weight_map)) | st.text(max_size=6))
        if data.draw(st.booleans()):
            wrong[name] = data.draw(paths | anything)
        else:
            wrong.pop(name, None)
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": wrong}))
    assert assert_loaded_or_named(folder) == (wrong == weight_map)
