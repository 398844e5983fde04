"""The AMD gate finds what it is there to find. Slow, so the whole of broken_kernels.py is compiled once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amd.code_object import Kernel
from tests.amd.gate import ALLOWED, LDS_LIMIT, broken_rules, kernels_in_ops, measure
from tests.amd.hipgate import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {"scratch": 0, "sgpr_spills": 0, "vgpr_spills": 0, "lds": LDS_LIMIT, "f64": 0, "calls": 0}


@pytest.fixture(scope="module")
def broken(gate, tmp_path_factory):
    """(exit code, {(kernel, architecture): row}) of the gate on broken_kernels.py."""
    rows = tmp_path_factory.mktemp("gate") / "rows.json"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/amd/gate.py", "--calls", "tests.amd.broken_kernels", "--json", rows],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert rows.exists(), done.stdout + done.stderr
    return done.returncode, {(row["kernel"], row["arch"]): row for row in json.loads(rows.read_text())}


def test_a_healthy_kernel_passes_on_every_architecture(broken):
    for arch in ARCHITECTURES:
        row = broken[1]["healthy", arch]
        assert row["broken"] == [] and row["numbers"]["instructions"] > 20, row
        assert row["numbers"]["lds"] == 96 * 4
        assert row["numbers"]["wavefront"] == (32 if arch == "gfx1100" else 64)


@pytest.mark.parametrize(
    "kernel,rule",
    [
        ("fp64_literal", "f64"),
        ("shuffle", "compile"),
        ("float16_index", "compile"),
        ("float16_shared", "compile"),
        ("scratch", "scratch"),
        ("spill", "vgpr_spills"),
        ("shared_memory", "lds"),
        ("block", "block"),
    ],
)
def test_a_broken_kernel_turns_the_gate_red(broken, kernel, rule):
    code, rows = broken
    assert code == 1
    for arch in ARCHITECTURES:
        assert rule in rows[kernel, arch]["broken"], rows[kernel, arch]


def test_calls_and_fp64_are_counted_in_machine_code():
    image = Kernel("k", 0, 0, 0, 0, 8, 8, 64, 64, 0, b"")
    text = [
        "s_swappc_b64 s[30:31], s[4:5]",
        "v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]",
        "v_add_f32 v0, v1, v2",
        "",
    ]
    numbers = measure(image, text)
    assert (numbers["calls"], numbers["f64"], numbers["instructions"]) == (1, 1, 3)
    assert broken_rules("any", "gfx942", numbers) == ["f64", "calls"]


def test_the_reason_for_a_refusal_is_told(broken):
    assert "shfl_xor_sync" in broken[1]["shuffle", "gfx942"]["error"]
    assert "float16" in broken[1]["float16_index", "gfx942"]["error"]


@pytest.mark.parametrize("rule", CLEAN)
def test_one_beyond_the_limit_breaks_a_rule(rule):
    assert broken_rules("any", "gfx942", CLEAN) == []
    assert broken_rules("any", "gfx942", {**CLEAN, rule: CLEAN[rule] + 1}) == [rule]


def test_what_is_allowed_is_allowed_for_one_kernel_on_one_architecture(monkeypatch):
    monkeypatch.setitem(ALLOWED, ("one", "gfx90a", "scratch"), (16, "why"))
    assert broken_rules("one", "gfx90a", {**CLEAN, "scratch": 16}) == []
    for kernel, arch, scratch in (("one", "gfx90a", 17), ("one", "gfx942", 16), ("other", "gfx90a", 16)):
        assert broken_rules(kernel, arch, {**CLEAN, "scratch": scratch}) == ["scratch"]


def test_kernels_are_found_in_the_sources_of_operators():
    assert {"layernorm_forward", "layernorm_backward"} <= kernels_in_ops()


@pytest.mark.parametrize("ci,code", [("true", 1), ("", 0)])
def test_a_gate_that_cannot_be_built_is_skipped_but_red_in_ci(tmp_path, ci, code):
    """On a machine without apt: the commands are not on PATH, and no environment has been built."""
    environment = {**os.environ, "CI": ci, "PATH": str(tmp_path), "NBTRAIN_GATE_ROOT": str(tmp_path / "root")}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/amd/gate.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code and done.stdout.startswith("SKIPPED: "), done.stdout + done.stderr
