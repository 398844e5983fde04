"""A checkpoint: one folder with a model's weights, the optimizer's state and what else a run needs to go on.

    model.safetensors       the fp32 master weights, by leaf name, without the padding between leaves
    optimizer.safetensors   m.<leaf>, v.<leaf> in fp32, OptState's scalars; none without an opt_state
    checkpoint.json         format version, configs, dtype trained in, tokenizer, place in the data, library
                            versions, machine, plan of the GPU's products, size and SHA-256 of the files
                            above; "digest" covers all the rest

A folder is written beside its place, flushed to the disk, then renamed over, so a checkpoint is whole or
absent. Nothing is unpickled. What is damaged is named, and nothing of it is used. A run keeps several, as
`nbtrain.checkpoints` says; `load` takes the newest good one.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbtrain.checkpoint_index import (
    FORMAT,
    INDEX,
    LONGEST,
    MAX_INDEX_BYTES,
    MODEL,
    OPTIMIZER,
    VERSION,
    check_file,
    check_index,
    differences,
    digest_of,
    encoded,
    read_index,
    versions_here,
)
from nbtrain.config import GPTConfig, TrainConfig, from_dict
from nbtrain.device import FLOATS, blas
from nbtrain.device.machine import machine
from nbtrain.device.place import resolve_device, say_once, to_device, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import flush, leftovers, write_folder
from nbtrain.precision import LossScale
from nbtrain.tensor_file import Spec, check_specs, open_tensors, spec_of, write_tensors
from nbtrain.tokenizer import Tokenizer
from nbtrain.tokenizer import from_dict as tokenizer_from_dict
from nbtrain.train import OptState
from nbtrain.tree import Layout, Tree

STEPS = "checkpoints"  # in a run's folder: its checkpoints, each in a folder of its step
STEP = re.compile(r"(step_\d{8,})(\.(tmp|old)-[0-9a-f]{8})?")
REPLACED = "replaced"  # in that: those that a new run replaces, until it has saved one
UNWRITTEN = "save cannot write "


class Checkpoint(NamedTuple):
    """What `load` found. Trees and scalars are on the device asked for."""

    config: GPTConfig
    params: Tree  # in the dtype trained in: the master weights, cast
    opt_state: OptState | None  # None if only weights were saved
    tokenizer: Any  # one of nbtrain.tokenizer, or None
    data_state: dict | None  # for batches(..., state=)
    train_config: TrainConfig | None
    meta: dict  # path, dtype, versions, machine, extra; differs: texts, what here may give other bits


def save(
    directory: str | Path,
    params: Tree,
    opt_state: OptState | None = None,
    data_state: dict | None = None,
    *,
    config: GPTConfig | None = None,
    train_config: TrainConfig | None = None,
    tokenizer: Tokenizer | None = None,
    extra: dict | None = None,
) -> Path:
    """Writes a checkpoint and returns its folder; one that is there already is replaced once the new one is
    on the disk.

    `config` is the one that params were made with, and cannot be left out: a Tree does not know it. Without
    `opt_state` only the weights are saved. `data_state` is what Batches.state() gives; `extra` is a dict of
    the caller's that JSON can hold. What `load` would refuse is refused here, before anything is written.
    """
    directory = Path(directory).resolve()
    check_replaceable(directory)
    index = describe(
        params,
        opt_state,
        config=config,
        train_config=train_config,
        tokenizer=tokenizer,
        data_state=data_state,
        extra=extra,
    )
    write(directory, index, params if opt_state is None else opt_state.master, opt_state)
    return directory


def describe(params: Tree, opt_state: OptState | None, *, config, train_config, tokenizer, data_state, extra):
    """checkpoint.json of this state, but for its files: everything that can be wrong with it is said here, by
    the checks that reading makes."""
    for name, value, kind in (
        ("config", config, GPTConfig),
        ("params", params, Tree),
        ("opt_state", opt_state, OptState | None),
        ("train_config", train_config, TrainConfig | None),
        ("tokenizer", tokenizer, Tokenizer | None),
    ):
        if not isinstance(value, kind):
            wanted = kind.__name__ if isinstance(kind, type) else kind
            hint = " Pass config=, the one that params were made with." if name == "config" else ""
            raise InvalidType(f"save expects {name} of type {wanted}; got {type(value).__name__}.{hint}")
    layout = Layout.of(config.leaves())
    trees = {"params": params}
    if opt_state is not None:
        trees |= {"master": opt_state.master, "m": opt_state.m, "v": opt_state.v}
    for name, tree in trees.items():
        if tree.layout != layout:
            raise InvalidValue(
                f"{name} has {tree.n_params:,} elements in another layout than this config's "
                f"{layout.n_params:,}. Pass the config that they were made with."
            )
    of_model, of_state, optional = _specs(layout)
    weights = _specs_of(params if opt_state is None else opt_state.master)
    check_specs(weights, of_model, where=UNWRITTEN + MODEL, told_by="config")
    if opt_state is not None:
        found = _specs_of(opt_state.m, "m.") | _specs_of(opt_state.v, "v.")
        found |= {name: spec_of(x) for name, x in _scalars(opt_state).items()}
        check_specs(found, of_state, optional, where=UNWRITTEN + OPTIMIZER, told_by="config")
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    names = {dtype: name for name, dtype in FLOATS.items()}
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": names.get(params.dtype, str(params.dtype)),
        "config": dataclasses.asdict(config),
        "train_config": train_config and dataclasses.asdict(train_config),
        "tokenizer": tokenizer and tokenizer.to_dict(),
        "data_state": data_state,
        "extra": extra,
        "versions": versions_here(),
        "machine": machine(params.device),
        "gemm_plan": blas.plan(),
        "files": {MODEL: LONGEST} if opt_state is None else {MODEL: LONGEST, OPTIMIZER: LONGEST},
    }
    try:
        text = encoded(index | {"digest": LONGEST["sha256"]})
        index = json.loads(text)  # as it will be read: tuples are lists, keys are str
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidType(f"data_state and extra must be what JSON can hold: {error}.") from None
    if len(text) > MAX_INDEX_BYTES:
        raise InvalidValue(
            f"{UNWRITTEN}{INDEX}: expected at most {MAX_INDEX_BYTES:,} bytes, it would have {len(text):,}. "
            "Keep what is large in extra or data_state in a file of its own."
        )
    del index["digest"]
    check_index(index, UNWRITTEN + INDEX)
    _configs(UNWRITTEN + INDEX, index)
    return index


def check_tokenizer(tokenizer, config: GPTConfig) -> None:
    """Raises where the model lacks ids of the tokenizer."""
    if tokenizer.vocab_size > config.vocab_size:
        raise InvalidValue(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model only {config.vocab_size:,}. Make "
            "vocab_size as large, or take the tokenizer that the data were written with."
        )


def write(directory: Path, index: dict, weights: Tree, opt_state: OptState | None) -> None:
    """Puts the folder `directory` on the disk: `describe`'s index, the weights of record, and the state if
    there is one."""

    def fill(folder: Path) -> None:
        index["files"][MODEL] = write_tensors(folder / MODEL, dict(weights))
        if opt_state is not None:
            tensors = {f"{tree}.{name}": x for tree in ("m", "v") for name, x in getattr(opt_state, tree)}
            index["files"][OPTIMIZER] = write_tensors(folder / OPTIMIZER, tensors | _scalars(opt_state))
        with open(folder / INDEX, "xb") as file:
            file.write(encoded(index | {"digest": digest_of(index)}))
            flush(file)

    write_folder(directory, fill)


def load(
    directory: str | Path, device: str = "auto", *, passed_over: Callable[[str], None] | None = None
) -> Checkpoint:
    """The checkpoint in `directory`; of a run's folder, the newest good one.

    Every byte is checked before any of it is used. `passed_over` is told of each damaged one that the
    newest good one follows, and why; it prints on stderr where it is None. What device="auto" chose is said
    once, on stderr. After a crash while a checkpoint was being replaced, the newest complete one is found.
    """
    place, why = resolve_device(device)
    found = _newest(Path(directory).resolve(), place, passed_over or _print)
    if device == "auto":
        say_once(f"device {place}: {why}")
    return found


def _newest(directory: Path, place: str, passed_over: Callable[[str], None]) -> Checkpoint:
    folder = directory / STEPS if (directory / STEPS).is_dir() else directory
    paths = saved_steps(folder)
    if folder != directory and not paths:
        before = folder / REPLACED
        hint = f" Those of the run before are in {before}." if before.is_dir() else ""
        raise InvalidValue(f"there is no checkpoint in {folder} yet.{hint}")
    if (directory / INDEX).is_file() or not paths:
        return _load(_find(directory), place)
    damages: dict[Path, str] = {}
    while path := next((path for path in paths if path not in damages), None):
        try:
            found = _load(_find(path), place)
        except (InvalidValue, OSError) as error:
            damages[path] = str(error)
            paths = saved_steps(folder)  # a run that goes on saves a newer one and removes the oldest
            continue
        for newer in paths[: paths.index(path)]:
            passed_over(f"passed over a damaged checkpoint: {damages[newer]}")
        return found
    told = " ".join(damages.values())
    raise InvalidValue(f"none of the {len(damages)} checkpoints in {folder} is good. {told}")


def _print(text: str) -> None:
    print(f"nbtrain: {text}", file=sys.stderr)


def _load(path: Path, place: str) -> Checkpoint:
    index = read_index(path)
    for name, expected in index["files"].items():
        check_file(path / name, expected)
    config, train_config = _configs(path / INDEX, index)
    layout = Layout.of(config.leaves())
    dtype = FLOATS[index["dtype"]]
    with use(place):
        with open_tensors(path / MODEL, _specs(layout)[0], told_by=INDEX) as tensors:
            master = _read_tree(layout, tensors, "")
        with np.errstate(
            over="ignore"
        ):  # a weight beyond fp16's range became infinite when it was trained, too
            params = Tree(layout, to_device(master.buffer.astype(dtype, copy=False), place))
        opt_state = None
        if OPTIMIZER in index["files"]:
            # In fp32 the weights of record and the weights are one buffer.
            of_record = params if dtype == np.float32 else Tree(layout, to_device(master.buffer, place))
            opt_state = _read_opt_state(path / OPTIMIZER, layout, of_record, place)
    return Checkpoint(
        config,
        params,
        opt_state,
        _tokenizer(path, index["tokenizer"], config),
        index["data_state"],
        train_config,
        {
            "path": path,
            "dtype": index["dtype"],
            "versions": index["versions"],
            "machine": index["machine"],
            "differs": differences(path, index, place),
            "extra": index["extra"] or {},
        },
    )


# ----------------------------------------------------------------------------
# The folder


def check_replaceable(directory: Path) -> None:
    """Raises unless `directory` is absent, empty, or holds a checkpoint and nothing else: what `save`
    replaces."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise InvalidValue(f"{directory} is a file; a checkpoint is a folder. Take another name.")
    entries = {entry.name for entry in directory.iterdir()}
    if other := entries - {MODEL, OPTIMIZER, INDEX}:
        raise InvalidValue(
            f"{directory} holds {sorted(other)[0]!r}, which is no part of a checkpoint, and saving replaces "
            "the whole folder. Take a folder of its own."
        )


def saved_steps(folder: Path) -> list[Path]:
    """Where the checkpoints in a run's folder of them are or, after an interrupted save, were to be: the
    newest first."""
    if not folder.is_dir():
        return []
    names = {found[1] for entry in folder.iterdir() if (found := STEP.fullmatch(entry.name))}
    return [folder / name for name in sorted(names, key=step_of, reverse=True)]


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one in a run's folder of them, good or damaged; a save that a crash cut is none."""
    if not folder.is_dir():
        return False
    entries = [entry for entry in folder.iterdir() if STEP.fullmatch(entry.name)]
    return any(".tmp-" not in entry.name or is_complete(entry) for entry in entries)


def step_of(name: str) -> int:
    """The step of a folder called "step_00001000"."""
    return int(name.removeprefix("step_"))


def is_complete(path: Path) -> bool:
    """Whether the files of the checkpoint are there in their lengths; their bytes are not read."""
    try:
        files = read_index(path)["files"]
        return all((path / name).stat().st_size == expected["bytes"] for name, expected in files.items())
    except (InvalidValue, OSError):
        return False


def _find(directory: Path) -> Path:
    """The checkpoint that `directory` means."""
    directory = directory.resolve()
    if (directory / INDEX).is_file():
        return directory
    if directory.exists() and any(directory.iterdir() if directory.is_dir() else [directory]):
        if any((directory / name).is_file() for name in ("config.toml", "log.jsonl")):
            raise InvalidValue(
                f"{directory}: this run has saved no checkpoint yet. It saves one at its end, when Ctrl-C "
                "stops it, and every save_every steps: wait for it, or train anew if it has ended without."
            )
        if (directory / "config.json").is_file():
            raise InvalidValue(
                f"{directory} is a folder of transformers, by its config.json, and no checkpoint. Make one "
                f"of it: nbtrain import {directory} --out FOLDER"
            )
        raise InvalidValue(
            f"{directory} is no checkpoint: there is no {INDEX} in it. Give the folder that save wrote, or "
            "that of a run."
        )
    damages = []
    for leftover in leftovers(directory):
        try:
            for name, expected in read_index(leftover)["files"].items():
                check_file(leftover / name, expected)
        except InvalidValue as error:
            damages.append(str(error))
        else:
            return leftover
    found = (
        f" A save did not finish, and left nothing whole: {' '.join(damages)}"
        if damages
        else " Check the path."
    )
    raise InvalidValue(f"there is no checkpoint at {directory}.{found}")


def _configs(where: str | Path, index: dict) -> tuple[GPTConfig, TrainConfig | None]:
    """The configurations in a checkpoint.json."""
    of_step = index["train_config"]
    try:
        config = from_dict(GPTConfig, index["config"])
        return config, None if of_step is None else from_dict(TrainConfig, of_step)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{where}: {error}") from None


def _tokenizer(path: Path, values: dict | None, config: GPTConfig):
    if values is None:
        return None
    try:
        tokenizer = tokenizer_from_dict(values)
        check_tokenizer(tokenizer, config)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{path / INDEX}: {error}") from None
    return tokenizer


# ----------------------------------------------------------------------------
# Tensors


def _read_tree(layout: Layout, tensors, prefix: str) -> Tree:
    tree = Tree(layout, np.zeros(layout.size, np.float32))
    for name, leaf in tree:
        leaf[...] = tensors.get_tensor(prefix + name)
    return tree


def _specs(layout: Layout) -> tuple[dict[str, Spec], dict[str, Spec], dict[str, Spec]]:
    """What the file of the weights must hold, and that of the state; what the latter may hold."""
    weights: dict[str, Spec] = {leaf.name: (leaf.shape, "F32") for leaf in layout.leaves}
    scalars: dict[str, Spec] = {
        "step": ((1,), "I32"),
        "updates": ((1,), "I32"),
        "loss_scale": ((1,), "F32"),
        "good_steps": ((1,), "I32"),
        "seed": ((2,), "U32"),
    }
    moments = {f"{tree}.{name}": spec for tree in ("m", "v") for name, spec in weights.items()}
    return weights, moments | scalars, {"limits": ((2,), "F32")}


def _specs_of(tree: Tree, prefix: str = "") -> dict[str, Spec]:
    """What its leaves are; without a view of each, which the steps would wait for."""
    _, dtype = spec_of(tree.buffer)
    return {prefix + leaf.name: (leaf.shape, dtype) for leaf in tree.layout.leaves}


def _scalars(opt_state: OptState) -> dict:
    limits = {} if opt_state.limits is None else {"limits": opt_state.limits}
    return limits | {
        "step": opt_state.step,
        "updates": opt_state.updates,
        "loss_scale": opt_state.loss_scale.value,
        "good_steps": opt_state.loss_scale.good_steps,
        "seed": opt_state.seed,
    }


def _read_opt_state(file: Path, layout: Layout, master: Tree, place: str) -> OptState:
    _, expected, optional = _specs(layout)
    with open_tensors(file, expected, optional, told_by=INDEX) as tensors:
        m, v = (
            Tree(layout, to_device(_read_tree(layout, tensors, f"{t}.").buffer, place)) for t in ("m", "v")
        )
        names = {name for name in tensors.keys() if not name.startswith(("m.", "v."))}
        at = {name: to_device(tensors.get_tensor(name), place) for name in names}
    scale = LossScale(at["loss_scale"], at["good_steps"])
    return OptState(at["step"], at["updates"], master, m, v, scale, at["seed"], at.get("limits"))
