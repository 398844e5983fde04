"""The index of docs/ names every page, and examples that it speaks of exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_index_names_every_page_once():
    named = re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert len(named) == len(set(named))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(named)


def test_the_index_names_every_example():
    named = set(re.findall(r"\b(\w+\.py)\b", (ROOT / "docs" / "README.md").read_text()))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}
