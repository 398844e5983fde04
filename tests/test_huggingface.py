"""Weights in and out, against what tests/fixtures/make_hf_gpt2.py wrote. tests/test_transformers.py needs the
library; this needs it not."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import nbtrain as nb
from nbtrain import huggingface
from nbtrain.checkpoint import load, save
from nbtrain.cli import main
from nbtrain.device.place import to_device, to_host
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.huggingface import is_pretrained, load_init, load_pretrained, save_pretrained
from nbtrain.model import GPT, init_params
from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from nbtrain.train import init

FIXTURE = Path(__file__).parent / "fixtures" / "hf_gpt2"
STEP = "run/checkpoints/step_00000007"
V, C, SIZES = 131, 40, dict(n_layer=2, n_head=2, n_embd=40, block_size=24, vocab_size=131)
SMALL = nb.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=29)


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture, to be changed."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "gpt2"))


def tensors():
    return load_file(FIXTURE / "model.safetensors")


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder, tensors):
    """The tensors in turn over two files, and the index."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (folder / "model.safetensors").unlink()
    weight_map = {tensor: names[i % 2] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({t: x for t, x in tensors.items() if weight_map[t] == name}, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def change_config(folder, **changes):
    """`changes` to config.json; `...` takes a key out."""
    values = json.loads((folder / "config.json").read_text()) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))


def assert_logits(params, config):
    """The logits that transformers computed in float64, to 1e-5 of the largest."""
    expected = load_file(FIXTURE.with_suffix(".safetensors"))
    got = to_host(GPT(config).logits(params, to_device(expected["tokens"], params.device)))
    want = expected["logits"]
    assert got.shape == want.shape == (3, 24, V)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


# In


def test_imported_weights_give_the_logits_of_transformers():
    config, params, tokenizer = load_pretrained(FIXTURE, device="cpu")
    assert config == nb.GPTConfig(**SIZES, dropout=0.1) and tokenizer is None
    assert params.dtype == np.float32 and params.device == "cpu"
    assert_logits(params, config)


@pytest.mark.gpu
def test_weights_on_a_gpu_give_the_logits_of_transformers(request, tmp_path):
    place = request.config.getoption("--device")
    config, params, _ = load_pretrained(FIXTURE, "fp32", place)
    assert params.device == place
    assert_logits(params, config)
    again = load_file(save_pretrained(tmp_path / "out", params, config) / "model.safetensors")
    assert all(np.array_equal(again[name], x) for name, x in tensors().items())
    _, half, opt_state, _ = load_init(FIXTURE, "fp16", place)
    assert half.device == opt_state.master.device == place and half.dtype == np.float16
    assert np.array_equal(to_host(opt_state.master.buffer), to_host(params.buffer))


def test_every_leaf_is_the_tensor_of_its_name_and_the_rest_is_zero():
    config, params, _ = load_pretrained(FIXTURE, device="cpu")
    want = tensors()
    assert np.array_equal(params.blocks[1].qkv_w, want["transformer.h.1.attn.c_attn.weight"])
    assert np.array_equal(params.blocks[0].out_b, want["transformer.h.0.mlp.c_proj.bias"])
    assert np.array_equal(params.lnf_w, want["transformer.ln_f.weight"])
    assert np.array_equal(params.wte[:V], want["transformer.wte.weight"])
    assert params.wte.shape == (256, C) and not params.wte[V:].any()
    assert np.count_nonzero(params.buffer) == sum(np.count_nonzero(x) for x in want.values())


@pytest.mark.parametrize("name, storage", [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bit_params_are_the_weights_rounded_once(name, storage):
    fp32 = load_pretrained(FIXTURE, "fp32", "cpu").params
    params = load_pretrained(FIXTURE, name, "cpu").params
    assert params.dtype == storage and np.array_equal(params.buffer, fp32.buffer.astype(storage))


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_files_are_read_exactly(folder, storage):
    write(folder, {name: x.astype(storage) for name, x in tensors().items()})
    params = load_pretrained(folder, "fp32", "cpu").params
    want = load_pretrained(FIXTURE, "fp32", "cpu").params
    assert np.array_equal(params.buffer, want.buffer.astype(storage).astype(np.float32))


def test_older_names_buffers_and_a_tied_head_change_nothing(folder):
    plain = {name.removeprefix("transformer."): x for name, x in tensors().items()}
    masks = {f"h.{i}.attn.bias": np.tri(24, dtype=np.uint8)[None, None] for i in range(2)}
    masks["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    want = load_pretrained(FIXTURE, device="cpu").params.buffer
    write(folder, plain | masks)
    assert np.array_equal(load_pretrained(folder, device="cpu").params.buffer, want)
    write(folder, tensors() | {"lm_head.weight": plain["wte.weight"]})
    assert np.array_equal(load_pretrained(folder, device="cpu").params.buffer, want)


def test_shards_are_read_as_one_file(folder):
    write_shards(folder, tensors())
    config, params, _ = load_pretrained(folder, device="cpu")
    assert np.array_equal(params.buffer, load_pretrained(FIXTURE, device="cpu").params.buffer)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="llama"), "model_type must be 'gpt2'"),
        (dict(model_type=...), "model_type must be 'gpt2'"),
        (dict(activation_function="relu"), "activation_function must be 'gelu_new' or 'gelu_pytorch_tanh'"),
        (dict(activation_function="relu"), "got 'relu'. In nbtrain GELU by tanh"),
        (dict(activation_function="gelu"), "activation_function must be"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon must be 1e-05; got 1e-06"),
        (dict(n_inner=100), "n_inner must be null or 4 * n_embd = 160; got 100"),
        (dict(scale_attn_weights=False), "scale_attn_weights must be True"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx must be False"),
        (dict(add_cross_attention=True), "add_cross_attention must be False"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings must be True"),
        (dict(n_head=...), "lacks n_head"),
        (dict(n_head=3), "n_embd must be a multiple of n_head"),
        (dict(n_positions=2.0), "n_positions must be an int"),
        (dict(n_positions=0), "n_positions must be in 1"),
        (dict(vocab_size=True), "vocab_size must be an int"),
        (dict(n_layer=10**9), "n_layer must be in 1"),
        (dict(n_layer=3), "lacks the tensor 'h.2."),
        (dict(n_layer=1), "does not have"),
        (dict(vocab_size=130), "wte.weight must be (130, 40)"),
        (dict(attn_pdrop=0.2), "are 0.1, 0.2, 0.1"),
        (dict(attn_pdrop=2, resid_pdrop=2, embd_pdrop=2), "dropout must be in"),
    ],
)  # fmt: skip
def test_a_model_that_would_be_another_one_here_is_refused_with_the_reason(changes, message, folder):
    change_config(folder, **changes)
    with pytest.raises(InvalidValue) as caught:
        load_pretrained(folder, device="cpu")
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_what_does_not_change_the_function_is_taken(folder):
    other = dict(n_inner=160, activation_function="gelu_pytorch_tanh", reorder_and_upcast_attn=True, n_ctx=7)
    change_config(folder, **other, layer_norm_epsilon=..., scale_attn_weights=..., embd_pdrop=...)
    config, params, _ = load_pretrained(folder, device="cpu")
    assert_logits(params, config)
    assert load_pretrained(folder, device="cpu", dropout=0.0).config.dropout == 0.0


def test_sizes_that_the_weights_lack_take_no_memory(folder):
    """2.5 TB in fp32 by config.json."""
    change_config(folder, n_layer=900, n_embd=8192, vocab_size=10_000_000, n_positions=1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValue, match="must be|lacks"):
            load_pretrained(folder, device="cpu")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


LN = "transformer.h.1.ln_2.weight"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({LN: ...}, "lacks the tensor 'h.1.ln_2.weight'"),
        (dict.fromkeys(tensors(), ...), "model.safetensors lacks the tensor 'wte.weight'"),
        ({LN: np.ones(41, np.float32)}, "h.1.ln_2.weight must be (40,) by config.json; it is (41,)"),
        ({LN: np.ones(40, np.int32)}, "must be F32, F16, BF16; it is I32"),
        ({LN: np.ones(40, np.float64)}, "it is F64"),
        ({LN: np.full(40, np.nan, np.float32)}, "h.1.ln_2.weight holds inf or nan"),
        ({"score.weight": np.ones((2, 40), np.float32)}, "holds the tensor 'score.weight'"),
        ({"h.1.ln_2.weight": np.ones(40, np.float32)}, "is the second tensor of that name"),
        ({"lm_head.weight": np.ones((V, C), np.float32)}, "an output layer of its own"),
        ({"lm_head.weight": np.ones((V + 1, C), np.float32)}, "lm_head.weight must be (131, 40)"),
        ({"transformer.h.2.attn.c_attn.bias": np.ones(120, np.float32)}, "does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes, message, folder):
    write(folder, {name: x for name, x in (tensors() | changes).items() if x is not ...})
    with pytest.raises(InvalidValue) as caught:
        load_pretrained(folder, device="cpu")
    assert message in str(caught.value) and str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("cut", [0, 5, 500, 185_488])
def test_a_cut_file_is_named(cut, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InvalidValue, match="model.safetensors is damaged"):
        load_pretrained(folder, device="cpu")


def test_json_without_end_is_not_read(folder):
    with open(folder / "config.json", "ab") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(InvalidValue, match=f"config.json: expected at most {2**24} bytes, there are {2**40}"):
        load_pretrained(folder, device="cpu")


def test_a_weight_beyond_fp16_is_refused_in_fp16_alone(folder):
    write(folder, tensors() | {LN: np.full(40, 7e4, np.float32)})
    with pytest.raises(InvalidValue, match="blocks.1.ln2_w holds 70000, beyond fp16's largest number"):
        load_pretrained(folder, "fp16", "cpu")
    assert load_pretrained(folder, "bf16", "cpu").params.blocks[1].ln2_w[0] == ml_dtypes.bfloat16(7e4)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidValue, match=r"pytorch_model.bin is a pickle.*save_pretrained\(new_folder\)"):
        load_pretrained(folder, device="cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InvalidValue, match="holds no weights: expected model.safetensors, or"):
        load_pretrained(folder, device="cpu")


# Shards


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "C:model.safetensors",
        "..\\model.safetensors", "model.safetensors\0", "model.bin", ".hidden.safetensors", 7, None,
        "model.safetensors\n", "-" + "x" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_an_index_leads_nowhere_but_to_files_beside_it(shard, folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    index = write_shards(folder, tensors())
    index["weight_map"]["transformer.wte.weight"] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidValue, match="must lie in a file of the same folder") as caught:
        load_pretrained(folder, device="cpu")
    assert str(folder / "model.safetensors.index.json") in str(caught.value)


def test_a_shard_may_be_a_link_only_inside_or_in_the_cache_of_the_hub(folder, tmp_path):
    write_shards(folder, tensors())
    want = load_pretrained(folder, device="cpu").params.buffer
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder / "elsewhere.safetensors")
    shard.symlink_to("elsewhere.safetensors")
    assert np.array_equal(load_pretrained(folder, device="cpu").params.buffer, want)
    shard.unlink()
    (folder / "elsewhere.safetensors").rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(InvalidValue, match="is a link to .*outside the folder"):
        load_pretrained(folder, device="cpu")

    snapshot, blobs = tmp_path / "models--gpt2" / "snapshots" / "e7da", tmp_path / "models--gpt2" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{i}"))
    assert np.array_equal(load_pretrained(snapshot, device="cpu").params.buffer, want)


def test_shards_that_are_not_what_the_index_says_are_named(folder):
    index = write_shards(folder, tensors())
    file, shard = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    for wrong in ([], {}, {"a": "b.safetensors"} | {"weight_map": 3}):
        file.write_text(json.dumps({"weight_map": wrong} if wrong == {} else wrong))
        with pytest.raises(InvalidValue, match="index.json: expected"):
            load_pretrained(folder, device="cpu")
    moved = index["weight_map"] | {"transformer.wte.weight": "model-00001-of-00002.safetensors"}
    moved["transformer.wpe.weight"] = "model-00002-of-00002.safetensors"
    file.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(InvalidValue, match="says otherwise"):
        load_pretrained(folder, device="cpu")
    file.write_text(json.dumps(index))
    shard.unlink()
    with pytest.raises(InvalidValue, match="00002.safetensors is missing"):
        load_pretrained(folder, device="cpu")
    shard.mkdir()
    with pytest.raises(InvalidValue, match="00002.safetensors is missing"):
        load_pretrained(folder, device="cpu")


# Out


def test_an_export_holds_the_tensors_that_were_imported(tmp_path):
    config, params, _ = load_pretrained(FIXTURE, device="cpu")
    out = save_pretrained(tmp_path / "out", params, config)
    got, want = load_file(out / "model.safetensors"), tensors()
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # older versions of transformers refuse others
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == np.float32 and np.array_equal(got[name], x), name
    written, theirs = (json.loads((path / "config.json").read_text()) for path in (out, FIXTURE))
    told = set(written) & set(theirs) - {"bos_token_id", "eos_token_id"}
    assert len(told) >= 15 and {name: written[name] for name in told} == {name: theirs[name] for name in told}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


def test_16_bit_params_are_exported_exactly_in_fp32(tmp_path):
    config, params, _ = load_pretrained(FIXTURE, "bf16", "cpu")
    got = load_file(save_pretrained(tmp_path / "out", params, config) / "model.safetensors")
    for name, x in tensors().items():
        assert np.array_equal(got[name], x.astype(ml_dtypes.bfloat16).astype(np.float32)), name


BPE = BPETokenizer.train(["a rose is a rose is a rose " * 20], 270)


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer(), CharTokenizer("abc\u00e9\u4f60"), BPE])
def test_an_export_is_imported_again_with_its_tokenizer(tokenizer, tmp_path):
    config = nb.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=300, dropout=0.2)
    params, _ = init_params(config, seed=3)
    save_pretrained(tmp_path / "out", params, config, tokenizer)
    again, read, found = load_pretrained(tmp_path / "out", device="cpu")
    assert again == config and np.array_equal(read.buffer, params.buffer)
    assert (found and found.to_dict()) == (tokenizer and tokenizer.to_dict())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == (tokenizer and tokenizer.eot)


def test_an_earlier_export_is_replaced_and_nothing_else_is(tmp_path, folder):
    params, _ = init_params(SMALL, seed=1)
    out = tmp_path / "out"
    save_pretrained(out, params, SMALL, CharTokenizer("abc"))
    other, _ = init_params(SMALL, seed=2)
    save_pretrained(out, other, SMALL)
    assert np.array_equal(load_pretrained(out, device="cpu").params.buffer, other.buffer)
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["gpt2", "out"]

    before = (folder / "model.safetensors").read_bytes()
    (out / "notes.txt").write_text("mine")
    for mine, name in (
        (folder, "config.json"),
        (out, "notes.txt"),
    ):  # a download, a file in an export
        with pytest.raises(InvalidValue, match=f"holds '{name}', which is no part of an earlier export"):
            save_pretrained(mine, params, SMALL)
    with pytest.raises(InvalidValue, match="is a file"):
        save_pretrained(out / "notes.txt", params, SMALL)
    assert (folder / "model.safetensors").read_bytes() == before and (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("step", ["write_tensors", "_write_tokenizer", "_write_json", "flush"])
def test_an_export_that_fails_leaves_what_was_there(step, tmp_path, monkeypatch):
    first, _ = init_params(SMALL, seed=1)
    second, _ = init_params(SMALL, seed=2)
    save_pretrained(tmp_path / "out", first, SMALL)

    def full(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(huggingface, step, full)
    for out in (tmp_path / "out", tmp_path / "fresh"):
        with pytest.raises(OSError, match="the disk is full"):
            save_pretrained(out, second, SMALL)
    monkeypatch.undo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]
    assert np.array_equal(load_pretrained(tmp_path / "out", device="cpu").params.buffer, first.buffer)


def test_a_rename_that_fails_puts_the_earlier_export_back(tmp_path, monkeypatch):
    params, _ = init_params(SMALL, seed=1)
    save_pretrained(tmp_path / "out", params, SMALL)
    rename = os.rename

    def fails(source, target):
        if ".tmp-" in str(source):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="no"):
        save_pretrained(tmp_path / "out", init_params(SMALL, seed=2)[0], SMALL)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]
    assert np.array_equal(load_pretrained(tmp_path / "out", device="cpu").params.buffer, params.buffer)


def test_what_killed_exports_left_goes_with_the_next_one(tmp_path):
    for name in ("out.tmp-0123abcd", "out.old-0123abcd", "out.tmp-notes", "about.tmp-0123abcd"):
        (tmp_path / name).mkdir()
    save_pretrained(tmp_path / "out", init_params(SMALL, seed=1)[0], SMALL)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "about.tmp-0123abcd",
        "out",
        "out.tmp-notes",
    ]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path):
    params, _ = init_params(SMALL)
    with pytest.raises(InvalidValue, match="in another layout"):
        save_pretrained(tmp_path / "out", params, nb.GPTConfig(**SIZES))
    with pytest.raises(InvalidValue, match="the tokenizer has 256 ids, the model only 29"):
        save_pretrained(tmp_path / "out", params, SMALL, ByteTokenizer())
    with pytest.raises(InvalidType, match="got Tree, dict"):
        save_pretrained(tmp_path / "out", params, {})
    assert not list(tmp_path.iterdir())


def test_gpt2s_own_tokenizer_files_are_read_and_must_fit_the_model(folder):
    model = json.loads(BPE.to_dict()["tokenizer"])["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges))
    with pytest.raises(InvalidValue, match=f"has {BPE.vocab_size} ids, the model in config.json only 131"):
        load_pretrained(folder, device="cpu")
    wte = np.ones((300, C), np.float32)
    write(folder, tensors() | {"transformer.wte.weight": wte})
    change_config(folder, vocab_size=300)
    tokenizer = load_pretrained(folder, device="cpu").tokenizer
    text = "a rose is an arose"
    assert tokenizer.kind == "bpe" and np.array_equal(tokenizer.encode(text), BPE.encode(text))
    (folder / "merges.txt").unlink()
    with pytest.raises(InvalidValue, match="merges.txt"):
        load_pretrained(folder, device="cpu")


# To begin a run with


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_run_begins_with_the_weights_of_a_folder(dtype):
    config, params, opt_state, tokenizer = load_init(FIXTURE, dtype, "cpu", dropout=0.0, seed=5)
    want = load_pretrained(FIXTURE, dtype, "cpu")
    assert config == nb.GPTConfig(**SIZES) and tokenizer is None
    assert params.dtype == want.params.dtype and np.array_equal(params.buffer, want.params.buffer)
    fp32 = load_pretrained(FIXTURE, "fp32", "cpu").params
    assert np.array_equal(opt_state.master.buffer, fp32.buffer)
    assert (opt_state.master is params) == (dtype == "fp32")
    assert opt_state.step.item() == opt_state.updates.item() == 0 and opt_state.seed.tolist() == [5, 0]
    assert not opt_state.m.buffer.any() and not opt_state.v.buffer.any()

    tokens = load_file(FIXTURE.with_suffix(".safetensors"))["tokens"][None]
    batch = nb.Batch.of(tokens[..., :-1], tokens[..., 1:])
    step, losses = nb.make_train_step(config, nb.TrainConfig(lr=3e-3)), []
    for _ in range(8):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("with_state", [True, False])
def test_a_run_begins_with_the_weights_of_record_of_a_checkpoint(with_state, tmp_path):
    config = nb.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=256)
    params, opt_state = init(config, seed=4, dtype="bf16", device="cpu")
    opt_state.step[...] = 7
    opt_state.m.buffer[...] = 1
    save(tmp_path / "c", params, opt_state if with_state else None, config=config, tokenizer=ByteTokenizer())
    found, weights, fresh, tokenizer = load_init(tmp_path / "c", "fp32", "cpu", dropout=0.3)
    assert found == nb.GPTConfig(**{**vars(config), "dropout": 0.3}) and tokenizer.kind == "byte"
    record = opt_state.master.buffer if with_state else params.buffer.astype(np.float32)
    assert weights.dtype == np.float32 and np.array_equal(weights.buffer, record)
    assert fresh.step.item() == 0 and not fresh.m.buffer.any()


def test_what_a_folder_is_meant_as(tmp_path, folder):
    params, _ = init_params(SMALL)
    save(tmp_path / STEP, params, config=SMALL)
    assert is_pretrained(folder) and not is_pretrained(tmp_path / "run")
    assert not is_pretrained(tmp_path / STEP) and not is_pretrained(tmp_path / "nowhere")
    assert load_init(tmp_path / "run", "fp32", "cpu")[0] == SMALL
    (folder / "checkpoint-500").mkdir()  # of transformers' Trainer
    assert is_pretrained(folder)
    with pytest.raises(InvalidValue, match="no checkpoint at"):
        load_init(tmp_path / "nowhere", "fp32", "cpu")
    with pytest.raises(InvalidValue, match="where there is none"):
        load_pretrained(tmp_path / "nowhere", "fp32", "cpu")


# The command line


def run(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code or 0


def test_import_and_export_are_each_others_inverse(tmp_path, capsys):
    assert run("import", FIXTURE, "--out", tmp_path / "checkpoint") == 0
    checkpoint = load(tmp_path / "checkpoint", "cpu")
    assert checkpoint.opt_state is None and checkpoint.config.n_layer == 2
    assert run("export", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "2 layers, 2 heads, 40 channels, 24 positions, vocabulary 131, no tokenizer" in out
    assert "out: config.json, model.safetensors\n" in out and "from_pretrained(" in out
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(got[name], x) for name, x in tensors().items())


def test_an_export_of_a_run_in_16_bits_takes_its_fp32_weights(tmp_path):
    params, opt_state = init(SMALL, seed=6, dtype="bf16", device="cpu")
    save(
        tmp_path / STEP,
        params,
        opt_state,
        config=SMALL,
        tokenizer=CharTokenizer("abc"),
    )
    assert run("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    _, exported, tokenizer = load_pretrained(tmp_path / "out", "fp32", "cpu")
    assert np.array_equal(exported.buffer, opt_state.master.buffer) and tokenizer.chars == "abc"


def test_import_and_export_refuse_in_one_line_what_is_in_the_way(tmp_path, folder, capsys):
    assert run("import", FIXTURE, "--out", folder) == 1
    assert run("export", tmp_path / "nowhere", "--out", folder) == 1
    assert run("import", tmp_path, "--out", tmp_path / "new") == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and all(line.startswith("nbtrain: ") for line in err)
    assert "'config.json', which is no part" in err[0] and "'config.json', which is no part" in err[1]
    assert "config.json is missing" in err[2] and not (tmp_path / "new").exists()
