import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nbtrain.checkpoint import INDEX, MODEL, OPTIMIZER, load, save
from nbtrain.checkpoint_index import digest_of
from nbtrain.checkpoints import Checkpoints
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import FLOATS
from nbtrain.device.place import resolve_device
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.precision import LossScale
from nbtrain.tensor_file import open_tensors, write_tensors
from nbtrain.tokenizer import CharTokenizer
from nbtrain.train import OptState
from nbtrain.tree import Layout, Tree

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=6, block_size=5, vocab_size=3)
TOKENIZER = CharTokenizer("abc")
DATA_STATE = {"version": 1, "seed": 3, "epoch": 2, "position": 7, "data": {"files": 1, "B": 4}}


def _state(dtype="fp32", seed=0, config=CONFIG):
    """(params, opt_state) of a run that has moved everything away from its initial value."""
    rng = np.random.default_rng(seed)
    layout = Layout.of(config.leaves())

    def tree():
        filled = Tree(layout, np.zeros(layout.size, np.float32))
        for _, leaf in filled:
            leaf[...] = rng.standard_normal(leaf.shape)
        return filled

    master, m, v = tree(), tree(), tree()
    params = master if dtype == "fp32" else Tree(layout, master.buffer.astype(FLOATS[dtype]))
    scale = LossScale(np.array([4096], np.float32), np.array([77], np.int32))
    scalars = dict(step=np.array([30 + seed], np.int32), updates=np.array([28], np.int32))
    return params, OptState(
        **scalars, master=master, m=m, v=v, loss_scale=scale, seed=np.array([2**32 - 5, 9], np.uint32)
    )


def _saved(folder, seed=0, **options):
    params, opt_state = _state(seed=seed)
    return save(folder, params, opt_state, config=CONFIG, tokenizer=TOKENIZER, **options)


def _edit(folder, **changes):
    """Changes fields of checkpoint.json and signs it again, as somebody who means harm would."""
    index = json.loads((folder / INDEX).read_text()) | changes
    index.pop("digest")
    (folder / INDEX).write_text(json.dumps(index | {"digest": digest_of(index)}))


def _replace(folder, name, data):
    """Puts other bytes in the place of a file, with size and hash to match."""
    (folder / name).write_bytes(data)
    files = json.loads((folder / INDEX).read_text())["files"]
    files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _edit(folder, files=files)


def _arrays(opt_state):
    scale = opt_state.loss_scale
    return *(x for x in opt_state._replace(loss_scale=scale.value) if x is not None), scale.good_steps


@pytest.mark.parametrize("dtype", FLOATS)
def test_everything_comes_back_bit_for_bit(dtype, tmp_path):
    params, opt_state = _state(dtype)
    train_config = TrainConfig(lr=1e-3, schedule="cosine", total=100, betas=(0.9, 0.99), remat="every:2")
    extra = {"run": {"steps": 100, "paths": ["ä", "b"]}}
    told = dict(config=CONFIG, train_config=train_config, tokenizer=TOKENIZER)
    save(tmp_path / "a", params, opt_state, **told, data_state=DATA_STATE, extra=extra)
    got = load(tmp_path / "a", device="cpu")
    assert (got.config, got.train_config, got.data_state) == (CONFIG, train_config, DATA_STATE)
    assert got.tokenizer.to_dict() == TOKENIZER.to_dict() and got.meta["extra"] == extra
    assert got.meta["dtype"] == dtype and got.meta["path"] == tmp_path / "a"
    assert {"nbtrain", "numpy", "python"} <= set(got.meta["versions"])
    pairs = [(got.params, params), *zip(_arrays(got.opt_state), _arrays(opt_state), strict=True)]
    for x, y in pairs:
        if isinstance(x, Tree):
            x, y = x.buffer, y.buffer
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    assert got.params.buffer.tobytes() == got.opt_state.master.buffer.astype(FLOATS[dtype]).tobytes()
    assert (got.params is got.opt_state.master) == (dtype == "fp32")  # what a donated step goes by


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_alone_come_back_bit_for_bit(dtype, tmp_path):
    params, _ = _state(dtype)
    save(tmp_path / "a", params, config=CONFIG)
    got = load(tmp_path / "a", device="cpu")
    assert got.params.buffer.tobytes() == params.buffer.tobytes() and got.params.dtype == FLOATS[dtype]
    assert got.opt_state is got.tokenizer is got.data_state is got.train_config is None
    assert not (tmp_path / "a" / OPTIMIZER).exists()


def test_a_loaded_state_can_be_saved_again_with_the_same_bytes(tmp_path):
    _saved(tmp_path / "a")
    got = load(tmp_path / "a", device="cpu")
    save(tmp_path / "b", got.params, got.opt_state, config=got.config, tokenizer=got.tokenizer)
    for name in (MODEL, OPTIMIZER, INDEX):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_other_programs_read_the_leaves_without_padding(tmp_path):
    params, opt_state = _state("bf16")
    save(tmp_path / "a", params, opt_state, config=CONFIG)
    found = load_file(tmp_path / "a" / MODEL)
    assert {name: x.shape for name, x in found.items()} == dict(CONFIG.leaves())
    for name, leaf in opt_state.master:
        assert (found[name] == leaf).all() and found[name].dtype == np.float32
    assert sum(x.size for x in found.values()) == params.n_params < params.layout.size


def test_the_tied_embedding_is_stored_once(tmp_path):
    """Reported elsewhere: a second copy in the file, or a second pair of moments."""
    assert Layout.of(GPTConfig.preset("gpt2").leaves()).n_params == 124_475_904
    _saved(tmp_path / "a")
    shape = (CONFIG.padded_vocab_size, CONFIG.n_embd)
    model, optimizer = load_file(tmp_path / "a" / MODEL), load_file(tmp_path / "a" / OPTIMIZER)
    assert [name for name, x in model.items() if x.shape == shape] == ["wte"]
    assert sorted(name for name, x in optimizer.items() if x.shape == shape) == ["m.wte", "v.wte"]


# Damage


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, INDEX])
def test_a_file_cut_by_its_last_8_bytes_is_named(name, tmp_path):
    folder = _saved(tmp_path / "a")
    n_bytes = (folder / name).stat().st_size
    os.truncate(folder / name, n_bytes - 8)
    lengths = "" if name == INDEX else f"expected {n_bytes} bytes, there are "
    with pytest.raises(InvalidValue, match=f"{name} is damaged: {lengths}{n_bytes - 8}"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, INDEX])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.99])
def test_one_changed_byte_is_found_and_its_file_named(name, where, tmp_path):
    folder = _saved(tmp_path / "a", data_state=DATA_STATE)
    data = bytearray((folder / name).read_bytes())
    at = int(where * len(data))
    data[at] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(InvalidValue, match=name):
        load(folder, device="cpu")


def test_every_number_of_the_index_is_under_its_digest(tmp_path):
    folder = _saved(tmp_path / "a", data_state=DATA_STATE)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"position": 7', '"position": 8'))
    with pytest.raises(InvalidValue, match="digest"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_missing_file_is_named(name, tmp_path):
    folder = _saved(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(InvalidValue, match=f"{name} is missing"):
        load(folder, device="cpu")


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(InvalidValue, match="there is no checkpoint at .*nowhere"):
        load(tmp_path / "nowhere", device="cpu")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MODEL).write_bytes(b"x")
    with pytest.raises(InvalidValue, match=f"no {INDEX}"):
        load(tmp_path / "other", device="cpu")
    for text in ('{"format": "something else"}', "[]", "3", "[" * 100_000, "\xff"):
        (tmp_path / "other" / INDEX).write_text(text, encoding="latin-1")
        with pytest.raises(InvalidValue, match=INDEX):
            load(tmp_path / "other", device="cpu")


@pytest.mark.parametrize("name", ["config.toml", "log.jsonl"])
def test_a_run_that_has_saved_nothing_is_no_stranger(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(InvalidValue, match=f"^{tmp_path}: this run has saved no checkpoint yet"):
        load(tmp_path, device="cpu")


def test_a_folder_of_transformers_is_to_be_imported(tmp_path):
    for name in (MODEL, "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidValue, match=f"of transformers, .*: nbtrain import {tmp_path} --out FOLDER"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_format_version_is_refused(version, tmp_path):
    folder = _saved(tmp_path / "a")
    _edit(folder, version=version)
    with pytest.raises(InvalidValue, match=rf"{INDEX} has format version {version}; .* reads version 1"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "", "more.bin"]
)
def test_a_name_that_leads_elsewhere_is_refused(name, tmp_path):
    folder = _saved(tmp_path / "a")
    files = json.loads((folder / INDEX).read_text())["files"]
    (tmp_path / "model.safetensors").write_bytes((folder / MODEL).read_bytes())
    _edit(folder, files={name: files[MODEL]})
    with pytest.raises(InvalidValue, match=f"{INDEX}: expected the files"):
        load(folder, device="cpu")
    _edit(folder, files=files | {name: files[MODEL]})
    with pytest.raises(InvalidValue, match=f"{INDEX}: expected the files"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(config={"n_layer": "2"}), "n_layer must be an int"),
        (dict(config={"n_layers": 2}), "unknown option 'n_layers'"),
        (dict(config=None), "'config'"),
        (dict(dtype="int8"), "dtype must be one of"),
        (dict(train_config={"betas": [0.9, 2.0]}), "betas"),
        (dict(tokenizer={"kind": "pickle"}), "kind 'char' or 'byte'"),
        (dict(tokenizer={"kind": ["char"]}), "kind 'char' or 'byte'"),
        (dict(tokenizer={"kind": "char", "chars": "ba"}), "sorted"),
        (dict(tokenizer={"kind": "byte"}), "256 ids, the model only 3"),
        (dict(files={MODEL: 3}), "bytes and sha256"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, message, tmp_path):
    folder = _saved(tmp_path / "a")
    _edit(folder, **changes)
    with pytest.raises(InvalidValue, match=rf"{INDEX}.*{message}"):
        load(folder, device="cpu")


def test_weights_of_another_config_are_refused_before_memory_is_taken(tmp_path):
    folder = _saved(tmp_path / "a")
    huge = dict(n_layer=1000, n_head=1, n_embd=32_768, block_size=1_000_000, vocab_size=10_000_000)
    _edit(folder, config=huge)  # 50 TB
    with pytest.raises(InvalidValue, match=rf"{MODEL} lacks the tensor"):
        load(folder, device="cpu")
    _edit(folder, config=dict(n_layer=2, n_head=2, n_embd=8, block_size=5, vocab_size=3))
    with pytest.raises(InvalidValue, match=rf"{MODEL}: wte must be F32 \(128, 8\); it is F32 \(128, 6\)"):
        load(folder, device="cpu")


def test_foreign_tensors_are_named(tmp_path):
    folder = _saved(tmp_path / "a")
    good = load_file(folder / MODEL)
    other = tmp_path / "other.safetensors"
    for change, message in (
        ({"lm_head": np.zeros(2, np.float32)}, "unknown tensor 'lm_head'"),
        ({"lnf_w": good["lnf_w"].astype(np.float64)}, "lnf_w must be F32"),
    ):
        save_file(good | change, other)
        _replace(folder, MODEL, other.read_bytes())
        with pytest.raises(InvalidValue, match=f"{MODEL}.*{message}"):
            load(folder, device="cpu")
    scalars = load_file(folder / OPTIMIZER)
    save_file(scalars | {"seed": np.zeros(3, np.uint32)}, other)
    _replace(folder, MODEL, (_saved(tmp_path / "b") / MODEL).read_bytes())
    _replace(folder, OPTIMIZER, other.read_bytes())
    with pytest.raises(InvalidValue, match=rf"{OPTIMIZER}: seed must be U32 \(2,\); it is U32 \(3,\)"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        dict(version="\x1b[31m"),
        dict(dtype="\x1b[31m"),
        dict(files={"\x1b[31m": 1}),
        dict(files={MODEL: "\x1b[31m"}),
        dict(files={MODEL: {"bytes": 1, "sha256": {"\x1b[31m": 1}}}),
        dict(config={"\x1b[31m": 1}),
        dict(train_config={"remat": "\x1b[31m"}),
        dict(tokenizer={"kind": "\x1b[31m"}),
    ],
)
def test_what_a_terminal_would_obey_is_not_told(changes, tmp_path):
    folder = _saved(tmp_path / "a")
    _edit(folder, **changes)
    with pytest.raises(InvalidValue) as error:
        load(folder, device="cpu")
    assert "\x1b" not in str(error.value)


def test_nothing_of_the_tensor_files_and_the_machine_is_obeyed_by_a_terminal(tmp_path):
    folder = _saved(tmp_path / "a")
    index = json.loads((folder / INDEX).read_text())
    evil = "\x1b]0;a\x07\u202e\n"
    _edit(
        folder, machine=index["machine"] | {evil: evil, "cores": evil}, versions={evil: evil, "numpy": evil}
    )
    differs = load(folder, device="cpu").meta["differs"]
    assert sum("\\x1b]0;a\\x07\\u202e\\n" in text for text in differs) == 4
    assert all(text.isprintable() for text in differs)
    _edit(folder, machine={"device": evil})
    assert load(folder, device="cpu").meta["differs"][0].isprintable()
    files = index["files"]
    _edit(folder, files=files | {MODEL: files[MODEL] | {"sha256": evil}})
    with pytest.raises(InvalidValue, match="not those that were saved") as error:
        load(folder, device="cpu")
    assert str(error.value).isprintable()
    head = json.dumps({evil: {"dtype": evil, "shape": [1], "data_offsets": [0, 4]}}).encode()
    _replace(folder, MODEL, len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(InvalidValue, match="is no safetensors file") as error:
        load(folder, device="cpu")
    assert str(error.value).isprintable()


def test_the_device_that_auto_chose_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nbtrain.device.place._said", set())
    folder = _saved(tmp_path / "a")
    load(folder, device="cpu")
    assert capsys.readouterr() == ("", "")
    place, why = resolve_device("auto")
    for said in (f"nbtrain: device {place}: {why}\n", ""):
        assert load(folder).params.device == place
        assert capsys.readouterr() == ("", said)


class _Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["NBTRAIN_TEST_EVIL"],)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTRAIN_TEST_EVIL", str(tmp_path / "evil"))
    folder = _saved(tmp_path / "a")
    for name in (MODEL, OPTIMIZER):
        _replace(folder, name, pickle.dumps(_Evil()))
        with pytest.raises(InvalidValue, match=f"{MODEL} is damaged: it is no safetensors file"):
            load(folder, device="cpu")
    assert not (tmp_path / "evil").exists()


# Saving


def test_a_checkpoint_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    _saved(tmp_path / "a", seed=0)
    for leftover in ("a.tmp-0123abcd", "a.old-0123abcd"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "a.tmp-not-ours").mkdir()
    _saved(tmp_path / "a", seed=1)
    assert load(tmp_path / "a", device="cpu").opt_state.step.item() == 31
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.tmp-not-ours"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    folder = _saved(tmp_path / "a")
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidValue, match="'thesis.txt', which is no part of a checkpoint"):
        _saved(folder)
    assert (folder / "thesis.txt").read_text() == "years of work"
    with pytest.raises(InvalidValue, match="is a file"):
        _saved(folder / "thesis.txt")


def test_what_cannot_be_saved_is_refused_before_a_file_is_written(tmp_path):
    params, opt_state = _state()
    with pytest.raises(InvalidValue, match="another layout"):
        save(tmp_path / "a", params, opt_state, config=GPTConfig.preset("shakespeare-small"))
    with pytest.raises(InvalidType, match="JSON"):
        save(tmp_path / "a", params, opt_state, config=CONFIG, extra={"x": object()})
    assert not any(tmp_path.iterdir())


def _wrong(name):
    """Arguments of save that differ from good ones in one thing; and what the error says."""
    params, state = _state(seed=1)

    def as_(tree, dtype):
        return Tree(tree.layout, tree.buffer.astype(dtype))

    scale, told = state.loss_scale, dict(config=CONFIG)
    return {
        "extra": ((params, state), told | dict(extra=[1]), "'extra' must be a dict or None; got list"),
        "text": ((params, state), told | dict(extra="x"), "'extra' must be a dict or None; got str"),
        "data_state": ((params, state, [1]), told, "'data_state' must be a dict or None; got list"),
        "deep": ((params, state), told | dict(extra={"x": _nested(3000)}), "JSON can hold"),
        "config": ((params, state, {}), {}, "config of type GPTConfig; got NoneType. Pass config="),
        "no config": ((params, state), dict(config=TrainConfig()), "config of type GPTConfig; got TrainC"),
        "train_config": ((params,), told | dict(train_config=CONFIG), "train_config of type .*; got GPTC"),
        "tokenizer": ((params,), told | dict(tokenizer="abc"), "tokenizer of type .*; got str"),
        "params": ((params.buffer,), told, "params of type Tree; got ndarray"),
        "opt_state": ((params, {"step": 1}), told, "opt_state of type .*OptState . None; got dict"),
        "int64": (
            (params, state._replace(step=np.array([3]))),
            told,
            r"step must be I32 \(1,\); it is int64",
        ),
        "0-d": ((params, state._replace(step=np.array(3, np.int32))), told, r"step must be .*it is I32 \(\)"),
        "int": ((params, state._replace(updates=3)), told, r"updates must be I32 \(1,\); it is int \(\)"),
        "seed": ((params, state._replace(seed=state.seed[:1])), told, r"seed must be U32 \(2,\); it is U32"),
        "limits": ((params, state._replace(limits=np.ones(3, np.float32))), told, r"limits must be F32 \(2,"),
        "scale": (
            (params, state._replace(loss_scale=scale._replace(value=np.ones(1)))),
            told,
            "loss_scale must be F32 .* it is float64",
        ),
        "weights": ((as_(params, np.float64),), told, "wte must be F32 .* it is float64"),
        "dtype": ((as_(params, np.float64), state), told, "dtype must be one of .*; got 'float64'"),
        "master": (
            (params, state._replace(master=as_(params, np.int32))),
            told,
            "wte must be F32 .* it is I32",
        ),
        "moment": ((params, state._replace(v=as_(params, np.float64))), told, "v.wte must be F32 .* float64"),
    }[name]


def _nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "name",
    "extra,text,data_state,deep,config,no config,train_config,tokenizer,params,opt_state,int64,0-d,int,seed,"
    "limits,scale,weights,dtype,master,moment".split(","),
)
def test_what_load_would_refuse_is_not_saved_over_a_good_checkpoint(name, tmp_path):
    run = tmp_path / "run" / "checkpoints"
    for folder in (tmp_path / "a", run / "step_00000007"):
        _saved(folder, seed=0)
    args, told, message = _wrong(name)
    error = InvalidValue if name in ("0-d", "seed", "limits", "dtype") else InvalidType
    with pytest.raises(error, match=message):
        save(tmp_path / "a", *args, **told)
    told = dict(config=None) | told | (dict(data_state=args[2]) if len(args) > 2 else {})
    for wait in (True, False):
        with Checkpoints(run) as checkpoints, pytest.raises(error, match=message):
            checkpoints.save(7, *args[:2], **told, wait=wait)
    for folder in (tmp_path / "a", tmp_path / "run"):
        assert load(folder, device="cpu").opt_state.step.item() == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "run"]
    assert [p.name for p in run.iterdir()] == ["step_00000007"]


def test_an_index_is_saved_up_to_the_size_that_is_read(tmp_path, monkeypatch):
    most = (_saved(tmp_path / "a", extra={"x": ""}) / INDEX).stat().st_size + 50
    for module in ("checkpoint", "checkpoint_index"):
        monkeypatch.setattr(f"nbtrain.{module}.MAX_INDEX_BYTES", most)
    refused = []
    for n in range(0, 100, 10):
        try:
            _saved(tmp_path / "a", extra={"x": "x" * n})
        except InvalidValue as error:
            refused.append(n)
            assert f"expected at most {most:,} bytes" in str(error)
        assert load(tmp_path / "a", device="cpu").meta["extra"]["x"] == "x" * min(
            [n, *(r - 10 for r in refused)]
        )
    assert refused and 0 < refused[0] <= 60 and refused[-1] == 90


def test_tensors_are_written_in_dtypes_that_have_a_name(tmp_path):
    for x in (np.zeros(2), np.zeros(2, np.int64), np.zeros(2, ">f4"), np.zeros(2, bool)):
        with pytest.raises(InvalidType, match=rf"x must be float32, .*; it is {x.dtype}"):
            write_tensors(tmp_path / "a", {"x": x})
    assert not any(tmp_path.iterdir())
    xs = {name: np.array([1.5, -2.25]).astype(dtype) for name, dtype in FLOATS.items()}
    write_tensors(tmp_path / "a", xs)
    with open_tensors(tmp_path / "a", {name: ((2,), "F32") for name in xs}) as tensors:
        for name in xs:
            assert tensors.get_tensor(name).tolist() == [1.5, -2.25]


def test_the_place_in_the_data_may_follow_the_state(tmp_path):
    params, opt_state = _state()
    save(tmp_path / "a", params, opt_state, DATA_STATE, config=CONFIG)
    assert load(tmp_path / "a", device="cpu").data_state == DATA_STATE


def test_an_error_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder = _saved(tmp_path / "a", seed=0)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _saved(folder, seed=1)
    assert load(folder, device="cpu").opt_state.step.item() == 30
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


CRASH = """
import os, sys, warnings
warnings.simplefilter("ignore")  # fork in a process with threads
from pathlib import Path
sys.path.insert(0, {root!r})
from nbtrain.checkpoint import load
from tests.test_checkpoint import _saved
folder = Path(sys.argv[1]) / "a"
WATCHED = {{"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}}
for crash_at in range(1, 1000):
    child = os.fork()
    if child == 0:
        events = 0
        def count(event, args):
            global events
            events += event in WATCHED
            if events == crash_at:
                os._exit(9)  # as kill -9: no handler, no cleaning up
        sys.addaudithook(count)
        _saved(folder, seed=1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    step = load(folder, device="cpu").opt_state.step.item()
    print(crash_at, status, step, flush=True)
    if status == 0:
        break
    if step == 31:
        _saved(folder, seed=0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the crash is a child process that ends at once")
def test_a_crash_at_any_moment_of_saving_leaves_a_whole_checkpoint(tmp_path):
    _saved(tmp_path / "a", seed=0)
    script = CRASH.format(root=str(Path(__file__).parents[1]))
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    rows = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert rows[-1][1:] == (0, 31) and all(status == 9 and step in (30, 31) for _, status, step in rows[:-1])
    # Both kinds of crash occurred: before the new checkpoint was whole, and behind.
    assert {step for _, _, step in rows[:-1]} == {30, 31} and len(rows) > 8
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_unfinished_first_save_is_told(tmp_path):
    folder = _saved(tmp_path / "a")
    folder.rename(tmp_path / "a.tmp-0123abcd")
    (tmp_path / "a.tmp-0123abcd" / INDEX).unlink()
    with pytest.raises(InvalidValue, match=rf"did not finish.*a.tmp-0123abcd.{INDEX} is missing"):
        load(folder, device="cpu")
