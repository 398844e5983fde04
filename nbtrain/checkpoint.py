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
import functools
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import nbtrain
from nbtrain.config import GPTConfig, TrainConfig, from_dict
from nbtrain.device import FLOATS, blas
from nbtrain.device.machine import machine
from nbtrain.device.place import resolve_device, to_device, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import flush, leftovers, write_folder
from nbtrain.precision import LossScale
from nbtrain.tensor_file import Spec, open_tensors, write_tensors
from nbtrain.tokenizer import from_dict as tokenizer_from_dict
from nbtrain.train import OptState
from nbtrain.tree import Layout, Tree

VERSION = 1
FORMAT = "nbtrain checkpoint"
MODEL, OPTIMIZER, INDEX = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
MAX_INDEX_BYTES = 2**26  # the largest tokenizer is a quarter of it
STEPS = "checkpoints"  # in a run's folder: its checkpoints, each in a folder of its step
STEP = re.compile(r"(step_\d{8,})(\.(tmp|old)-[0-9a-f]{8})?")
REPLACED = "replaced"  # in that: those that a new run replaces, until it has saved one
LIBRARIES = ("numpy", "numba", "llvmlite", "scipy", "ml-dtypes", "safetensors")
GPU_LIBRARIES = (
    "numba-cuda", "numba-hip", "nvmath-python", "cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0",
    "nvidia-cublas", "nvidia-cublas-cu12",
)  # fmt: skip
NO_BITS = {"python", "safetensors"}  # no result depends on their versions


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
    *,
    config: GPTConfig,
    train_config: TrainConfig | None = None,
    tokenizer=None,
    data_state: dict | None = None,
    extra: dict | None = None,
) -> Path:
    """Writes a checkpoint and returns its folder; one that is there already is replaced once the new one is
    on the disk.

    Without `opt_state` only the weights are saved. `data_state` is what Batches.state() gives; `extra` is a
    dict of the caller's that JSON can hold.
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
    """checkpoint.json of this state, but for its files: everything that can be wrong with it is said here."""
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
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    dtype = next(name for name, dtype in FLOATS.items() if dtype == params.dtype)
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "config": dataclasses.asdict(config),
        "train_config": train_config and dataclasses.asdict(train_config),
        "tokenizer": tokenizer and tokenizer.to_dict(),
        "data_state": data_state,
        "extra": extra,
        "versions": _versions(),
        "machine": machine(params.device),
        "gemm_plan": blas.plan(),
        "files": {},
    }
    try:
        return json.loads(json.dumps(index))  # as it will be read: tuples are lists, keys are str
    except (TypeError, ValueError) as error:
        raise InvalidType(f"data_state and extra must be what JSON can hold: {error}.") from None


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
            file.write(json.dumps(index | {"digest": _digest(index)}, indent=1).encode("ascii"))
            flush(file)

    write_folder(directory, fill)


def load(
    directory: str | Path, device: str = "auto", *, passed_over: Callable[[str], None] | None = None
) -> Checkpoint:
    """The checkpoint in `directory`; of a run's folder, the newest good one.

    Every byte is checked before any of it is used. `passed_over` is told of each damaged one that the
    newest good one follows, and why; it prints on stderr where it is None. After a crash while a checkpoint
    was being replaced, the newest complete one is found.
    """
    place, _ = resolve_device(device)
    directory = Path(directory).resolve()
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
            (passed_over or _print)(f"passed over a damaged checkpoint: {damages[newer]}")
        return found
    told = " ".join(damages.values())
    raise InvalidValue(f"none of the {len(damages)} checkpoints in {folder} is good. {told}")


def _print(text: str) -> None:
    print(f"nbtrain: {text}", file=sys.stderr)


def _load(path: Path, place: str) -> Checkpoint:
    index = _read_index(path)
    for name, expected in index["files"].items():
        _check_file(path / name, expected)
    config = _config(path, GPTConfig, index["config"])
    layout = Layout.of(config.leaves())
    dtype = FLOATS[index["dtype"]]
    with use(place):
        leaves = {leaf.name: (leaf.shape, "F32") for leaf in layout.leaves}
        with open_tensors(path / MODEL, leaves, told_by=INDEX) as tensors:
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
        index["train_config"] and _config(path, TrainConfig, index["train_config"]),
        {
            "path": path,
            "dtype": index["dtype"],
            "versions": index["versions"],
            "machine": index["machine"],
            "differs": _differences(path, index, place),
            "extra": index["extra"] or {},
        },
    )


def _differences(path: Path, index: dict, place: str) -> list[str]:
    """What is not as it was where the checkpoint was saved, and may so change bits. The plan of the GPU's
    products is taken from it where it can be."""
    there, here = index["machine"], machine(place)
    found = []
    if there.get("device") != here["device"]:
        found.append(f"device {_short(there.get('device'))}, here {here['device']}")
    else:
        for name in sorted(there.keys() | here.keys()):
            a, b = _short(there.get(name)), _short(here.get(name))
            if there.get(name) != here.get(name):
                found.append(f"other {name}" if a == b or len(a + b) > 80 else f"{name} {a}, here {b}")
    versions = _versions()
    for name in sorted((index["versions"].keys() | versions.keys()) - NO_BITS):
        a, b = index["versions"].get(name, "none"), versions.get(name, "none")
        if a != b and (place != "cpu" or name not in GPU_LIBRARIES):
            found.append(f"{_short(name)} {_short(a)}, here {_short(b)}")
    if place != "cpu" and there.get("device") == here["device"]:
        try:
            reason = blas.adopt(index["gemm_plan"])
        except InvalidValue as error:
            raise InvalidValue(f"{path / INDEX}: {error}") from None
        if reason is not None:
            found.append(reason)
    return found


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


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
        files = _read_index(path)["files"]
        return all((path / name).stat().st_size == expected["bytes"] for name, expected in files.items())
    except (InvalidValue, OSError):
        return False


def _find(directory: Path) -> Path:
    """The checkpoint that `directory` means."""
    directory = directory.resolve()
    if (directory / INDEX).is_file():
        return directory
    if directory.exists() and any(directory.iterdir() if directory.is_dir() else [directory]):
        raise InvalidValue(
            f"{directory} is no checkpoint: there is no {INDEX} in it. Give the folder that save wrote, or "
            "that of a run."
        )
    damages = []
    for leftover in leftovers(directory):
        try:
            for name, expected in _read_index(leftover)["files"].items():
                _check_file(leftover / name, expected)
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


# ----------------------------------------------------------------------------
# checkpoint.json


@functools.cache  # looking them up takes as long as copying a small model
def _versions() -> dict[str, str]:
    versions = {"nbtrain": nbtrain.__version__, "python": sys.version.split()[0]}
    for name in LIBRARIES + GPU_LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _digest(index: dict) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode("ascii")).hexdigest()


def _read_index(path: Path) -> dict:
    """checkpoint.json, its form checked: every field of `save` is there, and has its type."""
    file = path / INDEX
    if not file.is_file():
        raise InvalidValue(f"{file} is missing.")
    n_bytes = file.stat().st_size
    if n_bytes > MAX_INDEX_BYTES:
        raise InvalidValue(f"{file}: expected at most {MAX_INDEX_BYTES} bytes, there are {n_bytes}.")
    try:
        index = json.loads(file.read_bytes().decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{file} is damaged: {n_bytes} bytes that are no JSON ({error}).") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InvalidValue(
            f'{file} does not belong to a checkpoint of nbtrain: expected "format": "{FORMAT}".'
        )
    if index.get("version") != VERSION:
        raise InvalidValue(
            f"{file} has format version {str(index.get('version'))[:40]}; this nbtrain reads version "
            f"{VERSION}. Update nbtrain."
        )
    digest = index.pop("digest", None)
    if digest != _digest(index):
        raise InvalidValue(f"{file} is damaged: its digest does not belong to its content.")
    types = {
        "dtype": str, "config": dict, "train_config": dict | None, "tokenizer": dict | None,
        "data_state": dict | None, "extra": dict | None, "versions": dict, "machine": dict,
        "gemm_plan": dict, "files": dict,
    }  # fmt: skip
    for field, kind in types.items():
        if field not in index or not isinstance(index[field], kind):
            raise InvalidValue(f"{file}: {field!r} is missing or of the wrong type.")
    if index["dtype"] not in FLOATS:
        raise InvalidValue(f"{file}: dtype must be one of {', '.join(FLOATS)}; got {index['dtype'][:40]!r}.")
    # Names are compared, never followed: no path in the file leads anywhere.
    if set(index["files"]) not in ({MODEL}, {MODEL, OPTIMIZER}):
        raise InvalidValue(
            f"{file}: expected the files {MODEL} and perhaps {OPTIMIZER}; got "
            f"{str(sorted(index['files']))[:200]}."
        )
    for name, expected in index["files"].items():
        if (
            not isinstance(expected, dict)
            or not isinstance(expected.get("bytes"), int)
            or "sha256" not in expected
        ):
            raise InvalidValue(f"{file}: expected bytes and sha256 of {name}; got {str(expected)[:200]}.")
    return index


def _check_file(file: Path, expected: dict) -> None:
    if not file.is_file():
        raise InvalidValue(f"{file} is missing; expected {expected['bytes']} bytes.")
    n_bytes = file.stat().st_size
    if n_bytes != expected["bytes"]:
        raise InvalidValue(
            f"{file} is damaged: expected {expected['bytes']} bytes, there are {n_bytes}. Take another copy "
            "of the checkpoint."
        )
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected["sha256"]:
        raise InvalidValue(
            f"{file} is damaged: its {n_bytes} bytes are there, but not those that were saved (SHA-256 "
            f"{digest[:16]}…, expected {str(expected['sha256'])[:16]}…). Take another copy of the checkpoint."
        )


def _config(path: Path, kind, values: dict):
    try:
        return from_dict(kind, values)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{path / INDEX}: {error}") from None


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
    leaves = {f"{tree}.{leaf.name}": (leaf.shape, "F32") for tree in ("m", "v") for leaf in layout.leaves}
    scalars = {
        "step": ((1,), "I32"),
        "updates": ((1,), "I32"),
        "loss_scale": ((1,), "F32"),
        "good_steps": ((1,), "I32"),
        "seed": ((2,), "U32"),
    }
    optional: dict[str, Spec] = {"limits": ((2,), "F32")}
    with open_tensors(file, leaves | scalars, optional, told_by=INDEX) as tensors:
        m, v = (
            Tree(layout, to_device(_read_tree(layout, tensors, f"{t}.").buffer, place)) for t in ("m", "v")
        )
        names = set(tensors.keys()) - set(leaves)
        at = {name: to_device(tensors.get_tensor(name), place) for name in names}
    scale = LossScale(at["loss_scale"], at["good_steps"])
    return OptState(at["step"], at["updates"], master, m, v, scale, at["seed"], at.get("limits"))
