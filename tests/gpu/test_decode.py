"""Decoding on a GPU: the captured step against the whole forward pass at GPT-2's size, and the CPU."""

import ml_dtypes
import numpy as np
import pytest

from nbtrain.config import GPTConfig
from nbtrain.decode import Decoder
from nbtrain.device.place import to_device, to_host
from nbtrain.errors import InvalidValue
from nbtrain.generate import generate, generate_stream
from nbtrain.model import GPT, init_params
from nbtrain.tree import Tree
from tests.helpers import EPS

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=300)


def on_gpu(params):
    return Tree(params.layout, to_device(params.buffer, "cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_logits_are_those_of_the_whole_forward_pass(dtype):
    """Twelve layers of 16-bit activations, rounded in two orders: their errors add up like a random walk.

    In fp32 what is rounded is every sum, of up to 3,072 terms and in another order for another shape of the
    product, not its result alone: with sums one term after the other and with a BLAS's these logits differ
    by 54 eps of the largest, and from float64's by 55 and 33.
    """
    config = GPTConfig.preset("gpt2")
    master, _ = init_params(config)
    params = on_gpu(Tree(master.layout, (master.buffer * 2).astype(dtype)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 300)).astype(np.int32)
    want = GPT(config).logits(params, to_device(tokens, "cuda:0"))
    at = np.array([0, 130, 289])
    scale = 128 if dtype is np.float32 else 16
    decoder = Decoder(params, config, 3)
    decoder.start(range(3), [tokens[b, : n + 1] for b, n in enumerate(at)])
    for _ in range(10):
        decoder.tokens[...] = to_device(tokens[range(3), at], "cuda:0")
        got = to_host(decoder.step()).astype(np.float64)[:, : config.vocab_size]
        expected = np.stack([to_host(want[b, n]) for b, n in enumerate(at)]).astype(np.float64)
        assert np.abs(got - expected).max() < scale * EPS[np.dtype(dtype)] * np.abs(expected).max()
        at = at + 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [dict(temperature=0), dict(top_k=20, top_p=0.9, temperature=1.2)], ids=str
)
def test_texts_are_those_of_the_cpu(options):
    """In fp32, longer than the window, prompts of several lengths; large weights, so that no two logits are
    near each other."""
    params, _ = init_params(SMALL)
    params.buffer[...] *= 10
    prompts = [[1, 2, 3], [250] * 40, [7]]
    want = generate(params, SMALL, prompts, max_new_tokens=50, **options)
    got = generate(on_gpu(params), SMALL, prompts, max_new_tokens=50, **options)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_decoder_repeats_its_tokens(dtype):
    master, _ = init_params(SMALL)
    params = on_gpu(Tree(master.layout, (master.buffer * 5).astype(dtype)))
    decoder = Decoder(params, SMALL, 2)
    first, second = (
        generate(params, SMALL, [[1, 2], [3, 4]], max_new_tokens=60, seed=4, decoder=decoder)
        for _ in range(2)
    )
    assert (first == second).all() and len(set(first[0].tolist())) > 10


@pytest.mark.gpu
def test_a_lost_model_raises_and_the_device_goes_on():
    params, _ = init_params(SMALL)
    good = on_gpu(params)
    params["lnf_w"][...] = np.nan
    with pytest.raises(InvalidValue, match="the logit of token 0 is nan"):
        list(generate_stream(on_gpu(params), SMALL, [1, 2], max_new_tokens=5))
    assert len(generate(good, SMALL, [1, 2], max_new_tokens=5)) == 7


@pytest.mark.gpu
def test_a_row_that_was_never_begun_is_empty():
    """Capturing the step runs it, and must not leave a token behind."""
    params, _ = init_params(SMALL)
    params.buffer[...] *= 10
    logits = []
    for tree in (params, on_gpu(params)):
        decoder = Decoder(tree, SMALL, 2)
        decoder.start([0], [np.array([3, 7, 1], np.int32)])
        decoder.tokens[1] = 5
        logits.append([to_host(decoder.step()).copy() for _ in range(2)])
    want, got = np.array(logits)
    assert np.abs(got - want).max() < 128 * EPS[np.dtype(np.float32)] * np.abs(want).max()


@pytest.mark.gpu
def test_the_graph_follows_training_that_writes_over_its_weights():
    params, _ = init_params(SMALL)
    params.buffer[...] *= 10
    params = on_gpu(params)
    decoder, options = Decoder(params, SMALL, 1), dict(max_new_tokens=40, temperature=0)
    before = generate(params, SMALL, [4, 2, 9], decoder=decoder, **options)
    trained = params.consume()
    trained.buffer[...] *= np.float32(-0.5)
    got = generate(trained, SMALL, [4, 2, 9], decoder=decoder, **options)
    assert (got == generate(trained, SMALL, [4, 2, 9], **options)).all() and (got != before).any()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_rows_end_with_stop_as_on_the_cpu(seed):
    """The step behind the last token has been launched by then, and is dropped."""
    params, _ = init_params(SMALL)
    params.buffer[...] *= 10
    prompts = [[1, 2, 3], [250] * 40, [7]]
    options: dict = dict(max_new_tokens=60, seed=seed, temperature=1.2)
    stop = int(generate(params, SMALL, prompts, **options)[0][20])
    want, got = (generate(tree, SMALL, prompts, stop=stop, **options) for tree in (params, on_gpu(params)))
    assert [x.tolist() for x in got] == [x.tolist() for x in want]
