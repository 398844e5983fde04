"""nbtrain import"""

from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import command


@command
def import_(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a GPT-2: config.json and model.safetensors, as transformers saves."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
) -> None:
    """Turn a Hugging Face folder into a checkpoint of nbtrain.

    The weights are kept in fp32, the tokenizer comes along. nbtrain train --init takes either folder.

    Example: nbtrain import gpt2 --out checkpoints/gpt2
    """
    from nbtrain.checkpoint import check_replaceable, save
    from nbtrain.huggingface import load_pretrained

    check_replaceable(out)
    config, params, tokenizer = load_pretrained(folder, "fp32", "cpu")
    save(out, params, config=config, tokenizer=tokenizer)
    print(f"{out}: {params.n_params:,} parameters, {_sizes(config)}, {_ids(tokenizer)}")


def _sizes(config) -> str:
    return (
        f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, {config.block_size} "
        f"positions, vocabulary {config.vocab_size:,}"
    )


def _ids(tokenizer) -> str:
    return f"tokenizer {tokenizer.kind}" if tokenizer is not None else "no tokenizer"
