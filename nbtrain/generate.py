"""Text from a model: one token after the other, each drawn from the logits behind those before it.

Keys and values of the tokens before are kept (see `nbtrain.decode`), so that a token costs one row of each
product. The model sees at most block_size tokens, of a longer prompt the last block_size. When a sequence has
block_size tokens and another is drawn, all but the last block_size // 2 are dropped and those are computed
anew, at positions from 0 on: so a long text is written from the last block_size // 2 … block_size tokens, and
pays for the window once in block_size // 2 tokens. A sequence's window depends on its own length alone.
"""

from collections.abc import Iterator

import numpy as np

from nbtrain.config import GPTConfig, is_whole
from nbtrain.decode import Decoder
from nbtrain.device.download import Download
from nbtrain.device.place import to_device, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.sample import bad_logit, checked_options, sample
from nbtrain.tree import Tree, check_params


def generate(
    params: Tree,
    config: GPTConfig,
    prompt_ids=None,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    decoder: Decoder | None = None,
):
    """The prompt and what the model makes of it, int32: (n + max_new_tokens,) for one prompt (n,), (B, n +
    max_new_tokens) for B prompts (B, n), and a list of arrays for a list of prompts of several lengths.

    `config` is the one that params were made with: the weights alone do not tell the number of heads.
    `temperature` 0 takes the likeliest token; `top_k` keeps the k likeliest; `top_p` the fewest that reach
    that probability together (Holtzman et al., 2020). The same seed gives the same draws for each place in
    the batch, whatever the other prompts are. `stop` is the id that ends a text, a tokenizer's eot: behind it
    a row holds nothing but `stop`, and once every row has ended there are no further tokens, so that the
    result may be shorter. `decoder` is a Decoder of these params and as many sequences as there are prompts,
    to be used again from call to call: making one takes memory and, on a GPU, a capture. Raises InvalidValue
    or InvalidType before the first token, and InvalidValue where logits are not finite.
    """
    prompts, shape = _checked_prompts(prompt_ids, config)
    options: dict = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    options |= dict(stop=stop, decoder=decoder, max_new_tokens=max_new_tokens)
    stream = generate_stream(params, config, prompts, **options)
    fresh = np.array(list(stream), np.int32).reshape(-1, len(prompts)).T
    texts = [np.concatenate(pair) for pair in zip(prompts, fresh, strict=True)]
    if shape is None:
        return texts
    return texts[0] if len(shape) == 1 else np.stack(texts)


def generate_stream(
    params: Tree,
    config: GPTConfig,
    prompt_ids=None,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    decoder: Decoder | None = None,
) -> Iterator:
    """`generate`, token by token as they come: int32 scalars for a prompt (n,), (B,) int32 for B prompts.

    On a GPU a token is handed out when the next one has been launched.
    """
    prompts, shape = _checked_prompts(prompt_ids, config)
    for name, value in (("max_new_tokens", max_new_tokens), ("seed", seed)):
        if not is_whole(value) or value < 0:
            raise InvalidValue(f"{name} must be an int, 0 or more; got {value!r}.")
    temperature, top_k, top_p = checked_options(temperature, top_k, top_p)
    if stop is not None and not (is_whole(stop) and 0 <= stop < config.vocab_size):
        raise InvalidValue(
            f"stop must be an id, an int in 0 … {config.vocab_size - 1}, or None; got {stop!r}."
        )
    longest = max(len(prompt) for prompt in prompts) + int(max_new_tokens)
    need = min(longest, config.block_size)
    if decoder is None:
        decoder = Decoder(params, config, len(prompts), need)
    else:
        check_params(params, config.leaves())
        _check_decoder(decoder, params, config, len(prompts), need)
        decoder.refresh()
    draw = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = _stream(decoder, prompts, int(max_new_tokens), draw, int(seed), stop)
    return (token[0] for token in tokens) if shape is not None and len(shape) == 1 else tokens


def _stream(decoder, prompts, max_new_tokens, draw, seed, stop):
    block_size, vocab_size = decoder.config.block_size, decoder.config.vocab_size
    texts = [list(prompt[-block_size:]) for prompt in prompts]  # what the windows are cut from
    with use(decoder.device):
        key = to_device(np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 0], np.uint32), decoder.device)
    decoder.start(range(len(prompts)), [np.array(text, np.int32) for text in texts])
    runs_ahead = decoder.device != "cpu"  # the next step is launched before this one's tokens are read
    pending: Download | None = None
    ended = np.zeros(len(prompts), bool)

    def arrived(download: Download) -> np.ndarray:
        tokens = download.wait()
        for row, text in enumerate(texts):
            if ended[row]:
                tokens[row] = stop
                continue
            token = int(tokens[row])
            _check_token(token)
            text.append(token)
            del text[:-block_size]
            ended[row] = token == stop
        if not runs_ahead:
            decoder.tokens[...] = tokens  # what an ended row has drawn need not be an id
        return tokens

    for i in range(max_new_tokens):
        full = np.flatnonzero(decoder.lengths == decoder.length).tolist()
        if full:
            if pending is not None:  # the window ends with it
                yield arrived(pending)
                pending = None
                if ended.all():
                    return
            keep = np.where(ended, 1, max(1, block_size // 2))
            decoder.start(full, [np.array(texts[row][-keep[row] :], np.int32) for row in full])
        logits = decoder.step()
        with use(decoder.device):
            sample(logits, key, vocab_size=vocab_size, site=i, out=decoder.tokens, **draw)
            download = Download(decoder.tokens)
        before, pending = (pending, download) if runs_ahead else (download, None)
        if before is not None:
            yield arrived(before)
            if ended.all():
                return
    if pending is not None:
        yield arrived(pending)


def _check_decoder(decoder: Decoder, params: Tree, config: GPTConfig, n: int, need: int) -> None:
    """Raises unless it decodes `n` sequences of `need` tokens with these params."""
    if not isinstance(decoder, Decoder):
        raise InvalidType(
            f"decoder must be a Decoder or None; got {type(decoder).__name__}. Make one with "
            f"Decoder(params, config, {n}, {need})."
        )
    if not decoder.serves(params) or decoder.config != config:
        raise InvalidValue("the decoder was made with other params or another config. Make one for these.")
    if decoder.batch_size != n or decoder.length < need:
        raise InvalidValue(
            f"the decoder holds {decoder.batch_size} sequences of {decoder.length} tokens; this call needs "
            f"{n} of {need}. Make one with Decoder(params, config, {n}, {need})."
        )


def _check_token(token: int) -> None:
    if found := bad_logit(token):
        at, value = found
        raise InvalidValue(
            f"the logit of token {at} is {value}, so nothing can be drawn: the weights are not finite, or "
            "too large for their dtype. Take a checkpoint from before the loss was lost."
        )


def _checked_prompts(prompt_ids, config: GPTConfig) -> tuple[list[np.ndarray], tuple[int, ...] | None]:
    """The prompts, each int32 (n,), n >= 1, and the shape of `prompt_ids`, (n,) or (B, n), or None for a list
    of prompts of several lengths."""
    if not isinstance(config, GPTConfig):
        raise InvalidType(
            f"generate expects (params, config, prompt_ids), config a GPTConfig; got {type(config).__name__} "
            "in its place. Pass the one that params were made with."
        )
    vocab_size = config.vocab_size
    rows = prompt_ids if isinstance(prompt_ids, list | tuple) else [prompt_ids]
    try:
        lengths = {len(row) for row in rows if hasattr(row, "__len__") and np.ndim(row) == 1}
        several = len(lengths) > 1 and all(np.ndim(row) == 1 for row in rows)
        ids = list(map(np.asarray, rows)) if several else np.asarray(prompt_ids)
    except (TypeError, ValueError) as error:  # NumPy's, or whatever the array of another library raises
        raise InvalidType(
            "prompt_ids must be ids of the host, (n,) or (B, n), or a list of such (n,); they make no array: "
            f"{error} Give every prompt as a list of ints, or as a NumPy array."
        ) from None
    if isinstance(ids, list):
        return [_checked(row, f"prompt_ids[{i}]", vocab_size) for i, row in enumerate(ids)], None
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise InvalidValue(
            "prompt_ids must be (n,) or (B, n), or a list of such (n,), with at least one token each; got "
            f"shape {ids.shape}."
        )
    ids = _checked(ids, "prompt_ids", vocab_size)
    return list(np.atleast_2d(ids)), ids.shape


def _checked(ids: np.ndarray, name: str, vocab_size: int) -> np.ndarray:
    if ids.size == 0:
        raise InvalidValue(f"{name} must have at least one token; got shape {ids.shape}.")
    if ids.dtype.kind not in "iu":
        raise InvalidType(
            f"{name} must be integers; got {ids.dtype}. A tokenizer's encode makes them from text."
        )
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), ids.shape)
        raise InvalidValue(
            f"{name}[{', '.join(map(str, at))}] is {ids[at]}, outside the vocabulary 0..{vocab_size - 1}. "
            "Use the tokenizer that the model was trained with."
        )
    return ids.astype(np.int32)
