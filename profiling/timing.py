"""Shared by the GPU benchmarks: timing with events, the machine's two ceilings, what ran where."""

import json
import platform
import subprocess
import time
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def graph_ms(work, calls: int = 12, repeats: int = 12) -> float:
    """Median time of one `work(i)` in ms, i counting calls, inside a graph of `calls` of them: no launch
    gaps.

    `work` should walk over more data than the L2 cache holds, by i.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for i in range(3):
            work(i)
        stream.synchronize()
        stream.begin_capture()
        for i in range(calls):
            work(i)
        graph = stream.end_capture()
        graph.launch(stream)
        return _median_ms(lambda: graph.launch(stream), stream, repeats) / calls


def eager_ms(work, calls: int = 20, repeats: int = 5) -> float:
    """Median time of one `work(i)` in ms, with `calls` of them in the queue between two events."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    for i in range(3):
        work(i)

    def many():
        for i in range(calls):
            work(i)

    return _median_ms(many, stream, repeats) / calls


def _median_ms(run, stream, repeats) -> float:
    import cupy

    times = []
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times))


def copy_gb_s(n_bytes: int = 2 << 30) -> float:
    """Device-to-device copy speed, bytes read plus bytes written."""
    import cupy

    source, target = cupy.zeros(n_bytes, cupy.uint8), cupy.empty(n_bytes, cupy.uint8)

    def copy(_):
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, n_bytes, 3, stream)

    return 2 * n_bytes / eager_ms(copy, calls=5) / 1e6


def gemm_tflop_s(dtype, n: int = 8192) -> float:
    """The ceiling of matrix products, sustained for two seconds: n x n x n on random numbers. In a few dozen
    milliseconds a card runs at a clock that it cannot hold."""
    import cupy

    from nbtrain.device.blas import gemm

    rng = np.random.default_rng(0)
    a, b = (cupy.asarray(rng.standard_normal((n, n), np.float32).astype(dtype)) for _ in range(2))
    out = cupy.empty_like(a)
    return 2 * n**3 / eager_ms(lambda i: gemm(a, b, out), calls=250) / 1e9


def machine() -> dict:
    """Device, versions and commit, for the head of a results file."""
    import importlib.metadata

    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = ("nbtrain", "numba", "numba-cuda", "cupy-cuda13x", "nvmath-python", "numpy", "torch", "jax")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    found = {"python": platform.python_version(), **{p: version(p) for p in packages}, "commit": commit}
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(0)
        found |= {"device": properties["name"].decode(), "driver": cupy.cuda.runtime.driverGetVersion()}
    except ImportError:
        pass
    return {"time": time.strftime("%Y-%m-%d %H:%M"), **{k: v for k, v in found.items() if v}}


def write_results(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return path
