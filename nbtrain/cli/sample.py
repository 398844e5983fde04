"""nbtrain sample"""

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import command
from nbtrain.errors import InvalidValue

MOST_PROMPT_BYTES = 16 << 20  # of a file of prompts
MOST_TEXTS = 10_000  # at once: each takes a row of keys and values for every token


@command
def sample(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to go on with; several are written at once.", show_default="a new line"),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A text file with a prompt on each line, instead.")
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Texts for each prompt.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add, at most.")] = 400,
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
    """Print text that a model writes: one as it comes, several when they are done.

    A text ends where the tokenizer's end-of-text is drawn, if it has one, or with --max-new-tokens.

    Example: nbtrain sample runs/demo --prompt "ROMEO" --max-new-tokens 200
    Example: nbtrain sample runs/demo --prompt "KING" --prompt "QUEEN" --top-k 20
    """
    if prompt and prompts_file is not None:
        raise typer.BadParameter("give --prompt or --prompts-file, not both.")
    prompts = prompt if prompts_file is None else read_prompts(prompts_file)
    given: list[str | None] = [*prompts] if prompts else [None]
    if len(given) * num_samples > MOST_TEXTS:
        raise typer.BadParameter(
            f"expected at most {MOST_TEXTS:,} texts, which are written side by side; got {len(given):,} "
            f"prompts x {num_samples:,} samples. Take fewer, several times, each with its own --seed."
        )
    from nbtrain.checkpoint import load

    checkpoint = load(directory, device)
    if checkpoint.tokenizer is None:
        raise InvalidValue(
            f"{checkpoint.meta['path']} holds no tokenizer, so its tokens are no text here. Use "
            "nbtrain.generate on ids."
        )
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    texts = [text for text in given for _ in range(num_samples)]
    if len(texts) == 1:
        print_sample(checkpoint, texts[0], max_new_tokens, **options)
    else:
        print_samples(checkpoint, texts, max_new_tokens, **options)


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty; a byte order mark is no text."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes > MOST_PROMPT_BYTES:
            raise InvalidValue(
                f"{path}: expected at most {MOST_PROMPT_BYTES} bytes of prompts; got {n_bytes}. Split it."
            )
        prompts = [line for line in path.read_text("utf-8-sig").split("\n") if line]
    except OSError as error:
        raise InvalidValue(
            f"{path}: expected a text file of prompts; it cannot be read: {error.strerror}. Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path}: expected UTF-8 text; {error}. Save it as UTF-8.") from None
    if not prompts:
        raise InvalidValue(f"{path}: expected a prompt on each line; the file has none.")
    return prompts


def print_sample(checkpoint, prompt: str | None, max_new_tokens: int, **options) -> None:
    """Prints the prompt and, as it comes, what the model makes of it."""
    from nbtrain.generate import generate_stream

    tokenizer = checkpoint.tokenizer
    stream = generate_stream(  # checks the options, before anything is printed
        checkpoint.params, checkpoint.config, _ids(tokenizer, prompt), max_new_tokens=max_new_tokens,
        stop=tokenizer.eot, **options,
    )  # fmt: skip
    print(printable(prompt or ""), end="", flush=True)
    n_unknown = 0

    def known() -> Iterator[int]:
        nonlocal n_unknown
        for token in stream:
            n_unknown += int(token >= tokenizer.vocab_size)
            if token < tokenizer.vocab_size and token != tokenizer.eot:
                yield int(token)

    try:
        for piece in pieces(tokenizer, known()):
            print(printable(piece), end="", flush=True)
    finally:
        print()  # an error has a line of its own
    _tell_unknown(n_unknown, checkpoint)


def pieces(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of ids bit by bit, as they come; together it is what `decode` makes of all of them. Bytes at
    an end may be the first of a character, and wait for the others.

    Ids are decoded behind those of the piece before, since a decoder may drop a space at the beginning; not
    behind all, which would take longer from token to token.
    """
    ids: list[int] = []
    begin = end = 0  # ids[begin:end] are the piece before
    before = now = ""
    for token in tokens:
        ids.append(token)
        now = tokenizer.decode(ids[begin:])
        if not now.endswith("\ufffd"):
            yield now[len(before) :]
            begin, end = end, len(ids)
            before = now = tokenizer.decode(ids[begin:])
    yield now[len(before) :]


def print_samples(checkpoint, prompts: list[str | None], max_new_tokens: int, **options) -> None:
    """Writes a text for each prompt at the same time, and prints them one after the other under numbers."""
    from nbtrain.generate import generate

    tokenizer = checkpoint.tokenizer
    ids = [_ids(tokenizer, prompt) for prompt in prompts]
    texts = generate(
        checkpoint.params, checkpoint.config, ids, max_new_tokens=max_new_tokens, stop=tokenizer.eot,
        **options,
    )  # fmt: skip
    n_unknown = 0
    for i, (prompt, prompt_ids, whole) in enumerate(zip(prompts, ids, texts, strict=True), 1):
        fresh = whole[len(prompt_ids) :]
        known = fresh[fresh < tokenizer.vocab_size]
        n_unknown += len(fresh) - len(known)
        text = tokenizer.decode(known[known != tokenizer.eot])
        print(f"--- {i}\n{printable((prompt or '') + text)}")
    _tell_unknown(n_unknown, checkpoint)


def _tell_unknown(n: int, checkpoint) -> None:
    """A model may have more ids than its tokenizer: --vocab-size was rounded up, and training is young."""
    if n:
        ids, model_ids = checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size
        print(
            f"nbtrain: {n:,} tokens are left out: the tokenizer has {ids:,} ids, the model {model_ids:,}.",
            file=sys.stderr,
        )


def _ids(tokenizer, prompt: str | None):
    """The prompt's ids; a new line's where there is none."""
    if prompt:
        return tokenizer.encode(prompt)
    try:
        return tokenizer.encode("\n")
    except InvalidValue:  # a vocabulary without lines
        return [0]


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters but newline and tab, format characters,
    surrogates."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
