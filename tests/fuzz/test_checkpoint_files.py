"""Whatever lies in a checkpoint's folder, loading it gives what was saved or an InvalidValue that names the
file."""

import contextlib
import hashlib
import json
import shutil
import struct
import warnings

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nbtrain.checkpoint import INDEX, MODEL, OPTIMIZER, load
from nbtrain.checkpoint_index import digest_of
from nbtrain.errors import InvalidValue
from tests.fuzz import examples
from tests.test_checkpoint import CONFIG, DATA_STATE, _replace, _saved

names = st.sampled_from([MODEL, OPTIMIZER, INDEX])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return _saved(tmp_path_factory.mktemp("saved") / "a", data_state=DATA_STATE)


@pytest.fixture
def folder(saved, tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "a"


def _fresh(saved, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(saved, folder)


def _load_or_named(folder, *files):
    """What is loaded, or None after an error that names one of the files."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return load(folder, device="cpu")
        except InvalidValue as error:
            assert any(str(folder / name) in str(error) for name in files), str(error)
    return None


@examples
@given(name=names, data=st.data())
def test_bytes_that_were_not_saved_are_never_loaded(name, data, saved, folder):
    """A cut, a longer file, other bytes at some place, or altogether others."""
    content = (_fresh(saved, folder) / name).read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=9))
    wrong = data.draw(
        st.sampled_from(
            [content[:at], content + patch, content[:at] + patch + content[at + len(patch) :], patch]
        )
    )
    assume(wrong != content)
    if name == INDEX:  # JSON has a space more or less, and means the same
        with contextlib.suppress(ValueError):
            assume(json.loads(wrong) != json.loads(content))
    (folder / name).write_bytes(wrong)
    assert _load_or_named(folder, name) is None


@examples
@given(name=st.sampled_from([MODEL, OPTIMIZER]), data=st.data())
def test_a_signed_tensor_file_of_any_bytes_is_read_or_named(name, data, saved, folder):
    """Size and hash belong to the bytes, as somebody who means harm would make them."""
    content = (_fresh(saved, folder) / name).read_bytes()
    n_head = 8 + struct.unpack("<Q", content[:8])[0]
    kind = data.draw(st.sampled_from(["any", "length", "head", "header values"]))
    if kind == "any":
        wrong = data.draw(st.binary(max_size=200))
    elif kind == "length":
        wrong = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1))) + content[8:]
    elif kind == "head":
        at = data.draw(st.integers(8, n_head - 1))
        wrong = content[:at] + data.draw(st.binary(min_size=1, max_size=4)) + content[at + 1 :]
    else:
        head = json.loads(content[8:n_head])
        tensor = data.draw(st.sampled_from(sorted(head)))
        field = data.draw(st.sampled_from(sorted(head[tensor])))
        head[tensor][field] = data.draw(
            values | st.sampled_from(["F64", "BF16", [2**62, 2**62], [-1, 1], [0, 2**63], [8, 0], []])
        )
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        wrong = struct.pack("<Q", len(text)) + text + content[n_head:]
    _replace(folder, name, wrong)
    found = _load_or_named(folder, name)
    # A header may say the same in other bytes (a space, a name twice).
    assert found is None or found.params.layout.n_params == load(saved, "cpu").params.layout.n_params


@examples
@given(data=st.data())
def test_a_signed_index_of_any_values_is_read_or_named(data, saved, folder):
    _fresh(saved, folder)
    index = json.loads((folder / INDEX).read_text())
    index.pop("digest")
    at = index
    for _ in range(data.draw(st.integers(0, 2))):  # how deep
        inner = [key for key, value in at.items() if isinstance(value, dict) and value]
        if inner:
            at = at[data.draw(st.sampled_from(sorted(inner)))]
    if data.draw(st.booleans()):
        at[data.draw(st.sampled_from(sorted(at)))] = data.draw(values)
    else:
        at[data.draw(st.text(max_size=8))] = data.draw(values)
    if data.draw(st.booleans()):
        at.pop(data.draw(st.sampled_from(sorted(at))))
    index = json.loads(json.dumps(index))
    (folder / INDEX).write_text(json.dumps(index | {"digest": digest_of(index)}))
    # The config may now belong to other tensors than those that are there.
    found = _load_or_named(folder, INDEX, MODEL, OPTIMIZER)
    if found is not None:
        whole = load(saved, "cpu")
        assert found.params.buffer.tobytes() == whole.params.buffer.tobytes()
        if found.opt_state is not None:  # an index that names no optimizer file is one of weights alone
            assert found.opt_state.m.buffer.tobytes() == whole.opt_state.m.buffer.tobytes()
        assert found.config == CONFIG or found.config.leaves() == CONFIG.leaves()


@examples
@given(content=st.binary(max_size=100) | values.map(json.dumps).map(str.encode))
def test_an_index_of_any_json_is_refused(content, saved, folder):
    (_fresh(saved, folder) / INDEX).write_bytes(content)
    assert _load_or_named(folder, INDEX) is None


@examples
@given(numbers=st.lists(st.integers(0, 255), min_size=4, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_any_tensor_bytes_come_back_bit_for_bit(numbers, seed, saved, folder):
    """NaN, infinities and denormals are values like others."""
    _fresh(saved, folder)
    content = bytearray((folder / MODEL).read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    at = start + 4 * (seed % ((len(content) - start) // 4))
    content[at : at + 4] = bytes(numbers)
    _replace(folder, MODEL, bytes(content))
    assert hashlib.sha256(content).hexdigest() in (folder / INDEX).read_text()
    got = load(folder, device="cpu").opt_state.master
    leaves = np.concatenate([leaf.reshape(-1) for _, leaf in got])
    assert leaves.tobytes() == bytes(content[start:])
