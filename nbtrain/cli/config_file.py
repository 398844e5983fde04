"""Options of a command in a TOML file, named as its flags with _ for -. A flag on the command line wins."""

import difflib
import sys
import tomllib
import types
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from nbtrain.errors import InvalidValue, NbtrainError, shown
from nbtrain.files import read_bounded

MAX_BYTES = 2**20
INTEGER = 2**64  # a seed may have so many bits


def from_file(context: typer.Context, path: Path | None, annotations: dict[str, Any]) -> None:
    """Makes what is in the file the default of each option; for the callback of an eager --config.

    annotations: those of the command's function. A file that is wrong ends the command with exit code 1.
    """
    if path is None:
        return
    try:
        context.default_map = read(Path(path), annotations)
    except NbtrainError as error:
        print(f"nbtrain: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def read(path: Path, annotations: dict[str, Any]) -> dict[str, Any]:
    """The options in a TOML file, each of the type that `annotations` says. InvalidValue names the file."""
    known = {name: kind for name, kind in map(_kind, annotations.items()) if kind is not None}
    try:
        content = read_bounded(path, MAX_BYTES, "at most {} bytes of options")
    except OSError as error:
        raise InvalidValue(
            f"{path}: expected a TOML file of options; it cannot be read: {error.strerror}. Check the path."
        ) from None
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is no TOML: {error}.") from None
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1, 0.0)[0]
            raise InvalidValue(
                f"{path}: unknown option {shown(name)}; the nearest known one is {near!r}. The flags of "
                "--help are the options, with _ for -."
            )
    return {name: _checked(path, name, value, known[name]) for name, value in values.items()}


def _kind(item) -> tuple[str, Any]:
    """(name, type) of an option; the type is None for what no file may hold."""
    name, kind = item
    if get_origin(kind) is not Annotated or name == "config":
        return name, None
    kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        kind = next(one for one in get_args(kind) if one is not type(None))
    return name, kind


def _checked(path: Path, name: str, value, kind):
    """The value as the command takes it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        want, fits = "true or false", isinstance(value, bool)
    elif kind is int:
        want, fits = "an integer of 64 bits", number and isinstance(value, int) and abs(value) < INTEGER
    elif kind is float:
        want, fits = "a number", number and (isinstance(value, float) or abs(value) < INTEGER)
    elif get_origin(kind) is list:
        want, fits = "a list of strings", isinstance(value, list)
        fits = fits and all(isinstance(x, str) and "\0" not in x for x in value)
    elif get_origin(kind) is tuple:
        n = len(get_args(kind))
        want, fits = f"a list of {n} numbers", isinstance(value, list) and len(value) == n
        fits = fits and all(_checked(path, name, x, float) is not None for x in value)
    elif issubclass(kind, StrEnum):
        want, fits = f"one of {', '.join(kind)}", isinstance(value, str) and value in list(kind)
    else:
        want, fits = "a string", isinstance(value, str) and "\0" not in value
    if not fits:
        raise InvalidValue(f"{path}: {name} must be {want}; got {shown(value)}.")
    return tuple(value) if get_origin(kind) is tuple else value
