import importlib

import numpy as np
import pytest

from nbtrain.config import GPTConfig
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.generate import choose, generate, generate_stream
from nbtrain.model import GPT, init_params

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=10, vocab_size=11)


def _params(config=CONFIG, seed=0):
    """Weights far from their initial values, so that each token makes a difference."""
    params, _ = init_params(config, seed)
    params.buffer[...] *= 20
    return params


def _greedy(params, ids, n):
    """The loop without any of generate's means: one row, no padding."""
    model, ids = GPT(CONFIG), list(ids)
    for _ in range(n):
        window = np.array([ids[-CONFIG.block_size :]], np.int32)
        ids.append(int(np.array(model.logits(params, window)[0, -1]).argmax()))
    return ids


def test_temperature_0_takes_the_likeliest_token_of_the_growing_window():
    params = _params()
    prompt = [3, 7, 1]
    got = generate(params, CONFIG, prompt, max_new_tokens=15, temperature=0)
    assert got.dtype == np.int32 and got.tolist() == _greedy(params, prompt, 15)
    assert len(set(got[3:].tolist())) > 2, "a constant would satisfy this test too"


def test_rows_of_a_batch_do_not_see_each_other():
    params = _params()
    prompts = np.array([[3, 7], [1, 1], [9, 0]])
    got = generate(params, CONFIG, prompts, max_new_tokens=6, temperature=0)
    assert got.shape == (3, 8)
    for row, prompt in zip(got, prompts, strict=True):
        assert row.tolist() == _greedy(params, prompt, 6)


def test_only_the_last_block_size_tokens_count():
    params = _params()
    prompt = np.random.default_rng(0).integers(0, 11, 25)
    long = generate(params, CONFIG, prompt, max_new_tokens=5, seed=3)
    short = generate(params, CONFIG, prompt[-CONFIG.block_size :], max_new_tokens=5, seed=3)
    assert (long[:25] == prompt).all() and (long[25:] == short[CONFIG.block_size :]).all()


def test_the_padding_of_windows_is_never_seen(monkeypatch):
    params = _params()
    padded = generate(params, CONFIG, [5], max_new_tokens=12, temperature=0)
    module = importlib.import_module("nbtrain.generate")  # nbtrain.generate is the function
    monkeypatch.setattr(module, "WINDOW_STEP", 1)
    assert (generate(params, CONFIG, [5], max_new_tokens=12, temperature=0) == padded).all()


def test_a_seed_gives_its_tokens_again_and_another_seed_others():
    params, _ = init_params(CONFIG)
    a, b, c = (generate(params, CONFIG, [[1], [2]], max_new_tokens=20, seed=seed) for seed in (5, 5, 6))
    assert (a == b).all() and (a != c).any() and (a[0, 1:] != a[1, 1:]).any()


def test_the_stream_yields_the_tokens_that_generate_returns():
    params = _params()
    stream = generate_stream(params, CONFIG, [4, 2], max_new_tokens=5, seed=1, top_k=4)
    assert [int(token) for token in stream] == list(
        generate(params, CONFIG, [4, 2], max_new_tokens=5, seed=1, top_k=4)[2:]
    )
    rows = list(generate_stream(params, CONFIG, [[4], [2]], max_new_tokens=3))
    assert [row.shape for row in rows] == [(2,)] * 3


def test_no_new_tokens_is_the_prompt():
    assert generate(_params(), CONFIG, [4, 2], max_new_tokens=0).tolist() == [4, 2]
    assert generate(_params(), CONFIG, [[4, 2]], max_new_tokens=0).tolist() == [[4, 2]]


def test_padded_vocabulary_is_never_drawn():
    params = _params()
    params["wte"][CONFIG.vocab_size :] = 1e3  # whatever is there
    got = generate(params, CONFIG, np.zeros((8, 1), int), max_new_tokens=8, temperature=100.0)
    assert got.max() < CONFIG.vocab_size and len(set(got.ravel().tolist())) == CONFIG.vocab_size


# One draw


def _shares(logits, **options):
    """The share of each token over a fine grid of uniform numbers."""
    grid = (np.arange(2_000) + 0.5) / 2_000
    drawn = [choose(np.asarray(logits, np.float64), u, **options) for u in grid]
    return np.bincount(drawn, minlength=len(logits)) / len(grid)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_with_the_probabilities_of_softmax(temperature):
    logits = np.array([0.3, -1.0, 2.0, 1.9, -50.0])
    want = np.exp(logits / temperature)
    assert np.abs(_shares(logits, temperature=temperature) - want / want.sum()).max() < 1e-3


def test_top_k_draws_from_exactly_k_tokens_equal_logits_included():
    shares = _shares([1.0, 2.0, 2.0, 2.0, 0.0], temperature=1.0, top_k=2)
    assert np.abs(shares - [0, 0.5, 0.5, 0, 0]).max() < 1e-3
    assert _shares([1.0, 2.0, 2.0], temperature=1.0, top_k=1).tolist() == [0, 1, 0]
    assert (_shares([1.0, 2.0], temperature=1.0, top_k=9) == _shares([1.0, 2.0], temperature=1.0)).all()


def test_top_p_draws_from_the_fewest_tokens_that_reach_p():
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    for p, kept in ((0.3, [1]), (0.5001, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        shares = _shares(logits, temperature=1.0, top_p=p)
        want = np.where(np.isin(np.arange(4), kept), np.exp(logits), 0)
        assert np.abs(shares - want / want.sum()).max() < 2e-3, p


def test_extreme_temperatures_stay_finite():
    assert _shares([1.0, 1.001, -1e30], temperature=1e-30).tolist() == [0, 1, 0]
    assert np.abs(_shares([5.0, -5.0], temperature=1e30) - 0.5).max() < 1e-3
    assert choose(np.array([0.0, 1.0]), 1 - 2**-53, 1.0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_named(value, temperature):
    with pytest.raises(InvalidValue, match=f"logit of token 2 is {value}"):
        choose(np.array([0, 1, value, 3]), 0.5, temperature)


def test_a_lost_model_raises_instead_of_writing():
    params = _params()
    params["lnf_w"][...] = np.nan
    with pytest.raises(InvalidValue, match="weights are not finite"):
        generate(params, CONFIG, [1], max_new_tokens=1)


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        ([], {}, InvalidValue, r"at least one token; got shape \(0,\)"),
        ([[[1]]], {}, InvalidValue, r"got shape \(1, 1, 1\)"),
        ([1.0], {}, InvalidType, "integers; got float64"),
        ("ROMEO", {}, InvalidValue, "got shape"),
        ([1, 11], {}, InvalidValue, r"prompt_ids\[1\] is 11, outside the vocabulary 0..10"),
        ([[1], [-1]], {}, InvalidValue, r"prompt_ids\[1, 0\] is -1"),
        ([1], dict(max_new_tokens=-1), InvalidValue, "max_new_tokens"),
        ([1], dict(max_new_tokens=1.5), InvalidValue, "max_new_tokens"),
        ([1], dict(temperature=-0.1), InvalidValue, "temperature"),
        ([1], dict(temperature=np.nan), InvalidValue, "temperature"),
        ([1], dict(top_k=0), InvalidValue, "top_k"),
        ([1], dict(top_p=0.0), InvalidValue, "top_p"),
        ([1], dict(top_p=1.1), InvalidValue, "top_p"),
        ([1], dict(seed=-1), InvalidValue, "seed"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_token(prompt, options, error, message):
    with pytest.raises(error, match=message):
        generate_stream(_params(), CONFIG, prompt, **{"max_new_tokens": 1, **options})


def test_the_config_of_another_model_is_refused():
    other = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=10, vocab_size=11)
    with pytest.raises(InvalidValue, match="another layout"):
        generate(_params(), other, [1], max_new_tokens=1)
