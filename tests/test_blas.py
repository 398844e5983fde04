"""cuBLASLt's products: their candidates, and the plan of them that a checkpoint carries."""

import json
from concurrent.futures import ThreadPoolExecutor

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
    other = made | {"algorithms": dict.fromkeys(made["algorithms"], "0" * 144)}
    assert f"no longer offers {len(made['algorithms'])} of its" in blas.adopt(other)
    assert "were chosen on a TPU; this is" in blas.adopt(made | {"for": "a TPU"})
    without_bytes = {name: text[:128] for name, text in made["algorithms"].items()}  # as they once were
    assert blas.adopt(made | {"algorithms": without_bytes}) is None
    for damaged in (None, {"x": "0"}, {"x": 0}):
        with pytest.raises(InvalidValue, match="128 or 144 hexadecimal digits"):
            blas.adopt(made | {"algorithms": damaged})
    assert blas.adopt(made) is None
    blas.gemm(a, b, out)
    assert (out == first).all()


@pytest.mark.gpu
def test_candidates_with_and_without_working_memory_are_different_and_all_are_right():
    import cupy

    if blas.room()[0] != "cublaslt":
        pytest.skip("products go through CuPy here")
    from nbtrain.device.nvidia import lt

    rng = cupy.random.default_rng(0)
    a, b = (
        rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)
        for shape in ((1, 32768, 768), (1, 768, 768))
    )
    out, expected = cupy.empty_like(a), a[0].astype("f") @ b[0].astype("f")
    plan = lt._Plan(a, b, out, False, False, "fp32", None, 256)
    found = [plan.text_of(x) for x in plan.candidates]
    bytes_ = plan.candidates["workspace"]
    assert len(set(found)) == len(found) > lt.CANDIDATES and (bytes_ == 0).any() and (bytes_ > 0).any()
    stream = cupy.cuda.get_current_stream().ptr
    for i in range(len(found)):
        plan.choose(i)
        out.fill(0)
        plan(a.data.ptr, b.data.ptr, out.data.ptr, 1, 0, 0, lt._workspace(0, stream).data.ptr, stream)
        assert abs(out[0] - expected).max() < 0.2, i  # fp16 rounds numbers of about 150 by 0.06


def test_measuring_at_length_is_one_thread_s_own():
    with blas.measured_at_length(), ThreadPoolExecutor(1) as pool:
        assert blas.at_length.get() and not pool.submit(blas.at_length.get).result()
    assert not blas.at_length.get()
