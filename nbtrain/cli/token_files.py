"""The tokenizer beside token files that a command is given."""

from collections.abc import Sequence

from nbtrain.errors import InvalidValue


def tokenizer_beside(files: Sequence[str]):
    """The tokenizer that `nbtrain prepare` left beside token files (paths or patterns), or None. Files that
    are not there are an error, and those of two tokenizers."""
    from nbtrain.data import resolve
    from nbtrain.tokenizer import load_tokenizer

    folders = dict.fromkeys(path.parent for path in resolve(list(files)))
    found = [path for folder in folders if (path := folder / "tokenizer.json").is_file()]
    tokenizers = list(map(load_tokenizer, found))
    for path, tokenizer in zip(found[1:], tokenizers[1:], strict=True):
        if tokenizer.vocabulary() != tokenizers[0].vocabulary():
            raise InvalidValue(
                f"token files of two tokenizers, {found[0]} and {path}: one id would be two texts. Prepare "
                "one with the other's: nbtrain prepare --tokenizer-from."
            )
    return tokenizers[0] if tokenizers else None


def check_beside(files: Sequence[str], tokenizer, whose: str) -> None:
    """Raises where another tokenizer than `tokenizer`, that of `whose`, lies beside token files; None is
    any."""
    if not files:
        return
    beside = tokenizer_beside(files)
    if None not in (beside, tokenizer) and beside.vocabulary() != tokenizer.vocabulary():
        raise InvalidValue(
            f"{files[0]} was made with another tokenizer ({beside.kind}, {beside.vocab_size:,} ids) than "
            f"{whose} has ({tokenizer.kind}, {tokenizer.vocab_size:,} ids): its ids are other texts there. "
            f"Prepare the text with that tokenizer: nbtrain prepare --tokenizer-from."
        )
