"""Weights in and out: GPT-2 in a folder of Hugging Face's `transformers`.

    config.json                    sizes; whatever would change the function that nbtrain computes is refused
    model.safetensors              fp32, fp16 or bf16, names with or without "transformer."; or
    model.safetensors.index.json   which shard, a file of the same folder, holds which tensor
    tokenizer.json                 or vocab.json and merges.txt: byte-pair encoding; tokenizer_config.json
    nbtrain_tokenizer.json         characters or bytes, which `transformers` has no file for

Matrices are (in, out) on both sides. The embedding has vocab_size rows there and padded_vocab_size here, the
rest of them zero; the output layer is the embedding (tied). Nothing is unpickled, sizes are checked before
memory is taken, and an exported folder is whole or absent.
"""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

import nbtrain
from nbtrain.checkpoint import INDEX, STEPS
from nbtrain.checkpoint import load as load_checkpoint
from nbtrain.config import GPTConfig
from nbtrain.device.place import to_device, use
from nbtrain.errors import InvalidType, InvalidValue, shown
from nbtrain.files import flush, read_json, write_folder
from nbtrain.precision import choose
from nbtrain.tensor_file import write_tensors
from nbtrain.tokenizer import BPETokenizer, load_tokenizer
from nbtrain.train import OptState, init_opt_state
from nbtrain.tree import Layout, Tree, check_params

CONFIG, MODEL, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OWN_TOKENIZER = "nbtrain_tokenizer.json"
EXPORTED = (CONFIG, MODEL, TOKENIZER, TOKENIZER_CONFIG, OWN_TOKENIZER)  # what save_pretrained writes
MARK = "exported_by"  # in config.json: the folder is ours to replace
MAX_JSON_BYTES = 2**24  # the index of the largest GPT-2 is 50 kB
WEIGHTS = ("F32", "F16", "BF16")

LEAVES = {
    "ln1_w": "ln_1.weight", "ln1_b": "ln_1.bias",
    "qkv_w": "attn.c_attn.weight", "qkv_b": "attn.c_attn.bias",
    "proj_w": "attn.c_proj.weight", "proj_b": "attn.c_proj.bias",
    "ln2_w": "ln_2.weight", "ln2_b": "ln_2.bias",
    "fc_w": "mlp.c_fc.weight", "fc_b": "mlp.c_fc.bias",
    "out_w": "mlp.c_proj.weight", "out_b": "mlp.c_proj.bias",
    "wte": "wte.weight", "wpe": "wpe.weight", "lnf_w": "ln_f.weight", "lnf_b": "ln_f.bias",
}  # fmt: skip
PREFIX, HEAD = "transformer.", "lm_head.weight"
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks, which older versions saved
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")  # a name, and no path

# What config.json may say where it says it; the first is what its absence means. reorder_and_upcast_attn is
# not among them: it changes the order of rounding, not the function.
REQUIRED: dict[str, tuple[tuple, str]] = {
    "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "GELU by tanh is the one that is computed"),
    "layer_norm_epsilon": ((1e-5,), "LayerNorm's epsilon is fixed"),
    "scale_attn_weights": ((True,), "attention is always scaled by 1 / sqrt(head size)"),
    "scale_attn_by_inverse_layer_idx": ((False,), "no layer has a scale of its own"),
    "add_cross_attention": ((False,), "there is no encoder to attend to"),
    "tie_word_embeddings": ((True,), "the output layer is the embedding"),
}
SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_positions": "block_size",
         "vocab_size": "vocab_size"}  # fmt: skip
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")


class Pretrained(NamedTuple):
    """What `load_pretrained` found."""

    config: GPTConfig
    params: Tree  # in the dtype and on the device asked for
    tokenizer: Any  # None where the folder has none


def load_pretrained(
    folder: str | Path, dtype: str = "auto", device: str = "auto", *, dropout: float | None = None
) -> Pretrained:
    """(config, params, tokenizer) of the GPT-2 in a `transformers` folder, to compute and to sample with.

    dtype and device as in nb.init. `dropout` replaces what config.json says. A folder whose model nbtrain
    would not compute exactly, or whose files are damaged, is InvalidValue with the file and the reason. To
    go on training from it: `load_init`.
    """
    place, storage = choose(dtype, device)
    config, master, tokenizer = _read(Path(folder), dropout)
    return Pretrained(config, _placed(master, storage, place), tokenizer)


def load_init(
    folder: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    *,
    dropout: float | None = None,
    seed: int = 0,
) -> tuple[GPTConfig, Tree, OptState, Any]:
    """(config, params, opt_state, tokenizer) to begin a training run with the weights in `folder`: that of
    `transformers`, of a checkpoint or of a run.

    opt_state is that of a run before its first step, with the fp32 weights as master; `seed` is dropout's.
    `dropout` replaces what the folder says; tokenizer is None where the folder has none.
    """
    folder = Path(folder)
    place, storage = choose(dtype, device)
    if is_pretrained(folder):
        config, master, tokenizer = _read(folder, dropout)
    else:
        found = load_checkpoint(folder, "cpu")
        of_record = found.params if found.opt_state is None else found.opt_state.master
        master = Tree(of_record.layout, of_record.buffer.astype(np.float32, copy=False))
        config, tokenizer = _with_dropout(found.config, dropout), found.tokenizer
    with use(place):
        params = _placed(master, storage, place)
        if storage == np.float32:
            return config, params, init_opt_state(params, seed=seed), tokenizer
        on_device = Tree(master.layout, to_device(master.buffer, place))
        return config, params, init_opt_state(params, on_device, seed), tokenizer


def save_pretrained(folder: str | Path, params: Tree, config: GPTConfig, tokenizer=None) -> Path:
    """Writes a folder that `transformers` loads as GPT2LMHeadModel, and returns it.

    params: of `config`, any dtype and device; written in fp32. After training in 16 bits pass
    opt_state.master, the weights of record. The folder must be absent, empty or an earlier export, which is
    replaced once the new one is on the disk.
    """
    folder = Path(folder).resolve()
    if not isinstance(config, GPTConfig) or not isinstance(params, Tree):
        raise InvalidType(
            "save_pretrained expects (folder, params: Tree, config: GPTConfig); got "
            f"{type(params).__name__}, {type(config).__name__}."
        )
    check_params(params, config.leaves())
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise InvalidValue(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model only {config.vocab_size:,}. Pass the "
            "tokenizer that it was trained with."
        )
    check_exportable(folder)

    def fill(fresh: Path) -> None:
        _write_model(fresh / MODEL, params, config)
        end = _write_tokenizer(fresh, tokenizer)
        _write_json(fresh / CONFIG, _config_json(config, end))

    write_folder(folder, fill)
    return folder


def is_pretrained(folder: str | Path) -> bool:
    """Whether `folder` is meant as one of `transformers`, not a checkpoint or a run of nbtrain."""
    folder = Path(folder)
    # Not "checkpoint*": transformers' Trainer keeps checkpoint-500 and so on beside its model.
    of_ours = any((folder / name).exists() for name in (INDEX, STEPS))
    return not of_ours and any((folder / name).exists() for name in (CONFIG, MODEL, SHARDS, *PICKLES))


def check_exportable(folder: Path) -> None:
    """Raises unless `folder` is absent, empty or an earlier export: what `save_pretrained` replaces."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InvalidValue(f"{folder} is a file; an export is a folder. Take another name.")
    entries = {entry.name for entry in folder.iterdir()}
    other = sorted(entries - set(EXPORTED))
    if not other and entries and not _is_marked(folder / CONFIG):
        other = sorted(entries)
    if other:
        raise InvalidValue(
            f"{folder} holds {other[0]!r}, which is no part of an earlier export, and exporting replaces the "
            "whole folder. Take a folder of its own."
        )


# ----------------------------------------------------------------------------
# In


def _placed(master: Tree, storage, place: str) -> Tree:
    """The fp32 weights as params in `storage` on `place`."""
    if storage == np.float16:
        for name, leaf in master:
            largest = float(np.abs(leaf).max())
            if largest >= 65520:  # what rounds to infinity
                raise InvalidValue(
                    f"{name} holds {largest:.6g}, beyond fp16's largest number, 65504. Take dtype='bf16' or "
                    "'fp32'."
                )
    with use(place):
        return Tree(master.layout, to_device(master.buffer.astype(storage, copy=False), place))


def _read(folder: Path, dropout: float | None) -> tuple[GPTConfig, Tree, Any]:
    """(config, fp32 weights on the host, tokenizer) of a `transformers` folder."""
    if not folder.is_dir():
        raise InvalidValue(f"expected a folder with {CONFIG} and {MODEL} at {folder}, where there is none.")
    config = _read_config(folder / CONFIG, dropout)
    with contextlib.ExitStack() as stack:
        master = _read_tensors(*_files(folder, stack), config)
    return config, master, _read_tokenizer(folder, config)


def _read_json(file: Path) -> dict:
    hint = " Give the folder that save_pretrained of transformers wrote."
    values = read_json(file, MAX_JSON_BYTES, hint=hint)
    if not isinstance(values, dict):
        raise InvalidValue(f"{file}: expected a JSON object; got a {type(values).__name__}.")
    return values


def _read_config(file: Path, dropout: float | None) -> GPTConfig:
    values = _read_json(file)
    if values.get("model_type") != "gpt2":
        raise InvalidValue(
            f"{file}: model_type must be 'gpt2', the architecture that nbtrain has; got "
            f"{shown(values.get('model_type'))}."
        )
    for name, (accepted, reason) in REQUIRED.items():
        value = values.get(name, accepted[0])
        if value not in accepted:
            raise InvalidValue(
                f"{file}: {name} must be {' or '.join(map(repr, accepted))}; got {shown(value)}. In nbtrain "
                f"{reason}, so this model would compute something else."
            )
    sizes = {}
    for name, field in SIZES.items():
        if name not in values:
            raise InvalidValue(f"{file} lacks {name}. Write it there: the weights do not tell it.")
        sizes[field] = values[name]
    if dropout is None:
        found = [values.get(name, 0.1) for name in DROPOUTS]
        if not found[0] == found[1] == found[2]:
            raise InvalidValue(
                f"{file}: {', '.join(DROPOUTS)} are {', '.join(map(shown, found))}; nbtrain has one dropout "
                "for the three. Make them equal, or say dropout=0.0 where this file is loaded."
            )
        dropout = found[0]
    try:
        config = GPTConfig(**sizes, dropout=dropout)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{file}: {str(error).replace('block_size', 'n_positions')[:300]}") from None
    inner = values.get("n_inner")
    if inner is not None and (isinstance(inner, bool) or inner != 4 * config.n_embd):
        raise InvalidValue(
            f"{file}: n_inner must be null or 4 * n_embd = {4 * config.n_embd}; got {shown(inner)}. "
            "nbtrain's MLP is four times as wide as the stream."
        )
    return config


def _with_dropout(config: GPTConfig, dropout: float | None) -> GPTConfig:
    return config if dropout is None else dataclasses.replace(config, dropout=dropout)


Found = dict[str, tuple[Path, Any, str]]  # tensor without its prefix -> file, the file opened, name in it


def _files(folder: Path, stack: contextlib.ExitStack) -> tuple[Path, Found]:
    """(model.safetensors or the index, every tensor there is)."""
    source = folder / MODEL
    if source.is_file():
        shards: dict[Path, set[str] | None] = {source: None}
    elif (folder / SHARDS).is_file():
        source = folder / SHARDS
        shards = dict(_shards(folder))
    elif pickle := next((name for name in PICKLES if (folder / name).exists()), None):
        raise InvalidValue(
            f"{folder / pickle} is a pickle, which can run any code as it is read, so nbtrain reads none. "
            "Where you trust it, convert it with transformers: GPT2LMHeadModel.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes model.safetensors."
        )
    else:
        raise InvalidValue(
            f"{folder} holds no weights: expected {MODEL}, or {SHARDS} with its shards. Give the folder that "
            "save_pretrained of transformers wrote."
        )
    found: Found = {}
    for file, expected in shards.items():
        try:
            opened = stack.enter_context(safe_open(file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise InvalidValue(f"{file} is damaged: it is no safetensors file ({error}).") from None
        names = set(opened.keys())
        if expected is not None and names != expected:
            name = sorted(names ^ expected)[0]
            which = "lacks" if name in expected else "holds"
            raise InvalidValue(
                f"{file} {which} the tensor {shown(name)}, and {source} says otherwise. The files "
                "are not of one model: take them from one place again."
            )
        for name in sorted(names):
            plain = name.removeprefix(PREFIX)
            if plain in found:
                raise InvalidValue(
                    f"{file}: {shown(name)} is the second tensor of that name, beside "
                    f"{shown(found[plain][2])} in {found[plain][0].name}."
                )
            found[plain] = file, opened, name
    return source, found


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Shard -> names of the tensors that the index says are in it."""
    file = folder / SHARDS
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidValue(f'{file}: expected "weight_map", tensor name -> shard; got {shown(weight_map)}.')
    shards: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard):
            raise InvalidValue(
                f"{file}: {shown(tensor)} must lie in a file of the same folder, such as "
                f"model-00001-of-00002.safetensors; got {shown(shard)}."
            )
        shards.setdefault(folder / shard, set()).add(tensor)
    for path in shards:
        if not path.is_file():
            raise InvalidValue(f"{path} is missing; {SHARDS} names it. Fetch it again.")
        _check_inside(path)
    return shards


def _check_inside(path: Path) -> None:
    """Raises where a shard is a link out of its folder. The Hub's cache keeps every file as a link from
    snapshots/<revision>/ to blobs/, and that is inside."""
    folder, target = path.parent.resolve(), path.resolve()
    in_cache = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if target.parent != folder and not in_cache:
        raise InvalidValue(
            f"{path} is a link to {target}, outside the folder. Put the file itself there, or give the "
            "folder where it lies."
        )


def _leaf_names(config: GPTConfig) -> dict[str, str]:
    """Leaf -> name in `transformers`, without the prefix."""
    names = {}
    for leaf, _ in config.leaves():
        section, _, name = leaf.rpartition(".")
        names[leaf] = (section.replace("blocks.", "h.") + "." if section else "") + LEAVES[name]
    return names


def _read_tensors(source: Path, found: Found, config: GPTConfig) -> Tree:
    """The fp32 weights. Every name, shape and dtype is checked before memory is taken."""
    names, layout = _leaf_names(config), Layout.of(config.leaves())
    shapes = {names[leaf.name]: leaf.shape for leaf in layout.leaves}
    shapes[names["wte"]] = (config.vocab_size, config.n_embd)
    for plain, shape in shapes.items():
        if plain not in found:
            raise InvalidValue(
                f"{source} lacks the tensor {plain!r}, which {CONFIG}'s sizes ask for. "
                "The two do not belong together, or the file is not whole."
            )
        _check_tensor(*found[plain], shape)
    for plain, (file, opened, name) in found.items():
        if plain == HEAD:
            _check_tensor(file, opened, name, shapes["wte.weight"])
        elif plain not in shapes and not BUFFER.fullmatch(plain):
            raise InvalidValue(
                f"{file} holds the tensor {shown(name)}, which GPT-2 with {CONFIG}'s sizes does not have."
            )

    master = Tree(layout, np.zeros(layout.size, np.float32))
    for leaf, x in master:
        file, opened, name = found[names[leaf]]
        x[: shapes[names[leaf]][0]] = _get(file, opened, name)
        if not np.isfinite(x).all():
            raise InvalidValue(
                f"{file}: {name} holds inf or nan. The file is damaged, or its training failed."
            )
    if HEAD in found:
        file, opened, name = found[HEAD]
        if not np.array_equal(_get(file, opened, name), master["wte"][: config.vocab_size]):
            raise InvalidValue(
                f"{file}: {name} is not wte.weight, so this model has an output layer of its own; nbtrain's "
                "is the embedding (tied)."
            )
    return master


def _check_tensor(file: Path, opened, name: str, shape: tuple[int, ...]) -> None:
    x = opened.get_slice(name)
    found, dtype = tuple(x.get_shape()), x.get_dtype()
    if found != shape:
        raise InvalidValue(f"{file}: {name} must be {shape} by {CONFIG}; it is {shown(found)}.")
    if dtype not in WEIGHTS:
        raise InvalidValue(
            f"{file}: {name} must be {', '.join(WEIGHTS)}; it is {dtype}. Quantized weights cannot be "
            "trained: take the original ones."
        )


def _get(file: Path, opened, name: str) -> np.ndarray:
    try:
        return opened.get_tensor(name).astype(np.float32, copy=False)
    except (SafetensorError, OSError) as error:
        raise InvalidValue(f"{file}: {name} cannot be read ({error}).") from None


def _read_tokenizer(folder: Path, config: GPTConfig):
    if (folder / OWN_TOKENIZER).is_file():
        tokenizer: Any = load_tokenizer(folder / OWN_TOKENIZER)
    elif any((folder / name).is_file() for name in (TOKENIZER, "vocab.json", "encoder.json")):
        tokenizer = BPETokenizer.from_folder(folder)
    else:
        return None
    if tokenizer.vocab_size > config.vocab_size:
        raise InvalidValue(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids, the model in {CONFIG} only "
            f"{config.vocab_size:,}."
        )
    return tokenizer


# ----------------------------------------------------------------------------
# Out


def _config_json(config: GPTConfig, end: int | None) -> dict:
    """config.json; `end` is the id of the end of a text, where the tokenizer has one."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, field) for name, field in SIZES.items()},
        "n_inner": None,
        **{name: accepted[0] for name, (accepted, _) in REQUIRED.items()},
        **{name: config.dropout for name in DROPOUTS},
        "bos_token_id": end,
        "eos_token_id": end,
        MARK: f"nbtrain {nbtrain.__version__}",
    }


def _write_model(file: Path, params: Tree, config: GPTConfig) -> None:
    """model.safetensors in fp32, one leaf after the other from wherever it is, without the padding."""
    names = _leaf_names(config)
    rows = {leaf.name: leaf.shape[0] for leaf in params.layout.leaves} | {"wte": config.vocab_size}
    tensors = {PREFIX + names[leaf]: x[: rows[leaf]] for leaf, x in params}
    write_tensors(file, tensors, {"format": "pt"})  # transformers asks for it


def _write_tokenizer(folder: Path, tokenizer) -> int | None:
    """The tokenizer's file, if there is one; returns the id of the end of a text, if there is one."""
    if tokenizer is None:
        return None
    values = tokenizer.to_dict()
    if tokenizer.kind != BPETokenizer.kind:
        _write_json(folder / OWN_TOKENIZER, values)
        return None
    _write(folder / TOKENIZER, values["tokenizer"].encode("utf-8"))
    ends = {name: tokenizer.eot_token for name in ("bos_token", "eos_token")}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / TOKENIZER_CONFIG, told | ({} if tokenizer.eot is None else ends))
    return tokenizer.eot


def _write_json(file: Path, values: dict) -> None:
    _write(file, json.dumps(values, indent=2).encode("ascii") + b"\n")


def _write(file: Path, data: bytes) -> None:
    with open(file, "xb") as opened:
        opened.write(data)
        flush(opened)


def _is_marked(file: Path) -> bool:
    try:
        return str(_read_json(file).get(MARK)).startswith("nbtrain ")
    except InvalidValue:
        return False
