import dataclasses
import json

import numpy as np
import pytest

from nbtrain.config import PRESETS, GPTConfig, TrainConfig, from_dict
from nbtrain.errors import InvalidType, InvalidValue


def test_presets_are_valid_and_padded_to_128():
    for name in PRESETS:
        config = GPTConfig.preset(name)
        assert config.padded_vocab_size % 128 == 0 and 0 <= config.padded_vocab_size - config.vocab_size < 128
    assert GPTConfig.preset("gpt2").padded_vocab_size == 50304
    assert GPTConfig.preset("gpt2", n_layer=2).n_layer == 2


@pytest.mark.parametrize(
    "kind,options,error,message",
    [
        (GPTConfig, dict(n_embd=100, n_head=12), InvalidValue, "n_embd=96"),
        (GPTConfig, dict(n_layer=0), InvalidValue, "n_layer must be in 1"),
        (GPTConfig, dict(n_layer=2.0), InvalidType, "n_layer must be an int"),
        (GPTConfig, dict(n_layer=True), InvalidType, "n_layer must be an int; got True"),
        (GPTConfig, dict(n_layer=np.bool_(True)), InvalidType, "n_layer must be an int"),
        (GPTConfig, dict(n_layer=np.float32(2)), InvalidType, "n_layer must be an int"),
        (GPTConfig, dict(dropout=1.0), InvalidValue, r"dropout must be in \[0.0, 1.0\)"),
        (GPTConfig, dict(vocab_size=10**9), InvalidValue, "vocab_size"),
        (TrainConfig, dict(lr=-1), InvalidValue, "lr"),
        (TrainConfig, dict(lr=float("nan")), InvalidValue, "lr"),
        (TrainConfig, dict(lr=np.float16("inf")), InvalidValue, "lr"),
        (TrainConfig, dict(lr=True), InvalidType, "lr must be a number; got True"),
        (TrainConfig, dict(lr="1e-3"), InvalidType, "lr must be a number; got '1e-3'"),
        (TrainConfig, dict(betas=(0.9, 1.0)), InvalidValue, "betas"),
        (TrainConfig, dict(betas=(np.float32(0.9), np.float32(1))), InvalidValue, "betas"),
        (TrainConfig, dict(betas=(False, 0.9)), InvalidValue, "betas"),
        (TrainConfig, dict(remat="every:0"), InvalidValue, "remat"),
        (TrainConfig, dict(remat="some"), InvalidValue, "remat"),
    ],
)
def test_a_wrong_option_is_named(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


@pytest.mark.parametrize("config", [GPTConfig(), TrainConfig(loss_scale=2.0)])
def test_numbers_of_numpy_are_kept_as_those_of_python(config):
    """JSON can hold them and equal configs have one text, hash and digest."""

    def types_of(x):
        return type(x), tuple(map(type, x)) if isinstance(x, tuple) else None

    def of_numpy(x):
        x = tuple(map(of_numpy, x)) if isinstance(x, tuple) else x
        return np.int64(x) if isinstance(x, int) else np.float64(x) if isinstance(x, float) else x

    values = {name: of_numpy(value) for name, value in vars(config).items()}
    got = type(config)(**values)
    assert got == config and hash(got) == hash(config) and repr(got) == repr(config)
    assert json.dumps(dataclasses.asdict(got)) == json.dumps(dataclasses.asdict(config))
    assert [types_of(x) for x in vars(got).values()] == [types_of(x) for x in vars(config).values()]
    assert sum(types_of(x) != types_of(vars(config)[name]) for name, x in values.items()) > 5


def test_a_number_of_fp32_is_the_one_that_was_given():
    got = TrainConfig(lr=np.float32(1e-3), warmup=np.uint8(3), eps=np.float16(1e-3))
    assert got.lr == float(np.float32(1e-3)) and got.warmup == 3 and got.eps == float(np.float16(1e-3))
    assert GPTConfig(dropout=np.float16(0.5)).dropout == 0.5
    assert type(TrainConfig(lr=1).lr) is int  # as before: a config's digest does not change


def test_an_unknown_preset_or_option_lists_the_known_ones():
    with pytest.raises(InvalidValue, match="gpt2-medium"):
        GPTConfig.preset("gpt3")
    with pytest.raises(InvalidValue, match="'depth'.*n_layer"):
        from_dict(GPTConfig, {"depth": 3})


def test_remat_names_the_blocks_between_kept_inputs():
    assert [
        TrainConfig(remat=r).remat_every(12) for r in ("none", "light", "full", "every:4", "every:99")
    ] == [
        0,
        0,
        1,
        4,
        12,
    ]
