"""What the commands share: the application, how a failure ends, and the choices that several offer."""

import functools
import sys
from enum import StrEnum
from typing import Annotated

import typer

import nbtrain
from nbtrain.device.place import enough_memory
from nbtrain.errors import NbtrainError

app = typer.Typer(
    help="Trains GPT-style language models with kernels written in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130


class TokenizerKind(StrEnum):
    char = "char"
    byte = "byte"
    bpe = "bpe"


class Dtype(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Format(StrEnum):
    auto = "auto"
    nbtrain = "nbtrain"
    llmc = "llm.c"
    nanogpt = "nanogpt"


def command(function):
    """A command of `app` whose failures are one line and an exit code."""
    name = function.__name__.removesuffix("_")
    advice = "Take less at once, or a machine with more memory."
    if name == "train":
        advice = "`nbtrain plan` tells what a run takes, before it begins."

    @functools.wraps(function)
    def guarded(*args, **options):
        try:
            with enough_memory(f"nbtrain {name}", advice):
                return function(*args, **options)
        except BrokenPipeError:
            raise  # the reader of our output has left; typer ends quietly
        except (NbtrainError, OSError) as error:
            print(f"nbtrain: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return app.command(name)(guarded)


def _version(asked: bool) -> None:
    if asked:
        print(f"nbtrain {nbtrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass
