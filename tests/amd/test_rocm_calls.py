"""What nbtrain asks of the HIP runtime and of hipBLAS, seen by stubs of them under CuPy's ROCm wheel."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

# hipBLAS's and HIP's enumerations, from their headers
OP_N, OP_T = 111, 112
KIND = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE = {"fp16": 0, "fp32": 2}
GEMM_DEFAULT = 160
PRODUCTS = [
    (dtype, accumulate, batch)
    for dtype, accumulate in (
        ("float32", "fp32"),
        ("float16", "fp32"),
        ("float16", "fp16"),
        ("bfloat16", "fp32"),
    )
    for batch in (1, 5)
]


@pytest.fixture(scope="module")
def seen(gate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rocm")
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    done = subprocess.run(
        [gate.python, Path(__file__).with_name("stub_calls.py"), folder],
        env={**environment, "NBTRAIN_CACHE_DIR": str(cache)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"cache": cache}


def test_the_amd_target_is_chosen(seen):
    assert (seen["target"], seen["arch"].partition(" ")[0]) == ("hip", "gfx942")


@pytest.mark.parametrize("dtype,accumulate,batch", PRODUCTS)
def test_hipblas_gets_the_transposed_problem(seen, dtype, accumulate, batch):
    """out (6, 3) = a (6, 4) @ b.T, b (3, 4). In column-major terms out.T (3, 6) = b @ a.T."""
    keys = dtype, accumulate, batch
    (product,) = (p for p in seen["products"] if (p["dtype"], p["accumulate"], p["batch"]) == keys)
    ((function, words),) = product["calls"]
    assert function == ("hipblasGemmEx" if batch == 1 else "hipblasGemmStridedBatchedEx")
    kind, steps = KIND[dtype], (0, 0, 0) if batch == 1 else (12, 24, 18)
    alpha, beta = words[5], words[14]
    assert words[:5] == [OP_T, OP_N, 3, 6, 4]
    assert words[6:10] == [product["b"], kind, 4, steps[0]]
    assert words[10:14] == [product["a"], kind, 4, steps[1]]
    assert words[15:22] == [product["out"], kind, 3, steps[2], batch, COMPUTE[accumulate], GEMM_DEFAULT]
    scalar = (
        np.float16 if accumulate == "fp16" else np.float32
    )  # hipBLAS reads them in the type of the accumulation
    for word, value in ((alpha, 0.5), (beta, 2.0)):
        assert np.array([word], np.int64).view(scalar)[0] == value


def test_a_kernel_is_launched_on_cupys_stream_with_numbas_arguments(seen):
    for again, launched in enumerate(seen["launches"]):
        (load, image), (name, words) = launched["calls"]
        assert (load, image[0]) == ("hipModuleLoadData", int.from_bytes(b"\x7fELF", "little"))
        assert name == "nbtrain_layernorm_forward"
        grid, block, shared, stream = words[:3], words[3:6], words[6], words[7]
        assert (grid, block, shared, stream) == ([4, 1, 1], [96, 2, 1], 0, 0x30 + again)
        want = [w for at, size, item in seen["arguments"] for w in (0, 0, size, item, at, size, item)]
        assert words[8:] == want[:56]


def test_a_second_start_takes_the_code_object_from_disk(seen):
    assert [launched["compiled"] for launched in seen["launches"]] == [1, 1]
    files = [path for path in seen["cache"].rglob("*") if path.is_file()]
    assert len(files) == 1 and b"\x7fELF" in files[0].read_bytes()
    for folder in seen["cache"].rglob("*/"):
        assert folder.stat().st_mode & 0o077 == 0, folder
