"""Products through cuBLASLt, on a made-up library: what is asked for, measured, kept and taken."""

import ctypes
import importlib
import itertools
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from nbtrain.errors import InvalidValue, Unavailable


class Array(np.ndarray):
    """A host array that says where it lies as a CuPy array does."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))
    device = property(lambda self: SimpleNamespace(id=0))


class Library(ModuleType):
    """`offers[workspace given]` are (algorithm, bytes it needs); `ms[algorithm, bytes given]` its time.

    An algorithm listed in `restless` gives other bits each time, one in `refused` raises.
    """

    class cuBLASLtError(Exception):
        pass

    def __init__(self):
        super().__init__("nvmath.bindings.cublasLt")
        self.offers, self.ms, self.restless, self.refused = {}, {}, (), ()
        self.calls, self.now, self.count, self.preferences = [], 0.0, itertools.count(), {}
        for name in (
            "create", "matmul_desc_create", "matmul_desc_set_attribute", "matrix_layout_create",
            "matrix_layout_set_attribute", "matmul_preference_destroy", "get_version",
        ):  # fmt: skip
            setattr(self, name, lambda *args: 1)

    def matmul_preference_create(self):
        preference = next(self.count)
        self.preferences[preference] = {}
        return preference

    def matmul_preference_set_attribute(self, preference, attribute, at, size):
        self.preferences[preference][attribute] = int.from_bytes(ctypes.string_at(at, size), "little")

    def matmul_algo_get_heuristic(self, handle, desc, a, b, c, d, preference, most, results_at, count_at):
        offered = self.offers.get(self.preferences[preference][1], [])[:most]
        if not offered:
            raise self.cuBLASLtError("NOT_SUPPORTED")
        for i, (algorithm, workspace) in enumerate(offered):
            record = np.zeros(12, np.uint64)
            record[0], record[8] = algorithm, workspace
            ctypes.memmove(results_at + 96 * i, record.ctypes.data, 96)
        ctypes.c_int32.from_address(count_at).value = len(offered)

    def matmul(
        self, handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm_at, workspace, size, stream
    ):  # fmt: skip
        algorithm = ctypes.c_uint64.from_address(algorithm_at).value
        if algorithm in self.refused:
            raise self.cuBLASLtError("INTERNAL_ERROR")
        self.calls.append((algorithm, size))
        self.now += self.ms[algorithm, size]
        ctypes.c_uint32.from_address(d).value = next(self.count) if algorithm in self.restless else 7


@pytest.fixture
def room(monkeypatch, tmp_path):
    """(the module lt on a made-up library and a made-up CuPy, the library)."""
    library = Library()

    class Event:
        def record(self):
            self.at = library.now

        def synchronize(self):
            pass

    runtime = SimpleNamespace(
        getDeviceProperties=lambda device: {"name": b"a card"}, streamIsCapturing=lambda stream: False
    )
    cupy = ModuleType("cupy")
    vars(cupy).update(
        uint8=np.uint8, uint32=np.uint32, uint64=np.uint64,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        cuda=SimpleNamespace(
            Event=Event, get_elapsed_time=lambda a, b: b.at - a.at, Device=lambda: SimpleNamespace(id=0),
            get_current_stream=lambda: SimpleNamespace(ptr=3), runtime=runtime,
        ),
    )  # fmt: skip
    bindings = ModuleType("nvmath.bindings")
    bindings.cublasLt = library
    for name, module in (
        ("cupy", cupy), ("nvmath", ModuleType("nvmath")), ("nvmath.bindings", bindings),
        ("nvmath.bindings.cublasLt", library),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nbtrain.device.nvidia.lt", raising=False)
    lt = importlib.import_module("nbtrain.device.nvidia.lt")
    monkeypatch.setattr(lt, "cache_folder", lambda: tmp_path)
    yield lt, library
    sys.modules.pop("nbtrain.device.nvidia.lt", None)


def product(lt, beta=0.0):
    a, b, out = (np.zeros((1, 16, 16), np.float32).view(Array) for _ in range(3))
    lt.gemm(a, b, out, False, False, 1.0, beta, "fp32")
    return lt


def forget(lt, disk_too=False):
    """What the next process does not know."""
    if disk_too:
        lt.choices(0).path.unlink()
    lt._plans.clear()
    lt.choices.cache_clear()


def test_an_algorithm_is_offered_with_and_without_its_bytes_and_the_faster_form_is_called(room):
    lt, library = room
    library.offers = {lt.WORKSPACE: [(1, 4), (2, 4), (3, 0)], 0: [(1, 0), (2, 0), (3, 0)]}
    library.ms = {(1, 4): 0.5, (2, 4): 0.4, (3, 0): 0.6, (1, 0): 0.3, (2, 0): 0.45}
    product(lt)
    (plan,) = lt._plans.values()
    found = [(int(x["algorithm"][0]), int(x["workspace"])) for x in plan.candidates]
    assert found == [(1, 4), (2, 4), (3, 0), (1, 0), (2, 0)] and set(library.calls) == set(found)
    assert library.calls[-1] == (1, 0)


def test_what_gives_other_bits_or_is_refused_is_not_chosen(room):
    lt, library = room
    library.offers = {lt.WORKSPACE: [(1, 0), (2, 0), (3, 0)]}  # and none without working memory
    library.ms = {(1, 0): 0.1, (3, 0): 0.9}
    library.restless, library.refused = (1,), (2,)
    for beta in (0.0, 1.0):
        product(lt, beta)
        assert library.calls[-1] == (3, 0)
    forget(lt, disk_too=True)
    library.restless, library.refused = (1, 3), (2,)
    with pytest.raises(Unavailable, match="the same bits twice"):
        product(lt)


def test_a_product_that_the_library_has_nothing_for_says_so(room):
    lt, library = room
    with pytest.raises(Unavailable, match=r"no algorithm for a \(1, 16, 16\)"):
        product(lt)


def test_a_choice_is_kept_on_disk_and_the_older_form_of_it_is_understood(room):
    lt, library = room
    library.offers = {lt.WORKSPACE: [(1, 4), (2, 4)], 0: [(1, 0), (2, 0)]}
    library.ms = {(1, 4): 0.5, (2, 4): 0.2, (1, 0): 0.3, (2, 0): 0.15}
    product(lt)
    kept = json.loads(lt.choices(0).path.read_text())
    forget(lt)
    library.calls.clear()
    made = product(lt).choices_made()
    assert library.calls == [(2, 0)] and made["algorithms"] == kept
    older = {name: text[:128] for name, text in kept.items()}
    assert lt.take_choices(made | {"algorithms": older}) is None
    product(lt)
    assert library.calls[-1] == (2, 4)
    assert lt.take_choices(made) is None
    product(lt)
    assert library.calls[-1] == (2, 0)
    assert "no longer offers 1" in lt.take_choices(made | {"algorithms": dict.fromkeys(kept, "9" * 144)})
    with pytest.raises(InvalidValue, match="128 or 144"):
        lt.take_choices(made | {"algorithms": dict.fromkeys(kept, "9" * 130)})


def test_training_s_products_are_measured_at_length(room):
    from nbtrain.device import blas

    lt, library = room
    library.offers, library.ms = {lt.WORKSPACE: [(1, 0), (2, 0)]}, {(1, 0): 0.5, (2, 0): 0.52}
    product(lt)
    few = len(library.calls)
    forget(lt, disk_too=True)
    with blas.measured_at_length():
        product(lt)
    assert few < 150 and 400 <= len(library.calls) - few < 450  # 100 ms of each at 0.5 ms, and rough turns
