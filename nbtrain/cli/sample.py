"""nbtrain sample"""

import unicodedata
from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import command
from nbtrain.errors import InvalidValue


@command
def sample(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on with.", show_default="a line's beginning")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 400,
    temperature: Annotated[
        float, typer.Option(help="Below 1 likelier tokens are favoured; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that reach p together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
) -> None:
    """Print text that a model writes.

    Example: nbtrain sample runs/demo --prompt "ROMEO" --max-new-tokens 200
    """
    from nbtrain.checkpoint import load

    checkpoint = load(directory, device)
    if checkpoint.tokenizer is None:
        raise InvalidValue(
            f"{checkpoint.meta['path']} holds no tokenizer, so its tokens are no text here. Use "
            "nbtrain.generate on ids."
        )
    print_sample(
        checkpoint, prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )


def print_sample(checkpoint, prompt: str | None, max_new_tokens: int, **options) -> None:
    """Prints the prompt and, as it comes, what the model makes of it."""
    from nbtrain.generate import generate_stream

    tokenizer = checkpoint.tokenizer
    if prompt is None:
        try:
            ids = tokenizer.encode("\n")
        except InvalidValue:  # a vocabulary without lines
            ids = [0]
    else:
        ids = tokenizer.encode(prompt)
        print(printable(prompt), end="", flush=True)
    printed, tokens = 0, []
    stream = generate_stream(
        checkpoint.params, checkpoint.config, ids, max_new_tokens=max_new_tokens, **options
    )
    for token in stream:
        tokens.append(int(token))
        text = tokenizer.decode(tokens)
        whole = text.rstrip("\ufffd")  # bytes at the end may be the first of a character
        print(printable(whole[printed:]), end="", flush=True)
        printed = max(printed, len(whole))
    print(printable(tokenizer.decode(tokens)[printed:]) if tokens else "")


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters but newline and tab, format characters,
    surrogates."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
