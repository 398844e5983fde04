"""nbtrain prepare"""

from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import TokenizerKind, command


@command
def prepare(
    text: Annotated[
        Path | None, typer.Argument(help="A text file, or a folder of .txt and .md files.")
    ] = None,
    shakespeare: Annotated[bool, typer.Option("--shakespeare", help="Shakespeare's plays instead.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for train.bin, val.bin, tokenizer.json and meta.json.")
    ] = Path("data"),
    tokenizer: Annotated[
        TokenizerKind, typer.Option(help="One id a character, or one a byte.")
    ] = TokenizerKind.char,
    val_fraction: Annotated[float, typer.Option(help="Share of the text, at its end, for validation.")] = 0.1,
) -> None:
    """Turn a text into token files.

    Example: nbtrain prepare novels/ --out data --tokenizer byte
    """
    if (text is not None) == shakespeare:
        raise typer.BadParameter("give a text file or folder, or --shakespeare.")
    from nbtrain.text import prepare_text, read_text, shakespeare_text

    read = read_text(text) if text is not None else shakespeare_text()
    prepared = prepare_text(read, out, make_tokenizer(tokenizer, read), val_fraction)
    print(f"{prepared.train}: {prepared.n_train:,} tokens")
    print(f"{prepared.val}: {prepared.n_val:,} tokens")
    print(f"{prepared.tokenizer}: {tokenizer.value}, {prepared.vocab_size:,} ids")


def make_tokenizer(kind: TokenizerKind, text: str):
    from nbtrain.tokenizer import ByteTokenizer, CharTokenizer

    return CharTokenizer.from_text(text) if kind is TokenizerKind.char else ByteTokenizer()
