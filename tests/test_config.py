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
        (GPTConfig, dict(dropout=1.0), InvalidValue, r"dropout must be in \[0.0, 1.0\)"),
        (GPTConfig, dict(vocab_size=10**9), InvalidValue, "vocab_size"),
        (TrainConfig, dict(lr=-1), InvalidValue, "lr"),
        (TrainConfig, dict(lr=float("nan")), InvalidValue, "lr"),
        (TrainConfig, dict(betas=(0.9, 1.0)), InvalidValue, "betas"),
        (TrainConfig, dict(remat="every:0"), InvalidValue, "remat"),
        (TrainConfig, dict(remat="some"), InvalidValue, "remat"),
    ],
)
def test_a_wrong_option_is_named(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


def test_an_unknown_preset_or_option_lists_the_known_ones():
    with pytest.raises(InvalidValue, match="gpt2-medium"):
        GPTConfig.preset("gpt3")
    with pytest.raises(InvalidValue, match="'depth'.*n_layer"):
        from_dict(GPTConfig, {"depth": 3})


def test_remat_names_the_blocks_between_kept_inputs():
    assert [TrainConfig(remat=r).remat_every(12) for r in ("none", "full", "every:4", "every:99")] == [
        0,
        1,
        4,
        12,
    ]
