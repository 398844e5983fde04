"""Which GPU target kernels are compiled for: numba-cuda, its simulator, numba-hip, or none.

The choice is made once, on import, from what is installed; `NBTRAIN_TARGET` = nvidia, hip or none overrides
it. numba's own built-in `numba.cuda` is deprecated and never used: without numba-cuda, `cuda` is a stub that
says what to install.
"""

import importlib
import importlib.util
import os
from typing import Any

from nbtrain.errors import InvalidValue, Unavailable

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _choose() -> str:
    asked = os.environ.get("NBTRAIN_TARGET")
    found = "nvidia" if _installed("numba_cuda") else "hip" if _installed("numba.hip") else "none"
    if asked is None:
        return found
    if asked == "none":
        return asked
    needs = {"nvidia": ("numba_cuda", "cuda13"), "hip": ("numba.hip", "rocm")}
    if asked not in needs:
        raise InvalidValue(
            f"NBTRAIN_TARGET is nvidia, hip or none; got {asked!r}. Unset it to let nbtrain choose."
        )
    module, extra = needs[asked]
    if not _installed(module):
        raise Unavailable(
            f"NBTRAIN_TARGET={asked} needs the module {module}. Install it: pip install 'nbtrain[{extra}]'."
        )
    return asked


class _Stub:
    """Stands for the GPU vocabulary where there is no GPU target: kernels can be written down, not run."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self

    def __getitem__(self, item):
        raise Unavailable(
            "this needs a GPU target, and none is installed. Run pip install 'nbtrain[cuda13]' for NVIDIA or "
            "'nbtrain[rocm]' for AMD, or pass NumPy arrays to run on the CPU."
        )


TARGET = _choose()
if TARGET == "nvidia" and SIMULATED:
    TARGET = "simulator"
backend: Any = _Stub() if TARGET == "none" else importlib.import_module(f"nbtrain.device.{TARGET}")
cuda = backend.cuda
