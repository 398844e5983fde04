"""The index of docs/ names every page and every example, and docs/design.md every module."""

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


def test_the_house_names_every_module():
    text = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"\w+", text[text.index("## The house") : text.index("## Choices")]))
    for folder in ("", "device", "ops"):
        modules = {path.stem for path in (ROOT / "nbtrain" / folder).glob("*.py")} - {"__main__"}
        assert not modules - named, f"docs/design.md: a line for each of these in nbtrain/{folder}"
