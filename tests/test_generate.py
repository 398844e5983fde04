import ml_dtypes
import numpy as np
import pytest

from nbtrain.config import GPTConfig
from nbtrain.decode import Decoder
from nbtrain.device.download import Download
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.generate import generate, generate_stream
from nbtrain.model import GPT, init_params
from nbtrain.train import init_opt_state
from tests.helpers import EPS

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=10, vocab_size=11)


def _params(config=CONFIG, seed=0):
    """Weights far from their initial values, so that each token makes a difference."""
    params, _ = init_params(config, seed)
    params.buffer[...] *= 20
    return params


def _windows(n_prompt, n, block_size):
    """How many of its last tokens the model sees for each new token."""
    held = min(n_prompt, block_size)
    for _ in range(n):
        yield held
        held = held + 1 if held < block_size else max(1, block_size // 2)


def _greedy(params, ids, n, config=CONFIG):
    """The loop without any of generate's means: one row, no cache, each window as a whole.

    Logits of the largest two must differ by more than rounding, or the two ways may differ."""
    model, ids = GPT(config), list(ids)
    for held in _windows(len(ids), n, config.block_size):
        window = np.array([ids[-held:]], np.int32)
        logits = np.array(model.logits(params, window)[0, -1])
        assert np.diff(np.sort(logits)[-2:]) > 1e-3, "two logits are too near: take another seed"
        ids.append(int(logits.argmax()))
    return ids


def test_temperature_0_takes_the_likeliest_token_of_the_window():
    params = _params()
    prompt = [3, 7, 1]
    got = generate(params, CONFIG, prompt, max_new_tokens=25, temperature=0)
    assert got.dtype == np.int32 and got.tolist() == _greedy(params, prompt, 25)
    assert len(set(got[3:].tolist())) > 2, "a constant would satisfy this test too"


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_smallest_windows(block_size):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=block_size, vocab_size=11)
    params = _params(config)
    got = generate(params, config, [3, 7], max_new_tokens=7, temperature=0)
    assert got.tolist() == _greedy(params, [3, 7], 7, config)


def test_prompts_of_several_lengths_are_written_side_by_side():
    """One of them is longer than the window, one as long, and they are full at different times."""
    params = _params()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 11, n) for n in (1, 13, 10, 4, 9)]
    got = generate(params, CONFIG, prompts, max_new_tokens=14, temperature=0)
    for text, prompt in zip(got, prompts, strict=True):
        assert text.tolist() == _greedy(params, prompt.tolist(), 14)


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


def test_prefilling_in_parts_changes_nothing(monkeypatch):
    params = _params()
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 1, 2, 3]]
    want = generate(params, CONFIG, prompts, max_new_tokens=3, temperature=0)
    monkeypatch.setattr("nbtrain.decode.PREFILL_TOKENS", 4)
    monkeypatch.setattr("nbtrain.decode.PREFILL_STEP", 1)
    got = generate(params, CONFIG, prompts, max_new_tokens=3, temperature=0)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


def test_a_row_draws_the_same_whatever_the_other_prompts_are():
    params = _params()
    alone = generate(params, CONFIG, [4, 2], max_new_tokens=12, seed=9, temperature=2.0)
    among = generate(params, CONFIG, [[4, 2], [1, 0], [3, 3]], max_new_tokens=12, seed=9, temperature=2.0)
    assert (among[0] == alone).all() and (among[1, 2:] != among[0, 2:]).any()


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


def test_a_row_that_has_ended_stays_ended_and_changes_no_other():
    """The result is as long as the last row to end, and goes on past the window."""
    params, prompts = _params(), [[3, 7], [1, 1], [9, 0], [5, 5]]
    whole = generate(params, CONFIG, prompts, max_new_tokens=40, seed=1, temperature=1.5)[:, 2:]
    stop = 10
    ends = [row.tolist().index(stop) for row in whole]  # each of them has one
    assert len(set(ends)) == 4 and min(ends) < 8 and 3 * CONFIG.block_size < max(ends) < 39
    got = generate(params, CONFIG, prompts, max_new_tokens=40, seed=1, temperature=1.5, stop=stop)[:, 2:]
    assert got.shape == (4, max(ends) + 1)
    for row, want, end in zip(got, whole, ends, strict=True):
        assert row[: end + 1].tolist() == want[: end + 1].tolist() and (row[end:] == stop).all()
    short = generate(params, CONFIG, prompts, max_new_tokens=3, seed=1, temperature=1.5, stop=stop)
    assert (short[:, 2:] == got[:, :3]).all()


def test_one_text_ends_with_stop():
    params, config = _params(), GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=4, vocab_size=11)
    whole = generate(params, CONFIG, [4, 2], max_new_tokens=12, seed=1)[2:].tolist()
    stop = next(token for token in whole[2:] if token not in whole[:2])
    stream = generate_stream(params, CONFIG, [4, 2], max_new_tokens=12, seed=1, stop=stop)
    assert [int(token) for token in stream] == whole[: whole.index(stop) + 1]
    assert len(generate(_params(config), config, [1], max_new_tokens=9, stop=None)) == 10


def test_what_an_ended_row_draws_does_not_matter():
    """A model that is lost from position 5 on, which only a row that has ended comes to."""
    params, prompts = _params(), [[5, 5, 8, 10, 0], [0]]
    want = generate(params, CONFIG, prompts, max_new_tokens=4, temperature=0)
    stop = int(want[0][5])
    assert stop not in want[1]
    params["wpe"][5:] = np.nan
    got = generate(params, CONFIG, prompts, max_new_tokens=4, temperature=0, stop=stop)
    assert got[0].tolist() == prompts[0] + [stop] * 4 and got[1].tolist() == want[1].tolist()
    with pytest.raises(InvalidValue, match="logit of token 0 is nan"):
        generate(params, CONFIG, prompts, max_new_tokens=4, temperature=0)


def test_no_new_tokens_is_the_prompt():
    assert generate(_params(), CONFIG, [4, 2], max_new_tokens=0).tolist() == [4, 2]
    assert generate(_params(), CONFIG, [[4, 2]], max_new_tokens=0).tolist() == [[4, 2]]


def test_padded_vocabulary_is_never_drawn():
    params = _params()
    params["wte"][CONFIG.vocab_size :] = 1e3  # whatever is there
    got = generate(params, CONFIG, np.zeros((8, 1), int), max_new_tokens=8, temperature=100.0)
    assert got.max() < CONFIG.vocab_size and len(set(got.ravel().tolist())) == CONFIG.vocab_size


def test_a_lost_model_raises_instead_of_writing():
    params = _params()
    params["lnf_w"][...] = np.nan
    with pytest.raises(InvalidValue, match="weights are not finite"):
        generate(params, CONFIG, [1], max_new_tokens=1)


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        ([], {}, InvalidValue, r"at least one token each; got shape \(0,\)"),
        ([[[1]]], {}, InvalidValue, r"got shape \(1, 1, 1\)"),
        ([[1], [1, 2, 11]], {}, InvalidValue, r"prompt_ids\[1\]\[2\] is 11"),
        ([[1, 2], []], {}, InvalidValue, r"prompt_ids\[1\] must have at least one token"),
        ([[1], [0.5, 1.0]], {}, InvalidType, r"prompt_ids\[1\] must be integers"),
        ([1.0], {}, InvalidType, "integers; got float64"),
        ("ROMEO", {}, InvalidValue, "got shape"),
        ([1, 11], {}, InvalidValue, r"prompt_ids\[1\] is 11, outside the vocabulary 0..10"),
        ([[1], [-1]], {}, InvalidValue, r"prompt_ids\[1, 0\] is -1"),
        ([[1, 2], None], {}, InvalidType, "prompt_ids must be ids .* they make no array: .* list of ints"),
        ([1, [2]], {}, InvalidType, "they make no array"),
        ([[1], [2, [3]]], {}, InvalidType, "they make no array"),
        ([1], dict(max_new_tokens=-1), InvalidValue, "max_new_tokens"),
        ([1], dict(max_new_tokens=1.5), InvalidValue, "max_new_tokens"),
        ([1], dict(max_new_tokens=np.float32(1)), InvalidValue, "max_new_tokens"),
        ([1], dict(max_new_tokens="1"), InvalidValue, "max_new_tokens"),
        ([1], dict(temperature="a"), InvalidValue, "temperature must be a number, 0 or more; got 'a'"),
        ([1], dict(temperature=-0.1), InvalidValue, "temperature"),
        ([1], dict(temperature=np.nan), InvalidValue, "temperature"),
        ([1], dict(top_k=0), InvalidValue, "top_k"),
        ([1], dict(top_p=0.0), InvalidValue, "top_p"),
        ([1], dict(top_p=1.1), InvalidValue, "top_p"),
        ([1], dict(seed=-1), InvalidValue, "seed"),
        ([1], dict(seed=None), InvalidValue, "seed"),
        ([1], dict(stop="a"), InvalidValue, "stop"),
        ([1], dict(decoder=5), InvalidType, r"a Decoder or None; got int.*Decoder\(params, config, 1, 2\)"),
        ([1], dict(stop=11), InvalidValue, "stop must be an id, an int in 0 … 10"),
        ([1], dict(stop=True), InvalidValue, "stop"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_token(prompt, options, error, message):
    with pytest.raises(error, match=message):
        generate_stream(_params(), CONFIG, prompt, **{"max_new_tokens": 1, **options})


def test_an_array_that_does_not_come_to_the_host_is_refused():
    class OnGpu(list):  # as CuPy's arrays do
        def __array__(self, *args, **options):
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    with pytest.raises(InvalidType, match="ids of the host.*Implicit conversion .* not allowed. Give"):
        generate(_params(), CONFIG, OnGpu([1, 2]), max_new_tokens=1)


def test_params_that_are_none_are_named():
    """With a decoder and without; an OptState has the weights in it, but is no Tree of them."""
    params = _params()
    for decoder in (None, Decoder(params, CONFIG, 1)):
        for wrong in (init_opt_state(params), None, dict(params)):
            with pytest.raises(
                InvalidType, match=f"params must be a Tree, .*; got {type(wrong).__name__}\\."
            ):
                generate(wrong, CONFIG, [1], max_new_tokens=1, decoder=decoder)


def test_numbers_of_numpy_are_those_of_python():
    params = _params()
    options = dict(max_new_tokens=12, seed=3, stop=10, top_k=7, temperature=0.5, top_p=0.75)
    want = generate(params, CONFIG, [[4, 2], [1, 1]], **options)
    kinds = np.uint8, np.uint64, np.int64, np.int8, np.float16, np.float32
    of_numpy = {name: kind(x) for kind, (name, x) in zip(kinds, options.items(), strict=True)}
    assert np.array_equal(generate(params, CONFIG, [[4, 2], [1, 1]], **of_numpy), want)


def test_the_config_of_another_model_is_refused():
    other = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=10, vocab_size=11)
    with pytest.raises(InvalidValue, match="another layout"):
        generate(_params(), other, [1], max_new_tokens=1)


@pytest.mark.parametrize("make", [generate, generate_stream])
def test_a_config_that_is_none_is_named(make):
    params = _params()
    for args, got in (
        ((params, [1]), "list"),
        ((params, None, [1]), "NoneType"),
        ((params, {}, [1]), "dict"),
    ):
        with pytest.raises(
            InvalidType, match=f"config a GPTConfig; got {got} in its place. Pass the one that"
        ):
            make(*args, max_new_tokens=1)
    with pytest.raises(InvalidValue, match=r"prompt_ids must be .*; got shape \(\)"):
        make(params, CONFIG, max_new_tokens=1)


# The decoder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_logits_are_those_of_the_whole_forward_pass(dtype):
    """16-bit weights are widened on the CPU, where the whole pass rounds every activation to 16 bits: two
    layers and the vocabulary product leave a few eps of the largest logit."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=50)
    master, _ = init_params(config, 3)
    params = type(master)(master.layout, (master.buffer * 3).astype(dtype))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 20)).astype(np.int32)
    want = np.array(GPT(config).logits(params, tokens)).astype(np.float64)
    decoder = Decoder(params, config, 2)
    decoder.start([0, 1], [tokens[0, :1], tokens[1, :7]])
    at, limit = np.array([0, 6]), 16 * EPS[np.dtype(dtype)] * np.abs(want).max()
    for _ in range(12):
        decoder.tokens[...] = tokens[[0, 1], at]
        got = np.array(decoder.step())[:, :50]
        assert np.abs(got - want[[0, 1], at]).max() < limit
        at += 1
    assert decoder.lengths.tolist() == at.tolist()


def test_a_decoder_serves_call_after_call():
    params = _params()
    decoder = Decoder(params, CONFIG, 2)
    prompts = [[4, 2, 9], [1, 0, 5]]
    for prompt in (prompts, prompts[::-1], prompts):
        got = generate(params, CONFIG, prompt, max_new_tokens=12, temperature=0, decoder=decoder)
        assert (got == generate(params, CONFIG, prompt, max_new_tokens=12, temperature=0)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_decoder_follows_training_that_writes_over_its_weights(dtype):
    """As donated and captured steps do: the memory stays, the caller's tree is consumed."""
    master, other = _params(), _params(seed=1)
    params = type(master)(master.layout, master.buffer.astype(dtype))
    decoder = Decoder(params, CONFIG, 1)
    prompt, options = [4, 2, 9], dict(max_new_tokens=12, temperature=0)
    before = generate(params, CONFIG, prompt, decoder=decoder, **options)
    trained = params.consume()
    trained.buffer[...] = other.buffer.astype(dtype)
    got = generate(trained, CONFIG, prompt, decoder=decoder, **options)
    assert (got == generate(trained, CONFIG, prompt, **options)).all() and (got != before).any()


def test_a_decoder_that_does_not_fit_is_refused():
    params, other = _params(), _params(seed=1)
    with pytest.raises(InvalidValue, match="other params"):
        generate(params, CONFIG, [1], max_new_tokens=1, decoder=Decoder(other, CONFIG, 1))
    with pytest.raises(InvalidValue, match="2 sequences of 10 tokens; this call needs 1 of 4"):
        generate(params, CONFIG, [1, 2, 3], max_new_tokens=1, decoder=Decoder(params, CONFIG, 2))
    with pytest.raises(InvalidValue, match="1 sequences of 3 tokens; this call needs 1 of 4"):
        generate(params, CONFIG, [1, 2, 3], max_new_tokens=1, decoder=Decoder(params, CONFIG, 1, 3))
    with pytest.raises(InvalidValue, match="length must be an int in 1 … 10; got 11"):
        Decoder(params, CONFIG, 1, 11)


def test_a_full_cache_is_refused():
    decoder = Decoder(_params(), CONFIG, 1, 2)
    decoder.start([0], [np.array([1, 2], np.int32)])
    decoder.step()
    with pytest.raises(InvalidValue, match="all 2 tokens that the cache holds"):
        decoder.step()
    with pytest.raises(InvalidValue, match="1 … 2 tokens; got 3 for row 0"):
        decoder.start([0], [np.array([1, 2, 3], np.int32)])


# The copy of the tokens


def test_a_copy_that_nobody_waited_for_is_over_before_its_memory_is_given_back():
    class Event:
        waited = 0

        def synchronize(self):
            self.waited += 1

    for wait in (False, True):
        download, event = Download(np.arange(3)), Event()
        download._event = event  # as on a GPU
        if wait:
            assert download.wait().tolist() == [0, 1, 2]
        del download
        assert event.waited == 1
