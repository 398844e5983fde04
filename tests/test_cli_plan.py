"""nbtrain plan"""

import re

import pytest


def test_plan_prints_what_fits_and_the_fastest_by_part(nb):
    code, out, err = nb("plan", "--preset", "gpt2", "--n-layer", "4", "--vram", "4GB", "--device", "cuda")
    assert code == 0 and not err
    rows = dict(re.findall(r"^(none|light|every:\d+|full) +(\d+) ", out, re.M))
    assert list(rows) == ["none", "light", "every:2", "full"]
    assert f"the fastest that fits: --batch-size {rows['light']} --remat light" in out
    parts = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]+) MB$", out, re.M)]
    assert abs(sum(parts[:-1]) - parts[-1]) <= len(parts) and 3000 < parts[-1] <= 4000


def test_plan_says_that_nothing_fits_and_the_smallest_need(nb):
    code, out, err = nb("plan", "--preset", "gpt2", "--vram", "1GB", "--device", "cuda")
    assert code == 1 and not err
    assert "Nothing fits. The least that B = 1 takes, with remat full:" in out
    assert int(re.findall(r"^total +([\d,]+) MB", out, re.M)[0].replace(",", "")) > 1000


def test_plan_of_a_batch_takes_the_policy_that_recomputes_least(nb):
    size = "--preset gpt2 --n-layer 4 --vram 4GB --device cuda".split()
    _, out, _ = nb("plan", *size)
    largest = {remat: int(B) for remat, B in re.findall(r"^(light|every:2|full) +(\d+) ", out, re.M)}
    code, out, _ = nb("plan", *size, "--batch-size", largest["light"] + 1)
    assert code == 0 and f"the fastest that fits: --batch-size {largest['light'] + 1} --remat every:2" in out
    code, out, _ = nb("plan", *size, "--batch-size", 4 * largest["full"])
    assert code == 1 and f"The least that B = {4 * largest['full']} takes, with remat " in out


def test_plan_of_one_batch_needs_no_card(nb):
    code, out, _ = nb("plan", *"--batch-size 4 --remat every:3 --n-layer 6 --device cuda".split())
    assert code == 0 and "B = 4, remat every:3:" in out and "largest B" not in out


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--vram", "eight"], 1, "as 8GB, 24GiB or 80e9"),
        (["--n-head", "7", "--vram", "8GB"], 1, "multiple of n_head"),
        (["--preset", "gpt5", "--vram", "8GB"], 1, "unknown preset"),
        (["--batch-size", "0"], 1, "B must be 1 or more"),
        (["--device", "cpu"], 2, "give --vram, --batch-size or both"),
        (["--mode", "fast", "--vram", "8GB"], 2, "fast"),
    ],
)
def test_plan_refuses_in_a_line(nb, args, code, message):
    got, _, err = nb("plan", *args)
    assert got == code and message in " ".join(err.replace("│", " ").split())
