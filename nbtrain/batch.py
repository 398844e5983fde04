"""A batch: token ids, their targets, and the order that a reproducible embedding gradient needs."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from nbtrain.device import array_module, as_array, expect_ids, is_cupy
from nbtrain.errors import InvalidType, InvalidValue

Array = Any  # numpy.ndarray or cupy.ndarray
IGNORE_INDEX = -100
INT32 = np.iinfo(np.int32)


class Batch(NamedTuple):
    tokens: Array  # (A, B, T) int32
    targets: Array  # (A, B, T) int32, IGNORE_INDEX where none counts
    order: Array  # (A, B*T) int32, stable argsort of each micro-batch's tokens, for the embedding's gradient

    @classmethod
    def of(cls, tokens, targets) -> "Batch":
        """A batch of (B, T) or (A, B, T) arrays of any integer dtype, on the device where they are."""
        tokens, targets = as_array(tokens), as_array(targets)
        where = [str(x.device) if is_cupy(x) else "the host" for x in (tokens, targets)]
        if where[0] != where[1]:
            raise InvalidType(f"tokens are on {where[0]}, targets on {where[1]}; move one of them.")
        with tokens.device if is_cupy(tokens) else contextlib.nullcontext():
            tokens, targets = _as_ids("tokens", tokens), _as_ids("targets", targets)
            if tokens.shape != targets.shape:
                raise InvalidValue(
                    f"targets must have the shape of tokens; got {targets.shape} and {tokens.shape}."
                )
            return cls(tokens, targets, stable_order(tokens))


def check_batch(batch: Batch, vocab_size: int, ignore_index: int = IGNORE_INDEX) -> None:
    """Raises an InvalidValue naming array, position and value of what no model can take in a host batch."""
    for name, array in zip(Batch._fields, batch, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != np.int32:
            got = getattr(array, "dtype", type(array).__name__)
            raise InvalidType(
                f"check_batch expects NumPy arrays of int32; {name} is {type(array).__name__} of {got}."
            )
    tokens, targets, order = batch
    if tokens.ndim != 3 or 0 in tokens.shape or targets.shape != tokens.shape:
        raise InvalidValue(
            f"tokens and targets must have one shape (A, B, T) without a 0; got {tokens.shape} and "
            f"{targets.shape}."
        )
    A, N = tokens.shape[0], tokens.shape[1] * tokens.shape[2]
    if order.shape != (A, N):
        raise InvalidValue(
            f"order must have shape (A, B*T) = {(A, N)}; got {order.shape}. Batch.of makes it."
        )
    expect_ids("check_batch", "tokens", tokens, vocab_size)
    expect_ids("check_batch", "targets", targets, vocab_size, ignore_index=ignore_index)
    # Keys (token, position) rise strictly for the stable argsort and for no other order.
    valid = bool(((order >= 0) & (order < N)).all())
    if valid:
        key = np.take_along_axis(tokens.reshape(A, N), order, axis=1).astype(np.int64) * N + order
        valid = bool((np.diff(key, axis=1) > 0).all())
    if not valid:
        raise InvalidValue("order is not the stable argsort of each micro-batch's tokens. Batch.of makes it.")


def _as_ids(name: str, x) -> Array:
    """`x` (B, T) or (A, B, T) as a fresh int32 array (A, B, T)."""
    if getattr(x, "dtype", np.dtype(object)).kind not in "iu":
        raise InvalidType(f"{name} must be an integer array; got {getattr(x, 'dtype', type(x).__name__)}.")
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise InvalidValue(f"{name} must have shape (B, T) or (A, B, T) without a 0; got {x.shape}.")
    x = x.reshape(-1, *x.shape[-2:])
    if not np.can_cast(x.dtype, np.int32):
        if isinstance(x, np.ndarray):
            expect_ids("Batch.of", name, x, INT32.max + 1, least=INT32.min)
        else:  # without a read by the host: clamped here, and found outside the vocabulary by the kernels
            x = x.clip(INT32.min if x.dtype.kind == "i" else 0, INT32.max)
    return x.astype(np.int32, order="C")


def stable_order(tokens: Array) -> Array:
    """(A, B*T) int32: the positions of each micro-batch's tokens, sorted by token, equal ones by position."""
    A, N = tokens.shape[0], tokens.shape[1] * tokens.shape[2]
    flat = tokens.reshape(A, N)
    if isinstance(flat, np.ndarray):
        if 0 <= flat.min() and flat.max() < 2**16:
            # NumPy sorts 16 bits by radix: 0.26 ms for 32768 tokens on one slow core, 1.8 ms as int32.
            flat = flat.astype(np.uint16)
        return flat.argsort(axis=1, kind="stable").astype(np.int32)
    xp = array_module(tokens)
    key = flat.astype(np.int64) * N + xp.arange(N)  # distinct keys: every sort is stable
    return xp.argsort(key, axis=1).astype(np.int32)
