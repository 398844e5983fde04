"""What nbtrain exports, loaded by `transformers`, and the other way round. Runs where that is installed."""

import json
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file

import nbtrain as nb
from nbtrain.checkpoint import save
from nbtrain.cli import main
from nbtrain.huggingface import load_pretrained, save_pretrained
from nbtrain.model import GPT, init_params
from nbtrain.tokenizer import BPETokenizer
from nbtrain.train import init
from tests.test_huggingface import FIXTURE, STEP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CONFIG = nb.GPTConfig(n_layer=3, n_head=4, n_embd=32, block_size=20, vocab_size=301, dropout=0.1)


def random_weights(seed=0, dtype=np.float32):
    """Weights of CONFIG, none of them 0 or 1 but the padding."""
    params, _ = init_params(CONFIG, seed)
    rng = np.random.default_rng(seed)
    for _, leaf in params:
        leaf += (0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)
    params.wte[CONFIG.vocab_size :] = 0
    return params


def their_logits(folder, tokens):
    """(B, T, V) in float64 from the weights that transformers reads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        return model.double()(torch.from_numpy(tokens).long()).logits.numpy()


def assert_same_logits(params, config, folder, seed=0):
    """To 1e-5 of the largest logit."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(config.vocab_size, size=(2, config.block_size), dtype=np.int32)
    got, want = GPT(config).logits(params, tokens), their_logits(folder, tokens)
    assert got.shape == want.shape and want.std() > 0.1
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_an_export_gives_the_same_logits_there(tmp_path):
    params = random_weights()
    save_pretrained(tmp_path / "out", params, CONFIG)
    assert_same_logits(params, CONFIG, tmp_path / "out")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (read.resid_pdrop, read.attn_pdrop, read.embd_pdrop) == (0.1, 0.1, 0.1)
    model, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_fixture_is_what_transformers_computes():
    expected = load_file(FIXTURE.with_suffix(".safetensors"))
    want = their_logits(FIXTURE, expected["tokens"])
    np.testing.assert_allclose(expected["logits"], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
def test_what_transformers_saves_in_shards_is_read(storage, tmp_path):
    save_pretrained(tmp_path / "out", random_weights(1), CONFIG)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").to(getattr(torch, storage))
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    config, params, _ = load_pretrained(tmp_path / "shards", "fp32", "cpu")
    assert config == CONFIG
    want = model.float().state_dict()
    for i in range(3):
        assert np.array_equal(params.blocks[i].fc_w, want[f"transformer.h.{i}.mlp.c_fc.weight"].numpy())
    model.save_pretrained(tmp_path / "whole")
    assert_same_logits(params, config, tmp_path / "whole")


def test_the_bare_model_is_read_without_its_prefix(tmp_path):
    save_pretrained(tmp_path / "out", random_weights(2), CONFIG)
    transformers.GPT2Model.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "bare")
    assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    config, params, _ = load_pretrained(tmp_path / "bare", "fp32", "cpu")
    assert np.array_equal(params.buffer, random_weights(2).buffer)


def test_a_run_in_16_bits_exports_its_fp32_weights(tmp_path):
    _, opt_state = init(CONFIG, seed=8, dtype="bf16", device="cpu")
    params, _ = init(CONFIG, seed=8, dtype="bf16", device="cpu")
    opt_state.master.buffer[...] = random_weights(3).buffer
    params.buffer[...] = opt_state.master.buffer.astype(params.dtype)
    save(tmp_path / STEP, params, opt_state, config=CONFIG)
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert not end.value.code
    assert_same_logits(opt_state.master, CONFIG, tmp_path / "out")


TEXT = "The quick brown fox jumps over the lazy dog.\nIt's 1984 -- caf\u00e9, \u4f60\u597d!  \t the end. " * 8


def test_a_tokenizer_goes_out_and_comes_back(tmp_path):
    tokenizer = BPETokenizer.train([TEXT], 300)
    save_pretrained(tmp_path / "out", random_weights(), CONFIG, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert theirs.eos_token_id == tokenizer.eot == 0
    read = json.loads((tmp_path / "out" / "config.json").read_text())
    assert read["eos_token_id"] == read["bos_token_id"] == 0
    assert load_pretrained(tmp_path / "out", device="cpu").tokenizer.to_dict() == tokenizer.to_dict()
    theirs.save_pretrained(tmp_path / "out")
    again = load_pretrained(tmp_path / "out", device="cpu").tokenizer
    assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT)) and again.eot == 0
