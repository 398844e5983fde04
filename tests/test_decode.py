import numpy as np
import pytest

from nbtrain import decode
from nbtrain.config import GPTConfig
from nbtrain.decode import Decoder
from nbtrain.errors import Unavailable
from nbtrain.model import init_params

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=10, vocab_size=11)


def take_too_much(*args, **options):
    return np.empty(1 << 50, np.uint8)  # more than a process can address


def test_a_cache_without_enough_memory_says_what_to_do():
    config = GPTConfig(n_layer=64, n_head=1, n_embd=64, block_size=1 << 13, vocab_size=11)
    params, _ = init_params(config)
    with pytest.raises(
        Unavailable, match="decoding takes more memory than is free: .*128. TiB.* fewer sequences"
    ):
        Decoder(params, config, batch_size=1 << 20)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_decoder_that_lacked_memory_for_a_moment_goes_on(monkeypatch, dtype):
    params, _ = init_params(CONFIG, dtype=np.dtype(dtype))
    decoder, other = Decoder(params, CONFIG, 2), Decoder(params, CONFIG, 2)
    ids = [np.array([3, 7, 1], np.int32), np.array([5, 2], np.int32)]
    other.start([0, 1], ids)
    want = other.step().copy()
    with monkeypatch.context() as patch:
        patch.setattr(decode, "embedding_forward", take_too_much)
        with pytest.raises(Unavailable, match="decoding takes more memory"):
            decoder.start([0, 1], ids)
    decoder.start([0, 1], ids)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "matmul", take_too_much)
        with pytest.raises(Unavailable, match="decoding takes more memory"):
            decoder.step()
    assert decoder.lengths.tolist() == [2, 1]
    assert np.array_equal(decoder.step(), want)
