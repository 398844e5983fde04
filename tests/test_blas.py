"""The plan of a step's products: what a checkpoint carries of it."""

import json

import pytest

from nbtrain.device import blas
from nbtrain.errors import InvalidValue


def test_without_cublaslt_there_is_no_plan_and_another_one_is_told(monkeypatch):
    monkeypatch.setattr(blas, "room", lambda: ("cupy", "for a test"))
    assert blas.plan() == {} and blas.adopt({}) is None
    assert "go through cupy (for a test)" in blas.adopt({"for": "X, cuBLASLt 1", "algorithms": {}})


def test_what_is_no_plan_is_refused():
    with pytest.raises(InvalidValue, match="a plan of products is a dict; got list"):
        blas.adopt([])


@pytest.mark.gpu
def test_a_plan_is_taken_where_it_was_made_and_only_what_the_library_offers():
    import cupy

    if blas.room()[0] != "cublaslt":
        pytest.skip("products go through CuPy here")
    a, b = cupy.random.standard_normal((2, 1024, 1024)).astype("f")
    out = cupy.empty_like(a)
    blas.gemm(a, b, out)
    first, made = out.copy(), json.loads(json.dumps(blas.plan()))
    assert made["algorithms"] and blas.adopt(made) is None
    other = made | {"algorithms": dict.fromkeys(made["algorithms"], "0" * 128)}
    assert f"no longer offers {len(made['algorithms'])} of its" in blas.adopt(other)
    assert "were chosen on a TPU; this is" in blas.adopt(made | {"for": "a TPU"})
    for damaged in (None, {"x": "0"}, {"x": 0}):
        with pytest.raises(InvalidValue, match="128 hexadecimal digits"):
            blas.adopt(made | {"algorithms": damaged})
    assert blas.adopt(made) is None
    blas.gemm(a, b, out)
    assert (out == first).all()
