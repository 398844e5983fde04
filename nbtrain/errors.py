"""What nbtrain raises. Each error is an `NbtrainError` and the built-in one that people expect besides.

Every message says what was expected, what came, and what to do.
"""


class NbtrainError(Exception):
    """Base of everything that nbtrain raises on purpose."""


class InvalidValue(NbtrainError, ValueError):
    """A shape, a number, a name or a file that cannot be right."""


class InvalidType(NbtrainError, TypeError):
    """A dtype or a container of the wrong kind, or arrays of two devices together."""


class Unavailable(NbtrainError, RuntimeError):
    """Something asked for that this machine does not have: a GPU, a library, enough memory."""


def shown(value) -> str:
    """A value out of a file, as a message may hold it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "…"
