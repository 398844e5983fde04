"""The whole model against PyTorch (tests/fixtures), and the properties that every policy and split must
keep."""

import ml_dtypes
import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.config import GPTConfig
from nbtrain.device.philox import Rng
from nbtrain.device.place import to_device, to_host
from nbtrain.errors import InvalidValue
from nbtrain.model import GPT, init_params
from nbtrain.tree import Layout, Tree
from tests.golden import load_golden
from tests.reference import f64

TINY = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=11)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def golden_tree(golden, device="cpu", dtype=np.float32):
    layout = Layout.of(GPTConfig(**golden.config).leaves())
    tree = Tree(layout, np.zeros(layout.size, np.float32))
    for name, leaf in tree:
        leaf[...] = golden.params[name]
    return Tree(layout, to_device(tree.buffer.astype(dtype), device))


def micro_batches(tokens, targets, device="cpu"):
    batch = Batch.of(to_device(np.asarray(tokens), device), to_device(np.asarray(targets), device))
    return [Batch(batch.tokens[a], batch.targets[a], batch.order[a]) for a in range(len(batch.tokens))]


def random_batch(cfg, B, T, seed=0, device="cpu"):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, cfg.vocab_size, (2, B, T))
    return micro_batches(tokens, targets, device)[0]


def scalar(x, device="cpu"):
    return to_device(np.full(1, x, np.float32), device)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_loss_and_every_gradient_match_pytorch(device):
    golden = load_golden()
    params = golden_tree(golden, device)
    model = GPT(GPTConfig(**golden.config))
    tokens, targets = golden.batches[0]
    (batch,) = micro_batches(tokens, targets, device)
    n = int((np.asarray(targets) != golden.ignore_index).sum())

    logits = f64(to_host(model.logits(params, batch.tokens)))
    assert np.abs(logits - golden.logits.reshape(logits.shape)).max() <= 1e-5 * np.abs(golden.logits).max()

    grads = params.like()
    loss_sum = model.loss_and_grads(params, batch, loss_scale=scalar(1 / n, device), out=grads)
    assert float(loss_sum[0]) / n == pytest.approx(float(golden.loss), rel=1e-6)
    for name, grad in grads:
        want = f64(golden.grads[name])
        error = np.abs(f64(to_host(grad)) - want).max()
        assert error <= 1e-5 * np.abs(want).max(), f"{name}: off by {error:.2e} of {np.abs(want).max():.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,limit", [(np.float16, 5e-3), (ml_dtypes.bfloat16, 4e-2)])
def test_16_bit_gradients_stay_near_pytorch(device, dtype, limit):
    """Limits: about four times the rounding of a product of 16-bit numbers, relative to each leaf's norm."""
    golden = load_golden()
    params = golden_tree(golden, device, dtype)
    tokens, targets = golden.batches[0]
    (batch,) = micro_batches(tokens, targets, device)
    n, scale = int((np.asarray(targets) != golden.ignore_index).sum()), 256.0
    grads = params.like()
    model = GPT(GPTConfig(**golden.config))
    loss_sum = model.loss_and_grads(params, batch, loss_scale=scalar(scale / n, device), out=grads)
    assert float(loss_sum[0]) / n == pytest.approx(float(golden.loss), rel=limit)
    whole = np.concatenate([f64(to_host(g)).ravel() / scale for _, g in grads])
    want = np.concatenate([f64(golden.grads[name]).ravel() for name, _ in grads])
    assert np.linalg.norm(whole - want) <= limit * np.linalg.norm(want)


def test_one_parameter_moves_the_loss_as_its_gradient_says():
    """Central differences of the loss along random directions of each kind of leaf."""
    params, _ = init_params(TINY, seed=1)
    rng = np.random.default_rng(0)
    params.buffer[:] += 0.1 * rng.standard_normal(params.buffer.shape).astype(np.float32)
    batch, model, grads = random_batch(TINY, 2, 5), GPT(TINY), params.like()
    model.loss_and_grads(params, batch, loss_scale=scalar(1), out=grads)
    for name in (
        "wte",
        "wpe",
        "blocks.0.qkv_w",
        "blocks.1.fc_b",
        "blocks.2.ln2_w",
        "blocks.0.out_w",
        "lnf_b",
    ):
        direction = rng.standard_normal(params[name].shape).astype(np.float32)
        if name == "wte":
            direction[TINY.vocab_size :] = 0
        h, losses = 2e-3, []
        for sign in (1, -1):
            moved = params.copy()
            moved[name][...] += np.float32(sign * h) * direction
            losses.append(float(model.eval_loss(moved, batch)[0]))
        slope = (losses[0] - losses[1]) / (2 * h)
        assert float((f64(grads[name]) * direction).sum()) == pytest.approx(slope, rel=2e-2, abs=2e-3), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_remat_policy_gives_the_same_bits(device, dtype, dropout):
    cfg = GPTConfig(n_layer=5, n_head=2, n_embd=16, block_size=8, vocab_size=11, dropout=dropout)
    params, _ = init_params(cfg, 0, dtype, device)
    batch = random_batch(cfg, 2, 8, device=device)
    rng = Rng(to_device(np.array([1, 2, 3], np.uint32), device), 4)
    results = []
    for remat in ("none", "light", "every:2", "every:3", "full", "every:9"):
        grads = params.like()
        loss = GPT(cfg, remat).loss_and_grads(params, batch, loss_scale=scalar(1, device), rng=rng, out=grads)
        results.append((float(loss[0]), to_host(grads.buffer)))
    for loss, grads in results[1:]:
        assert loss == results[0][0] and (grads == results[0][1]).all()
    assert np.abs(f64(results[0][1])).max() > 0


def test_dropout_depends_on_the_place_in_the_whole_batch_only():
    """Rows 2 and 3 of one micro-batch of 4 see the masks of a second micro-batch of 2."""
    cfg = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, dropout=0.3)
    params, _ = init_params(cfg, 0)
    batch, key = random_batch(cfg, 4, 8), np.array([1, 2, 3], np.uint32)
    halves = micro_batches(batch.tokens.reshape(2, 2, 8), batch.targets.reshape(2, 2, 8))
    model, whole, parts = GPT(cfg), params.like(), []
    total = model.loss_and_grads(params, batch, loss_scale=scalar(1), rng=Rng(key, 0), out=whole)
    sums = []
    for a, half in enumerate(halves):
        grads = params.like()
        sums.append(
            float(model.loss_and_grads(params, half, loss_scale=scalar(1), rng=Rng(key, 2 * a), out=grads)[0])
        )
        parts.append(f64(grads.buffer))
    assert sum(sums) == pytest.approx(float(total[0]), rel=1e-6)
    assert np.abs(sum(parts) - f64(whole.buffer)).max() <= 1e-5 * np.abs(f64(whole.buffer)).max()


def test_evaluation_equals_the_training_loss_bit_for_bit():
    params, _ = init_params(TINY, 0)
    batch, model = random_batch(TINY, 3, 7), GPT(TINY)
    trained = model.loss_and_grads(params, batch, loss_scale=scalar(1), out=params.like())
    assert model.eval_loss(params, batch)[0] == trained[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_logits_in_chunks_of_rows_give_the_same_gradients(device, dtype, monkeypatch):
    """Chunks add up in fp32 and are rounded once, so 16-bit gradients may differ in the last place."""
    cfg = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=100, vocab_size=11)
    params, _ = init_params(cfg, 0, dtype, device)
    batch, results = random_batch(cfg, 2, 100, device=device), []
    for limit in (1 << 30, 64 * 128 * params.dtype.itemsize):
        monkeypatch.setattr("nbtrain.model.LOGITS_BYTES", limit)
        model, grads = GPT(cfg), params.like()
        loss = model.loss_and_grads(params, batch, loss_scale=scalar(1, device), out=grads)
        assert float(loss[0]) == float(model.eval_loss(params, batch)[0])
        results.append(
            (float(loss[0]), f64(to_host(grads.buffer)), len(model._row_chunks(200, params.dtype)))
        )
    (one, whole, n), (two, parts, m) = results
    assert (n, m) == (1, 4) and one == pytest.approx(two, rel=1e-6)
    limit = 1e-5 if dtype == np.float32 else 2**-7
    assert np.abs(whole - parts).max() <= limit * np.abs(whole).max()


def test_padded_vocabulary_gets_no_gradient_and_changes_nothing():
    params, _ = init_params(TINY, 0)
    batch, model = random_batch(TINY, 2, 8), GPT(TINY)
    grads = params.like()
    first = model.loss_and_grads(params, batch, loss_scale=scalar(1), out=grads)
    assert (grads["wte"][TINY.vocab_size :] == 0).all()
    params["wte"][TINY.vocab_size :] = 50.0
    assert model.eval_loss(params, batch)[0] == first[0]


def test_gpt2_has_its_124_475_904_parameters():
    layout = Layout.of(GPTConfig.preset("gpt2").leaves())
    assert layout.n_params == 124_475_904
    assert sum(leaf.name == "wte" for leaf in layout.leaves) == 1


def test_initial_values_are_gpt2s_for_every_dtype():
    cfg = GPTConfig(n_layer=8, n_head=2, n_embd=64, block_size=16, vocab_size=100)
    params, master = init_params(cfg, seed=3)
    assert params is master
    assert float(params["wte"][:100].std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["blocks.2.proj_w"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert (params["blocks.0.ln1_w"] == 1).all() and (params["blocks.0.qkv_b"] == 0).all()
    half, same = init_params(cfg, seed=3, dtype=np.float16)
    assert (same.buffer == master.buffer).all() and (half.buffer == master.buffer.astype(np.float16)).all()


def test_dropout_without_randomness_is_an_error():
    cfg = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=5, dropout=0.1)
    params, _ = init_params(cfg)
    with pytest.raises(InvalidValue, match="rng"):
        GPT(cfg).loss_and_grads(params, random_batch(cfg, 1, 4), loss_scale=scalar(1), out=params.like())
