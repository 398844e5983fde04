"""nbtrain prepare"""

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import TokenizerKind, command
from nbtrain.cli.progress import progress
from nbtrain.errors import InvalidValue


class ShardFormat(StrEnum):
    nbtrain = "nbtrain"
    llmc = "llm.c"


@command
def prepare(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text, .jsonl and .parquet files, folders of them (texts: .txt and .md), and - for stdin."
        ),
    ] = None,
    shakespeare: Annotated[bool, typer.Option("--shakespeare", help="Shakespeare's plays instead.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for train_*.bin, val_*.bin, tokenizer.json and meta.json.")
    ] = Path("data"),
    tokenizer: Annotated[
        TokenizerKind,
        typer.Option(help="One id a character, one a byte, or byte pairs learnt here."),
    ] = TokenizerKind.char,
    vocab_size: Annotated[int | None, typer.Option(help="Most ids of --tokenizer bpe, 257 or more.")] = None,
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(
            help="An existing tokenizer instead: a tokenizer.json, or a folder with it, or with vocab.json "
            "and merges.txt."
        ),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Share for validation: of documents; of one text, its end.")
    ] = 0.1,
    field: Annotated[
        str | None,
        typer.Option(help="Field or column of the texts; makes stdin JSON-lines.", show_default="text"),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a file.")] = 100_000_000,
    format: Annotated[ShardFormat, typer.Option(help="Format of the token files.")] = ShardFormat.nbtrain,
    workers: Annotated[
        int | None, typer.Option(help="Processes that encode.", show_default="one a core")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever --out holds.")] = False,
) -> None:
    """Turn texts into token files.

    Killed at any moment, it goes on when the same command is given again.

    Example: nbtrain prepare corpus/ --out data --tokenizer bpe --vocab-size 8192
    Example: nbtrain prepare corpus/ --out data --tokenizer-from gpt2/
    """
    if bool(inputs) == shakespeare:
        raise typer.BadParameter("give a text file or folder, or --shakespeare.")
    if tokenizer_from is not None and (vocab_size is not None or tokenizer is not TokenizerKind.char):
        raise typer.BadParameter("--tokenizer-from goes without --tokenizer and --vocab-size.")
    if (vocab_size is not None) != (tokenizer is TokenizerKind.bpe):
        raise typer.BadParameter("--tokenizer bpe and --vocab-size go together.")
    from nbtrain.device.machine import cores
    from nbtrain.documents import Input
    from nbtrain.prepare import PROGRESS
    from nbtrain.prepare import prepare as run
    from nbtrain.text import shakespeare_text
    from nbtrain.tokenizer import load_tokenizer

    plays = [Input("Shakespeare's plays", None, "text", shakespeare_text().encode())] if shakespeare else []
    kind = tokenizer.value if tokenizer_from is None else load_tokenizer(tokenizer_from)
    with progress() as report, _resumable(out / PROGRESS):
        prepared = run(
            plays or inputs,
            out,
            tokenizer=kind,
            vocab_size=vocab_size,
            val_fraction=val_fraction,
            shard_tokens=shard_tokens,
            field=field,
            format=format.value,
            workers=workers or cores(),
            overwrite=overwrite,
            report=report,
        )
    kind = load_tokenizer(prepared.tokenizer).kind
    print(f"{out / prepared.train.name}: {prepared.n_train:,} tokens")
    print(f"{out / prepared.val.name}: {prepared.n_val:,} tokens")
    print(f"{prepared.tokenizer}: {kind}, {prepared.vocab_size:,} ids")


def make_tokenizer(kind: TokenizerKind, text: str, vocab_size: int | None = None):
    """A tokenizer of one text; a `vocab_size` is what "bpe" needs."""
    from nbtrain.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer

    if kind is TokenizerKind.bpe:
        if vocab_size is None:
            raise InvalidValue(
                "bpe needs to know how many ids to learn. Prepare the text first, with nbtrain prepare TEXT "
                "--tokenizer bpe --vocab-size N, and train on its files: --data."
            )
        return BPETokenizer.train([text], vocab_size)
    return CharTokenizer.from_text(text) if kind is TokenizerKind.char else ByteTokenizer()


@contextlib.contextmanager
def _resumable(progress: Path):
    """A context whose interruption says how to go on, where there is something to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if progress.exists():
            print("nbtrain: interrupted; the same command goes on from here.", file=sys.stderr)
        raise
