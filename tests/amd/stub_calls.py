"""Runs nbtrain's AMD path over the stub libraries and prints, as JSON, which calls of ROCm it made.

<the gate's python> tests/amd/stub_calls.py FOLDER        (see test_rocm_calls.py)
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.amd import hipgate, setup_gate  # noqa: E402
from tests.amd.rocm_stubs import Stubs  # noqa: E402

gate = setup_gate.find_gate()
hipgate.install(gate)
stubs = Stubs(gate, Path(sys.argv[1]))
os.environ["NBTRAIN_TARGET"] = "hip"

import cupy  # noqa: E402

from nbtrain.device import TARGET, bfloat16, hip  # noqa: E402
from nbtrain.device.blas import gemm, gemm_batched  # noqa: E402
from nbtrain.ops.layernorm import layernorm_forward  # noqa: E402

seen = {"target": TARGET, "arch": hip.architecture(), "products": [], "launches": []}


def address(x):
    return [x.data.ptr, *x.shape, *x.strides]


# ----------------------------------------------------------------------------
# Products: (M, K) @ (K, N), the second one a transposed view; a batch of them

for dtype in (np.float32, np.float16, bfloat16):
    for accumulate in ("fp32", "fp16") if dtype == np.float16 else ("fp32",):
        for batch in (1, 5):
            a, b, out = (cupy.empty((batch, *shape), dtype) for shape in ((6, 4), (3, 4), (6, 3)))
            stubs.calls()
            if batch == 1:
                gemm(a[0], b[0].T, out[0], alpha=0.5, beta=2.0, accumulate=accumulate)
            else:
                gemm_batched(a, b.transpose(0, 2, 1), out, alpha=0.5, beta=2.0, accumulate=accumulate)
            calls = [call for call in stubs.calls() if call[0] != "hipblasSetStream"]
            seen["products"].append(
                {
                    "dtype": np.dtype(dtype).name,
                    "accumulate": accumulate,
                    "batch": batch,
                    "calls": calls,
                    "a": a.data.ptr,
                    "b": b.data.ptr,
                    "out": out.data.ptr,
                }  # fmt: skip
            )

# ----------------------------------------------------------------------------
# A kernel, twice: compiled and kept, then from disk; on CuPy's stream

compiled = []
compile_for = hip.compile_for
hip.compile_for = lambda *args: compiled.append(1) or compile_for(*args)
N, C = 7, 768
x, weight, bias = cupy.empty((N, C), np.float16), cupy.empty(C, np.float16), cupy.empty(C, np.float16)
out = (cupy.empty((N, C), np.float16), cupy.empty(N, np.float32), cupy.empty(N, np.float32), x)
stubs.expect_parameters([8] * 7 * 8 + [8, 4])
for again in range(2):
    stream = cupy.cuda.ExternalStream(0x30 + again)
    with stream:
        stubs.calls()
        layernorm_forward(x, weight, bias, out=out)
        seen["launches"].append({"calls": stubs.calls(), "compiled": len(compiled)})
    hip.launch = hip.make_launch(hip.compile_binary, hip.architecture)  # forgets what is loaded
seen["arguments"] = [[y.data.ptr, y.size, y.itemsize] for y in (x, x, weight, bias, x, *out[:3])]
print(json.dumps(seen))
