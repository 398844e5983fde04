"""Every kernel, every dtype, for sm_80 and sm_90: no fp64, no stack, no spills. See
tests/compile_check.py."""

import subprocess
import sys

import pytest


@pytest.mark.compile
@pytest.mark.timeout(1200)  # 440 kernels: 150 s of one idle core
@pytest.mark.parametrize("arch", ["80", "90a", "90"])  # of two processes, each has one of the long ones
def test_kernels_compile_without_fp64_stack_or_spills(arch):
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile_check", arch], capture_output=True, text=True
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
