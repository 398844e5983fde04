"""What a plan says against what a run takes: every part, on the CPU; and what fits, against trying each B."""

import functools
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import nbtrain.model
from nbtrain.batch import Batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import FLOATS, recording
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.modes import donate
from nbtrain.plan import CONTEXT_BYTES, fastest, fits, parse_bytes, parts_of, plan, policies
from nbtrain.train import init, make_eval_step, make_train_step

SMALL = dict(n_layer=5, n_head=2, n_embd=24, block_size=32, vocab_size=300)
COUNTED = (
    "weights", "fp32 master weights", "AdamW moments", "a second set of these", "gradients",
    "fp32 sums of gradients", "activations", "logits, and a block's own pass", "fp32 embedding gradient",
    "batches",
)  # fmt: skip


def batch_of(A, B, T, vocab_size):
    ids = np.random.default_rng(0).integers(0, vocab_size, (A, B, T + 1))
    return Batch.of(ids[..., :-1], ids[..., 1:])


def ran(config, A, B, T, dtype, remat):
    """Bytes by part of a real run's first step; under `recording` as on a GPU, but for the kernels."""
    params, state = init(config, dtype=dtype, device="cpu")
    step, batch = make_train_step(config, TrainConfig(remat=remat)), batch_of(A, B, T, config.vocab_size)
    params, state, _ = donate(step)(params, state, batch)
    parts = parts_of(params, state, step, batch, "donate")
    # Named by nobody but this test: what each part is.
    n, size = params.layout.size, params.dtype.itemsize
    want = dict.fromkeys(COUNTED, 0) | {
        "weights": n * size, "AdamW moments": 8 * n, "gradients": n * size,
        "fp32 master weights": 0 if dtype == "fp32" else 4 * n, "fp32 sums of gradients": 4 * n * (A > 1),
        "batches": 2 * 3 * 4 * A * B * T,
    }  # fmt: skip
    in_scratch = ("activations", "logits, and a block's own pass", "fp32 embedding gradient")
    assert {k: v for k, v in parts.items() if k not in in_scratch} == {
        k: v for k, v in want.items() if k not in in_scratch
    }
    assert sum(parts[name] for name in in_scratch) == step.loss_and_grads.__self__._scratch.bytes
    return parts


@pytest.mark.parametrize("logits_bytes", [1 << 30, 1 << 13], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("remat", ["none", "light", "every:2", "every:3", "full"])
def test_every_part_is_what_a_run_on_the_cpu_takes(remat, dtype, logits_bytes, monkeypatch):
    monkeypatch.setattr(nbtrain.model, "LOGITS_BYTES", logits_bytes)
    for A, B, T, dropout in ((1, 3, 32, 0.0), (2, 5, 31, 0.2)):
        config = GPTConfig(**SMALL, dropout=dropout)
        planned = plan(config, B=B, T=T, micro=A, dtype=dtype, remat=remat, mode="donate", device="cpu")
        taken = ran(config, A, B, T, dtype, remat)
        assert {name: planned.parts[name] for name in COUNTED} == taken
        assert (taken["fp32 sums of gradients"] > 0) == (A > 1)
        assert (taken["fp32 embedding gradient"] > 0) == (logits_bytes < 1 << 30)


@pytest.mark.parametrize("remat", ["none", "light", "every:2", "full"])
def test_every_part_is_what_the_launchers_of_a_gpu_take(remat, monkeypatch):
    """`recording` walks them on NumPy arrays: the forms of a GPU, with real memory and no kernels."""
    monkeypatch.setattr(nbtrain.model, "LOGITS_BYTES", 1 << 13)
    config = GPTConfig(**SMALL)
    planned = plan(config, B=3, micro=2, dtype="fp32", remat=remat, mode="donate", device="hip")
    with recording():
        taken = ran(config, 2, 3, 32, "fp32", remat)
    assert {name: planned.parts[name] for name in COUNTED} == taken
    on_the_cpu = plan(config, B=3, micro=2, dtype="fp32", remat=remat, mode="donate", device="cpu")
    gelu_kept = planned.parts["activations"] >= on_the_cpu.parts["activations"]
    assert gelu_kept == (remat == "none")


def test_evaluation_on_the_cpu_is_counted_whole():
    config = GPTConfig(**SMALL)
    params, _ = init(config, dtype="fp32", device="cpu")
    step = make_eval_step(config)
    step(params, batch_of(1, 4, 32, config.vocab_size))
    model = step.__closure__[[*step.__code__.co_freevars].index("model")].cell_contents
    planned = plan(config, B=4, dtype="fp32", mode="donate", device="cpu").parts["evaluation"]
    assert planned == model._scratch.bytes > 0
    without = plan(config, B=4, dtype="fp32", mode="donate", device="cpu", evaluate=False)
    assert "evaluation" not in without.parts


def test_modes_differ_by_what_they_hold_twice():
    config = GPTConfig.preset("gpt2")
    parts = {m: plan(config, B=4, mode=m, device="cuda").parts for m in ("pure", "donate", "capture")}
    trees = sum(parts["donate"][name] for name in COUNTED[:3])
    assert parts["pure"]["a second set of these"] == trees == 14 * 124_475_904
    assert parts["donate"]["a second set of these"] == parts["capture"]["a second set of these"] == 0
    assert parts["capture"]["batches"] == 1.5 * parts["donate"]["batches"] == 3 * 3 * 4 * 1024 * 4
    # A graph's stream has working memory of its own, and so has the evaluation outside of it.
    assert parts["capture"]["evaluation"] > parts["donate"]["evaluation"]


def test_a_plan_of_gpt2_is_what_an_h200_was_seen_to_take():
    """docs/speed.md, the row of 33f7f3c: 11,668 MB."""
    config = GPTConfig.preset("gpt2")
    planned = plan(config, B=32, dtype="bf16", mode="capture", device="cuda", evaluate=False)
    assert abs(planned.total / 11_668e6 - 1) < 0.05


def test_attention_without_fused_kernels_is_planned_with_its_scores():
    config = GPTConfig.preset("gpt2")
    rest = {
        dtype: plan(config, B=8, dtype=dtype, device="cuda").parts["operators, and the pool's rest"]
        for dtype in ("bf16", "fp32")
    }
    assert rest["fp32"] - rest["bf16"] > 2 * 200e6  # two arrays of at most 256 MB of scores


def test_planning_allocates_next_to_nothing():
    tracemalloc.start()
    planned = plan(GPTConfig.preset("gpt2-xl"), B=512, remat="none", device="cuda")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert planned.total > 1e12 and peak < 50e6


# What fits


@pytest.mark.parametrize("mode", ["donate", "capture"])
def test_the_largest_batch_is_the_one_that_trying_each_finds(mode, monkeypatch):
    monkeypatch.setattr(nbtrain.model, "LOGITS_BYTES", 32 << 20)
    monkeypatch.setattr(sys.modules["nbtrain.plan"], "LOGITS_BYTES", 32 << 20)
    config = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=5000)
    options = dict(mode=mode, device="cuda", dtype="bf16")
    need = functools.cache(lambda B, remat: plan(config, B=B, remat=remat, **options).total)
    for vram in (740_000_000, 760_000_000, 841_234_567):
        for fit in fits(config, vram, **options):
            want = max(B for B in range(1, 120) if need(B, fit.remat) <= vram)
            assert want < 100 and fit.largest.B == want
            assert fit.largest.total == need(want, fit.remat) and fit.smallest.B == 1


def test_the_largest_batch_is_found_where_a_larger_one_takes_less():
    """Where the logits are cut into one chunk more, memory falls."""
    options = dict(mode="donate", device="cuda", dtype="bf16", evaluate=False)
    config = GPTConfig.preset("gpt2")
    need = [plan(config, B=B, remat="full", **options).total for B in range(1, 90)]
    B, (before, after) = next((B, pair) for B, pair in enumerate(zip(need, need[1:], strict=False), 2)
                              if pair[1] < pair[0])  # fmt: skip
    assert after == need[B - 1] < before == need[B - 2]
    vram = (before + after) // 2
    (fit,) = fits(config, vram, remat="full", **options)
    assert fit.largest.B == max(B for B in range(1, 90) if need[B - 1] <= vram) >= B


def test_policies_recompute_more_and_take_less():
    found = fits(GPTConfig.preset("gpt2"), 8_000_000_000, device="cuda")
    assert [fit.remat for fit in found] == policies(12) == ["none", "light", "every:6", "every:3", "full"]
    batch = [fit.largest.B for fit in found]
    assert batch == sorted(batch) and batch[-1] > 2 * batch[0]
    assert [fit.largest.recomputed for fit in found] == [0, 0, 6, 9, 11]
    assert fastest(found).remat == "light"


def test_recomputing_beats_a_tiny_batch():
    config = GPTConfig.preset("gpt2-large")
    need = plan(config, B=1, device="cuda").total
    found = fits(config, need + 100_000_000, device="cuda")
    none, light, *_ = found
    assert none.largest is None and light.largest.B == 1 and fastest(found).remat.startswith("every")


def test_where_nothing_fits_the_smallest_need_is_told():
    found = fits(GPTConfig.preset("gpt2-xl"), 8_000_000_000, device="cuda")
    assert fastest(found) is None and all(fit.largest is None for fit in found)
    assert min(fit.smallest.total for fit in found) > 20e9


@pytest.mark.parametrize("n_layer", [1, 2, 7, 48])
def test_policies_of_any_depth_are_distinct_and_valid(n_layer):
    found = policies(n_layer)
    assert found[0] == "none" and found[-1] == "full" and len(set(found)) == len(found)
    for remat in found:
        TrainConfig(remat=remat)


# What cannot be planned


@pytest.mark.parametrize(
    "text, n_bytes",
    [("8GB", 8e9), ("24GiB", 24 * 2**30), ("80e9", 80e9), ("1.5 gb", 1.5e9), ("512MB", 512e6),
     ("16TiB", 2**44), ("8g", 8e9), ("80000000000", 80e9), ("4000000 b", 4e6)],
)  # fmt: skip
def test_amounts_of_memory(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "8", "GB", "-8GB", "8XB", "8 G B", "1e99GB", "17TiB", "8GBB", "nan", "inf", "0x8GB", "8,5GB"]
)
def test_no_amount_of_memory(text):
    with pytest.raises(InvalidValue, match="as 8GB, 24GiB or 80e9"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(B=0), InvalidValue, "B must be 1 or more"),
        (dict(B=2.0), InvalidType, "B must be an int"),
        (dict(B=True), InvalidType, "B must be an int"),
        (dict(B=1, T=0), InvalidValue, "T must be 1 or more"),
        (dict(B=1, T=1025), InvalidValue, "at most block_size = 1024"),
        (dict(B=1, micro=0), InvalidValue, "micro must be 1 or more"),
        (dict(B=2**21), InvalidValue, "at most 2,147,483,646 tokens"),
        (dict(B=1, remat="some"), InvalidValue, "remat is"),
        (dict(B=1, dtype="int8"), InvalidValue, "dtype must be"),
        (dict(B=1, mode="fast"), InvalidValue, "mode is one of"),
        (dict(B=1, device="tpu"), InvalidValue, "a device is"),
        (dict(B=1, mode="capture", device="cpu"), Unavailable, "capture needs a GPU"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        plan(GPTConfig.preset("gpt2"), **options)


def test_a_configuration_is_asked_for():
    with pytest.raises(InvalidType, match="GPTConfig"):
        plan("gpt2", B=1)
    with pytest.raises(InvalidValue, match="bytes of a card"):
        fits(GPTConfig.preset("gpt2"), 1 << 50)
    with pytest.raises(InvalidType, match="vram must be an int"):
        fits(GPTConfig.preset("gpt2"), 8e9)


def test_a_row_too_long_for_a_kernel_is_refused_as_training_refuses_it():
    with pytest.raises(InvalidValue, match="at most 12000 channels"):
        plan(GPTConfig(n_layer=1, n_head=1, n_embd=16384), B=1, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["donate", "capture"])
def test_a_run_on_this_gpu_takes_what_was_planned(mode):
    options = dict(preset="gpt2", n_layer=4, B=4, remat="every:2", mode=mode, dtype="bf16")
    command = [sys.executable, "-m", "profiling.check_plan", "--child", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    planned = plan(
        GPTConfig.preset("gpt2", n_layer=4), B=4, remat="every:2", mode=mode, dtype="bf16", device="cuda:0"
    )
    assert {name: planned.parts[name] for name in COUNTED} == taken["parts"]
    # Arrays alone: other processes may use the card while this test runs.
    held = planned.total - planned.given_back - CONTEXT_BYTES["cuda"]
    assert abs(held / taken["pool_bytes"] - 1) < 0.05
