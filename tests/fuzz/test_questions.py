"""Whatever lies in a file of questions, reading it gives them or an InvalidValue that names the line."""

import json

from hypothesis import given
from hypothesis import strategies as st

from nbtrain.errors import InvalidValue
from nbtrain.evaluation import read_questions
from tests.fuzz import examples
from tests.test_evaluation import GOOD

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
questions = st.fixed_dictionaries(
    {"ctx": st.text(max_size=4) | anything, "endings": st.lists(st.text(max_size=4), max_size=4) | anything,
     "label": st.integers(-1, 4) | anything}
)  # fmt: skip
lines = st.binary(max_size=40) | (anything | questions | st.just(GOOD)).map(lambda x: json.dumps(x).encode())


@examples
@given(st.lists(lines, max_size=4))
def test_any_file_is_read_or_named(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(content))
    try:
        found = read_questions(path)
    except InvalidValue as error:
        assert str(error).startswith(f"{path}:")
        return
    for question in found:
        row = json.loads(path.read_bytes().split(b"\n")[int(question.place.rpartition(":")[2]) - 1])
        assert question[:2] == (row["ctx"], tuple(row["endings"])) and question.label == int(row["label"])
