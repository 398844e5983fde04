"""Where arrays live: choosing a device, moving arrays there and back."""

import contextlib
import os
import sys

import numpy as np

from nbtrain.device.arrays import is_cupy
from nbtrain.device.backend import SIMULATED, TARGET
from nbtrain.device.outline import Outline, planned_card
from nbtrain.errors import InvalidValue, Unavailable

_said: set[str] = set()


def say_once(text: str) -> None:
    """Prints what was chosen, or what takes long, on stderr, once a process."""
    if text not in _said:
        _said.add(text)
        print(f"nbtrain: {text}", file=sys.stderr)


_EXTRA = {"cuda": "cuda13", "hip": "rocm"}


def _gpu_kind() -> str:
    return "hip" if TARGET == "hip" else "cuda"


def _why_no_gpu() -> str | None:
    """Why kernels cannot run on a GPU here, or None where they can."""
    if SIMULATED:
        return "NUMBA_ENABLE_CUDASIM is set, and the simulator takes NumPy arrays"
    if TARGET == "none":
        if os.environ.get("NBTRAIN_TARGET") == "none":
            return "NBTRAIN_TARGET=none asks for no GPU"
        return "neither numba-cuda nor numba-hip is installed"
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def _how_to_get(kind: str) -> str:
    if SIMULATED:
        return "Unset NUMBA_ENABLE_CUDASIM"
    if os.environ.get("NBTRAIN_TARGET") == "none":
        return "Unset NBTRAIN_TARGET"
    return f"Run pip install 'nbtrain[{_EXTRA[kind]}]'"


def resolve_device(name: str = "auto") -> tuple[str, str]:
    """(device, reason): "cpu", "cuda:0" or "hip:0". "auto" takes the GPU where one can run kernels; what is
    asked for by name and is not there is an error that says what to install."""
    if name == "auto":
        reason = _why_no_gpu()
        return ("cpu", reason) if reason else (f"{_gpu_kind()}:0", "a GPU and its libraries are here")
    if name == "cpu":
        return name, "asked for"
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in _EXTRA or not (index.isdigit() or index == ""):
        raise InvalidValue(f'a device is "cpu", "cuda:0", "hip:0" or "auto"; got {name!r}.')
    if reason := _why_no_gpu():
        raise Unavailable(f'{name} was asked for, but {reason}. {_how_to_get(kind)}, or use device="cpu".')
    if kind != _gpu_kind():
        raise Unavailable(
            f"{name} was asked for, but kernels here are compiled for {_gpu_kind()}. Use {_gpu_kind()}:0."
        )
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if int(index or 0) >= count:
        raise Unavailable(
            f"{name} was asked for, but this machine has {count} GPU(s): {kind}:0 … {kind}:{count - 1}."
        )
    return f"{kind}:{int(index or 0)}", "asked for"


def device_of(x) -> str:
    if isinstance(x, Outline):
        return "plan"
    return f"{_gpu_kind()}:{x.device.id}" if is_cupy(x) else "cpu"


def use(device: str):
    """A context in which new arrays and launches go to `device`."""
    if device in ("cpu", "plan"):
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Device(int(device.partition(":")[2]))


@contextlib.contextmanager
def enough_memory(what: str, advice: str):
    """A context in which a MemoryError, NumPy's or CuPy's, becomes Unavailable: it says what took the memory,
    and what to do."""
    try:
        yield
    except MemoryError as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise Unavailable(f"{what} takes more memory than is free: {why}. {advice}") from error


def to_device(x, device: str):
    """A copy of a NumPy array on `device`; on the CPU the array itself."""
    if device == "cpu":
        return np.ascontiguousarray(x)
    if device == "plan":
        card = planned_card()
        assert card is not None, "outlines live inside `planning`"
        return card.asarray(x)
    import cupy

    with use(device):
        return cupy.asarray(np.ascontiguousarray(x))


def to_host(x) -> np.ndarray:
    """The array as NumPy's; waits for the device."""
    return x.get() if is_cupy(x) else np.asarray(x)


def memory_of(device: str) -> int:
    """Bytes of a GPU, whoever uses them."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(int(device.partition(":")[2]))["totalGlobalMem"]


def synchronize(device: str) -> None:
    """Waits until the device has done what was launched."""
    if device != "cpu":
        import cupy

        with use(device):
            cupy.cuda.get_current_stream().synchronize()
