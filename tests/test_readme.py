"""The README's first example does what it shows."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_learns_its_sentence():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 16  # fifteen and a blank line
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=README.parent)
    assert result.returncode == 0, result.stderr
    *_, last_loss, sentence = result.stdout.splitlines()
    assert float(last_loss.split()[1]) < 0.3
    assert sentence.startswith("the quick brown fox jumps over the lazy dog")
