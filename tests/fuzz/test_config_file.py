"""Whatever lies in a config file, reading it gives options of the right types or an InvalidValue that names
the file."""

import tomllib
from enum import StrEnum

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.cli.config_file import _kind, read
from nbtrain.cli.train import train
from nbtrain.errors import InvalidValue
from tests.fuzz import examples

KINDS = {name: kind for name, kind in map(_kind, train.__annotations__.items()) if kind is not None}

leaves = st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.dates()
values = st.recursive(
    leaves | st.sampled_from(["cosine", "fp16", "auto", "char"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
names = st.sampled_from([*KINDS, "config", "context", "n-layer", "n_layers"]) | st.text(max_size=10)


def fitting(kind):
    """Values that an option of this type takes."""
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**63) + 1, 2**63 - 1)
    if kind is float:
        return st.floats() | st.integers(-100, 100)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from([choice.value for choice in kind])
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=8)
    if kind == list[str]:
        return st.lists(text, max_size=3)
    return st.lists(st.floats(), min_size=2, max_size=2) if kind == tuple[float, float] else text


def _read(content, folder):
    """What `read` gives, or None where it named the file."""
    path = folder / "run.toml"
    path.write_bytes(content)
    try:
        return read(path, train.__annotations__)
    except InvalidValue as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error).removeprefix(str(path))
        return None


@examples
@given(content=st.binary(max_size=60) | st.text("abn_=-[]{}'\".\\ \n#1e", max_size=60).map(str.encode))
def test_any_bytes_are_read_or_named(content, tmp_path_factory):
    got = _read(content, tmp_path_factory.getbasetemp())
    if got is not None:
        assert set(got) <= set(KINDS) and got.keys() == tomllib.loads(content.decode()).keys()


@examples
@given(table=st.dictionaries(names, values, max_size=3))
def test_any_table_is_read_or_named(table, tmp_path_factory):
    try:
        content = tomli_w.dumps(table).encode()
    except UnicodeEncodeError:
        return
    got = _read(content, tmp_path_factory.getbasetemp())
    assert got is None or got.keys() == table.keys() <= KINDS.keys()


@examples
@given(data=st.data())
def test_options_come_back_as_they_were_written(data, tmp_path_factory):
    chosen = data.draw(st.lists(st.sampled_from(list(KINDS)), max_size=4, unique=True))
    table = {name: data.draw(fitting(KINDS[name])) for name in chosen}
    got = _read(tomli_w.dumps(table).encode(), tmp_path_factory.getbasetemp())
    assert got is not None
    assert repr({k: list(v) if isinstance(v, tuple) else v for k, v in got.items()}) == repr(table)


def test_a_number_of_thousands_of_digits_and_depths_of_lists_are_named(tmp_path):
    for content in ("steps = 0x" + "f" * 9000, "steps = " + "9" * 9000, "steps = " + "[" * 3000 + "]" * 3000):
        assert _read(content.encode(), tmp_path) is None
    assert _read(b"# " + b"x" * 2**20, tmp_path) is None


@pytest.mark.parametrize(
    "kind, why", [("nothing", "No such file or directory"), ("folder", "Is a directory")]
)
def test_what_is_no_file_is_named(kind, why, nb, tmp_path):
    path = tmp_path / "run.toml"
    if kind == "folder":
        path.mkdir()
    code, out, err = nb("train", "--config", path)
    told = f"nbtrain: {path}: expected a TOML file of options; it cannot be read: {why}. Check the path.\n"
    assert (code, out, err) == (1, "", told)
