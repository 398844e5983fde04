"""The references of tests/reference.py against PyTorch's answers: two oracles that share no code."""

import numpy as np
import pytest

from tests import reference as ref
from tests.golden import load_golden


def gpt_logits(params, tokens, n_layer, n_head, vocab_size):
    """(B, T, vocab_size) in float64, from the references alone."""
    x = ref.embedding(tokens, params["wte"], params["wpe"])
    for i in range(n_layer):
        p = {name.split(".")[-1]: a for name, a in params.items() if name.startswith(f"blocks.{i}.")}
        h = ref.layernorm(x, p["ln1_w"], p["ln1_b"])
        h = ref.attention(ref.linear(h, p["qkv_w"], p["qkv_b"]), n_head)
        x = x + ref.linear(h, p["proj_w"], p["proj_b"])
        h = ref.layernorm(x, p["ln2_w"], p["ln2_b"])
        x = x + ref.linear(ref.gelu(ref.linear(h, p["fc_w"]), p["fc_b"]), p["out_w"], p["out_b"])
    x = ref.layernorm(x, params["lnf_w"], params["lnf_b"])
    return ref.linear(x, params["wte"][:vocab_size].T)


def gpt_loss(golden, params, batch):
    tokens, targets = batch
    c = golden.config
    logits = gpt_logits(params, tokens[0], c["n_layer"], c["n_head"], c["vocab_size"])
    losses = ref.cross_entropy(logits.reshape(-1, c["vocab_size"]), targets.reshape(-1))
    return logits, losses.sum() / np.sum(targets != golden.ignore_index)


def test_references_compute_what_pytorch_computes():
    golden = load_golden()
    logits, loss = gpt_loss(golden, golden.params, golden.batches[0])
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=1e-6)  # stored as fp32
    assert loss == pytest.approx(golden.loss, rel=1e-12)


def test_stored_gradients_give_pytorchs_second_loss():
    """The norm of the gradients, clipping, AdamW and decay, all from the references."""
    golden = load_golden()
    norm = ref.global_norm(golden.grads.values())
    assert norm == pytest.approx(golden.norms[0], rel=1e-7)
    factor = min(1, golden.optimizer["clip"] / (norm + 1e-6))
    options = {name: golden.optimizer[name] for name in ("betas", "eps", "weight_decay")}
    params = {
        name: ref.adamw(p, factor * g, 0 * p, 0 * p, 1, lr=golden.lrs[0], decay=p.ndim >= 2, **options)[0]
        for (name, p), g in zip(golden.params.items(), golden.grads.values(), strict=True)
    }
    _, loss = gpt_loss(golden, params, golden.batches[1])
    assert loss == pytest.approx(golden.losses[1], rel=1e-7)


def test_padding_is_zero_and_stays_out_of_the_gradient():
    golden = load_golden()
    V = golden.config["vocab_size"]
    assert len(golden.params["wte"]) == golden.padded_vocab > V
    assert not golden.params["wte"][V:].any() and not golden.grads["wte"][V:].any()
