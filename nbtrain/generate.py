"""Text from a model: one token after the other, each drawn from the logits behind those before it.

Nothing is kept between two tokens: each step computes the whole window, the last `block_size` tokens, again.
"""

from collections.abc import Iterator

import numpy as np

from nbtrain.config import GPTConfig
from nbtrain.device.place import to_device, to_host, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.model import GPT
from nbtrain.tree import Layout, Tree

WINDOW_STEP = 64  # windows grow in steps of it, so that few shapes occur


def generate(
    params: Tree,
    config: GPTConfig,
    prompt_ids,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """The prompt and what the model makes of it: (n + max_new_tokens,) int32, or (B, n + max_new_tokens) for
    B prompts.

    `config` is the one that params were made with: the weights alone do not tell the number of heads.
    `temperature` 0 takes the likeliest token; `top_k` keeps the k likeliest; `top_p` the fewest that reach
    that probability together (Holtzman et al., 2020). The same seed gives the same tokens.
    """
    ids = _checked_prompt(prompt_ids, config.vocab_size)
    options: dict = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    tokens = list(generate_stream(params, config, ids, max_new_tokens=max_new_tokens, **options))
    fresh = np.array(tokens, np.int32).reshape(-1, *ids.shape[:-1])  # time first: (k,) or (k, B)
    return np.concatenate([ids, fresh.T], axis=-1)


def generate_stream(
    params: Tree,
    config: GPTConfig,
    prompt_ids,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator:
    """`generate`, token by token as they come: int32 scalars for a prompt (n,), (B,) int32 for prompts (B,
    n)."""
    ids = _checked_prompt(prompt_ids, config.vocab_size)
    if params.layout != Layout.of(config.leaves()):
        raise InvalidValue(
            f"params have {params.n_params:,} elements in another layout than this config's. Pass the config "
            "that they were made with."
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise InvalidValue(f"max_new_tokens must be an int, 0 or more; got {max_new_tokens!r}.")
    if not 0 <= temperature < np.inf:
        raise InvalidValue(f"temperature must be a number, 0 or more; got {temperature!r}.")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InvalidValue(f"top_k must be an int, 1 or more, or None; got {top_k!r}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidValue(f"top_p must lie in (0, 1], or be None; got {top_p!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidValue(f"seed must be an int, 0 or more; got {seed!r}.")
    tokens = _stream(params, config, np.atleast_2d(ids), max_new_tokens, temperature, top_k, top_p, seed)
    return (token[0] for token in tokens) if ids.ndim == 1 else tokens


def _stream(params, config, ids, max_new_tokens, temperature, top_k, top_p, seed):
    model = GPT(config)
    rng = np.random.Generator(np.random.PCG64(seed))
    window = ids[:, -config.block_size :]
    for _ in range(max_new_tokens):
        logits = _last_logits(model, params, window)
        token = np.array([choose(row, rng.random(), temperature, top_k, top_p) for row in logits], np.int32)
        yield token
        window = np.concatenate([window, token[:, None]], axis=1)[:, -config.block_size :]


def _last_logits(model: GPT, params: Tree, window: np.ndarray) -> np.ndarray:
    """(B, vocab_size) fp64: the logits behind the last token of each row of `window` (B, n)."""
    B, n = window.shape
    T = min(model.config.block_size, -(-n // WINDOW_STEP) * WINDOW_STEP)
    padded = np.zeros(
        (B, T), np.int32
    )  # attention looks back only, so that the padding behind the window is never seen
    padded[:, :n] = window
    with use(params.device):
        logits = model.logits(params, to_device(padded, params.device))[:, n - 1]
        return to_host(logits).astype(np.float64)


def choose(
    logits: np.ndarray, u: float, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> int:
    """The token that the uniform number u in [0, 1) picks by `logits` (V,), the likelier ones first."""
    bad = ~np.isfinite(logits)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidValue(
            f"the logit of token {at} is {logits[at]}, so nothing can be drawn: the weights are not finite, "
            "or too large for their dtype. Take a checkpoint from before the loss was lost."
        )
    if temperature == 0:
        return int(logits.argmax())
    k = min(top_k or logits.size, logits.size)
    kept = np.flatnonzero(logits >= np.partition(logits, -k)[-k])  # more than k where logits are equal
    kept = kept[np.argsort(-logits[kept], kind="stable")[:k]]
    with np.errstate(under="ignore", over="ignore"):  # a temperature near 0 leaves one token
        p = np.exp((logits[kept] - logits[kept[0]]) / temperature)
    cumulative = np.cumsum(p)
    cumulative /= cumulative[-1]
    if top_p is not None:
        n = int(np.searchsorted(cumulative, top_p)) + 1
        kept, cumulative = kept[:n], cumulative[:n] / cumulative[min(n, len(kept)) - 1]
    return int(kept[min(int(np.searchsorted(cumulative, u, side="right")), len(kept) - 1)])


def _checked_prompt(prompt_ids, vocab_size: int) -> np.ndarray:
    """The prompt as int32 (n,) or (B, n), n >= 1."""
    ids = np.asarray(prompt_ids)
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise InvalidValue(
            f"prompt_ids must be (n,) or (B, n) with at least one token; got shape {ids.shape}."
        )
    if ids.dtype.kind not in "iu":
        raise InvalidType(
            f"prompt_ids must be integers; got {ids.dtype}. A tokenizer's encode makes them from text."
        )
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), ids.shape)
        raise InvalidValue(
            f"prompt_ids[{', '.join(map(str, at))}] is {ids[at]}, outside the vocabulary "
            f"0..{vocab_size - 1}. Use the tokenizer that the model was trained with."
        )
    return ids.astype(np.int32)
