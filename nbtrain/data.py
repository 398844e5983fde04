"""Token files -> batches, shuffled, resumable, prefetched to the device.

A window is T + 1 tokens of one file: T inputs and, one further on, their T targets. Window i of a file begins
at token i * T, so every token but a file's first and the last few is a target once an epoch. A global batch
is micro * B * ranks windows; an epoch drops those that do not fill one, so all ranks roll over on the same
step. In an epoch's permutation, rank r takes windows r * micro * B ... of each global batch, micro-batch
after micro-batch.
"""

import glob
import hashlib
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nbtrain.batch import IGNORE_INDEX, Batch, check_batch, stable_order
from nbtrain.config import is_whole
from nbtrain.device.transfer import Uploader
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.token_file import MAX_VOCAB_SIZE, TokenFile, write_tokens

__all__ = ["Batch", "Batches", "TokenFile", "batches", "check_batch", "eval_batches", "write_tokens"]

STATE_VERSION = 2
# Tokens: of a file that is hashed whole, and how many samples of how many tokens are of a longer one.
HASHED_WHOLE, N_SAMPLES, SAMPLE = 1 << 20, 16, 1024


def batches(
    pattern_or_paths,
    *,
    B: int,
    T: int,
    micro: int = 1,
    seed: int | None = None,
    device: str = "cpu",
    shuffle: bool = True,
    rank: int = 0,
    ranks: int = 1,
    state: dict | None = None,
    format: str = "auto",
    vocab_size: int | None = None,
    prefetch: int = 2,
) -> "Batches":
    """An endless iterator over Batch (micro, B, T) from token files, epoch after epoch.

    `pattern_or_paths` is a path, a glob pattern or a list of them; `seed` (0 where None) and the epoch's
    number decide the permutation. `state` continues where `Batches.state()` was taken, bit for bit.
    `vocab_size` checks every id on the host. A thread prepares `prefetch` batches ahead.
    """
    return Batches(
        _Windows(pattern_or_paths, T, format, vocab_size),
        B=B,
        micro=micro,
        seed=seed,
        device=device,
        shuffle=shuffle,
        rank=rank,
        ranks=ranks,
        state=state,
        prefetch=prefetch,
    )


def eval_batches(
    pattern_or_paths,
    *,
    B: int,
    T: int,
    device: str = "cpu",
    max_batches: int | None = None,
    format: str = "auto",
    vocab_size: int | None = None,
) -> Iterator[Batch]:
    """Batches (1, B, T) in the files' order, in which each token but a file's first is a target exactly once.

    A file's last window may be short, and the last batch may lack windows: the rest has token 0 and target
    IGNORE_INDEX.
    """
    _check_counts(B=B, **({} if max_batches is None else {"max_batches": max_batches}))
    windows = _Windows(pattern_or_paths, T, format, vocab_size, short=True)
    if windows.n_windows == 0:
        raise InvalidValue(
            f"nothing to evaluate: {windows.describe()} have no target; a file needs at least 2 tokens."
        )
    n_batches = -(-windows.n_windows // B)
    chosen = range(n_batches if max_batches is None else min(n_batches, max_batches))
    host = (windows.batch(np.arange(i * B, min(windows.n_windows, (i + 1) * B)), 1, B) for i in chosen)
    return host if device == "cpu" else _uploaded(host, Uploader(device))


class Batches:
    """What `batches` returns: an iterator of Batch, and a context manager that ends its thread.

    On a GPU the copy of the next batch begins when the one before is handed out, to run beside its step.
    Arrays belong to the stream that is current when `next` is called.
    """

    def __init__(self, windows: "_Windows", *, B, micro, seed, device, shuffle, rank, ranks, state, prefetch):
        _check_counts(B=B, micro=micro, ranks=ranks, prefetch=prefetch)
        if not (is_whole(rank) and 0 <= rank < ranks):
            raise InvalidValue(f"rank must lie in 0..ranks - 1 = {ranks - 1}; got {rank!r}.")
        if not (seed is None or is_whole(seed) and seed >= 0):
            raise InvalidValue(f"seed must be an integer, 0 or more; got {seed!r}.")
        global_batch = micro * B * ranks
        self.batches_per_epoch = windows.n_windows // global_batch
        if self.batches_per_epoch == 0:
            raise InvalidValue(
                f"too few tokens: {windows.describe()} make {windows.n_windows} windows of T + 1 = "
                f"{windows.T + 1} tokens, a global batch needs micro * B * ranks = {micro} * {B} * {ranks} = "
                f"{global_batch}. Give more data, or make T or the batch smaller."
            )
        self._data = {
            "files": len(windows.files),
            "tokens": sum(map(len, windows.files)),
            "content": windows.digest(),
            "B": int(B),
            "T": int(windows.T),
            "micro": int(micro),
            "ranks": int(ranks),
            "shuffle": bool(shuffle),
        }
        self._seed, self._epoch, self._position = int(seed or 0), 0, 0
        if state is not None:
            self._seed, self._epoch, self._position = _continued(
                state, self._data, seed, self.batches_per_epoch
            )
        self._uploader = None if device == "cpu" else Uploader(device)
        self._host = _Prefetcher(
            _host_batches(
                windows,
                (int(ranks), int(micro), int(B)),
                int(rank),
                self._seed if shuffle else None,
                self._epoch,
                self._position,
            ),
            prefetch,
        )
        self._staged: tuple | None = None  # the next batch, its copy begun
        self._end = weakref.finalize(self, _end, self._host, self._uploader)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if not self._end.alive:
            raise InvalidValue(
                "these batches are closed. Make new ones; state=batches.state() continues there."
            )
        uploader = self._uploader
        if uploader is None:
            batch, following = self._host.get()
        else:
            upload, following = self._staged or _stage(uploader, self._host.get())
            batch = Batch(*uploader.wait(upload))
            ahead = self._host.get(wait=False)
            self._staged = ahead and _stage(uploader, ahead)
        self._epoch, self._position = following
        return batch

    def state(self) -> dict:
        """Where the next batch comes from, as JSON can hold it: for `batches(..., state=)` on every rank."""
        return {
            "version": STATE_VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "data": dict(self._data),
        }

    def close(self) -> None:
        """Ends the prefetching thread and the copies under way. `state()` still answers."""
        self._end()
        self._staged = None

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _stage(uploader, item):
    batch, following = item
    return uploader.start(batch), following


class _Windows:
    """The windows of some token files, numbered through in the files' order.

    With `short`, a file's remainder of fewer than T targets is a window too.
    """

    def __init__(self, pattern_or_paths, T: int, format: str, vocab_size: int | None, short: bool = False):
        _check_counts(T=T)
        if vocab_size is not None and not (is_whole(vocab_size) and 1 <= vocab_size <= MAX_VOCAB_SIZE):
            raise InvalidValue(f"vocab_size must lie in 1..{MAX_VOCAB_SIZE}; got {vocab_size!r}.")
        self.T, self.vocab_size = int(T), vocab_size
        self.files = [TokenFile(path, format) for path in resolve(pattern_or_paths)]
        # Plain arrays over the same mapping: a memmap's slices cost more.
        self._ids = [np.asarray(file.tokens) for file in self.files]
        targets = np.array([len(file) - 1 for file in self.files], np.int64)
        self._ends = np.cumsum(-(-targets // T) if short else targets // T)
        self.n_windows = int(self._ends[-1])

    def batch(self, windows: np.ndarray, A: int, B: int) -> Batch:
        """The batch (A, B, T) of at most A * B `windows`; what they do not fill counts as no target."""
        tokens = np.zeros((A, B, self.T), np.int32)
        targets = np.full((A, B, self.T), IGNORE_INDEX, np.int32)
        for row, window in enumerate(windows):
            ids, (a, b) = self._window(int(window)), divmod(row, B)
            n = len(ids) - 1
            tokens[a, b, :n], targets[a, b, :n] = ids[:-1], ids[1:]
        return Batch(tokens, targets, stable_order(tokens))

    def describe(self) -> str:
        tokens, more = sum(map(len, self.files)), " ..." if len(self.files) > 1 else ""
        return f"{tokens} tokens in {len(self.files)} file(s) ({self.files[0].path}{more})"

    def digest(self) -> str:
        """A hash of the files' names, counts and tokens, which stays when the folder moves. Of a file with
        more than HASHED_WHOLE tokens it takes samples, so that any amount of data is hashed at once."""
        digest = hashlib.sha256()
        for file, ids in zip(self.files, self._ids, strict=True):
            digest.update(f"{file.path.name}\0{len(file)}\0".encode("utf-8", "surrogateescape"))
            pieces = [ids]
            if len(ids) > HASHED_WHOLE:
                starts = np.linspace(0, len(ids) - SAMPLE, N_SAMPLES).astype(np.int64)
                pieces = [ids[start : start + SAMPLE] for start in starts]
            for piece in pieces:
                digest.update(piece.astype("<u4").tobytes())
        return digest.hexdigest()

    def _window(self, window: int) -> np.ndarray:
        i = int(np.searchsorted(self._ends, window, side="right"))
        start = (window - (int(self._ends[i - 1]) if i else 0)) * self.T
        ids = self._ids[i][start : start + self.T + 1]
        if self.vocab_size is not None or ids.itemsize == 4:
            limit = self.vocab_size or 2**31
            if ids.max() >= limit:
                at = int((ids >= limit).argmax())
                raise InvalidValue(
                    f"{self.files[i].path}: token {ids[at]} at position {start + at} lies outside "
                    f"0..{limit - 1} (vocab_size = {self.vocab_size}). Take the file's own vocabulary."
                )
        return ids


class _Prefetcher:
    """Runs an iterator in a thread, at most `depth` items ahead; its errors rise in `get`."""

    def __init__(self, items: Iterator, depth: int):
        self._items = items
        self._queue: queue.Queue = queue.Queue(depth)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nbtrain-prefetch", daemon=True)
        self._thread.start()

    def get(self, wait: bool = True):
        """The next item; without `wait`, None if there is none yet or an error came in its place."""
        if self._error is None:
            try:
                item = self._queue.get(block=wait)
            except queue.Empty:
                return None
            if not isinstance(item, BaseException):
                return item
            self._error = item
        if wait:
            raise self._error
        return None

    def close(self) -> None:
        self._stopping.set()
        # A put that waits for room goes through now; the thread looks at _stopping after each.
        while not self._queue.empty():
            self._queue.get_nowait()
        # Not from the thread itself, in which a collection of garbage may run this.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stopping.is_set():
                    return
        except BaseException as error:
            self._queue.put(error)


def _host_batches(
    windows: _Windows, shape: tuple[int, int, int], rank: int, seed: int | None, epoch: int, position: int
):
    """Yields (batch, (epoch, position) of the next) for one rank, endlessly; unshuffled if `seed` is None."""
    ranks, A, B = shape
    n_positions = windows.n_windows // (ranks * A * B)
    while True:
        if seed is None:
            order = np.arange(windows.n_windows)
        else:
            bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
            order = np.random.Generator(bits).permutation(windows.n_windows)
        mine = order[: n_positions * ranks * A * B].reshape(n_positions, ranks, A * B)[:, rank]
        for at in range(position, n_positions):
            following = (epoch, at + 1) if at + 1 < n_positions else (epoch + 1, 0)
            yield windows.batch(mine[at], A, B), following
        epoch, position = epoch + 1, 0


def _uploaded(host: Iterator[Batch], uploader: Uploader) -> Iterator[Batch]:
    """Each host batch on the GPU, its copy begun while the one before is in use."""
    ahead = None
    try:
        for batch in host:
            begun = uploader.start(batch)
            if ahead is not None:
                yield Batch(*uploader.wait(ahead))
            ahead = begun
        if ahead is not None:
            yield Batch(*uploader.wait(ahead))
    finally:
        uploader.close()


def _end(host: _Prefetcher, uploader: Uploader | None) -> None:
    host.close()
    if uploader is not None:
        uploader.close()


def _continued(state: dict, data: dict, seed: int | None, batches_per_epoch: int) -> tuple[int, int, int]:
    """Seed, epoch and position of a state that belongs to `data`."""
    fields = ("version", "seed", "epoch", "position", "data")
    if not isinstance(state, dict) or set(state) != set(fields) or not isinstance(state["data"], dict):
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise InvalidValue(
            f"state must be what Batches.state() gave, a dict of {', '.join(fields)}; got {got}."
        )
    if state["version"] != STATE_VERSION:
        raise InvalidValue(
            f"state has version {state['version']!r}; this nbtrain reads version {STATE_VERSION}."
        )
    unlike = {
        name: (state["data"].get(name), value)
        for name, value in data.items()
        if state["data"].get(name) != value
    }
    if seed is not None and seed != state["seed"]:
        unlike["seed"] = (state["seed"], seed)
    if unlike:
        if set(unlike) == {"content"}:
            raise InvalidValue(
                "state belongs to other data: the files have other names or tokens. Give those it was taken "
                "with."
            )
        unlike.pop("content", None)  # a hash tells nobody anything
        pairs = ", ".join(f"{name} {was!r} then and {now!r} now" for name, (was, now) in unlike.items())
        raise InvalidValue(
            f"state belongs to other data or another shape: {pairs}. Give what it was taken with, or none."
        )
    numbers = tuple(state[name] for name in ("seed", "epoch", "position"))
    if not all(is_whole(n) and n >= 0 for n in numbers) or state["position"] >= batches_per_epoch:
        raise InvalidValue(
            "state is damaged: seed, epoch and position must be 0 or more, position below the epoch's "
            f"{batches_per_epoch} batches; got {numbers}."
        )
    return numbers


def resolve(pattern_or_paths) -> list[Path]:
    """The files of a path, a glob pattern or a list of them, each pattern's sorted by name."""
    several = isinstance(pattern_or_paths, Iterable) and not isinstance(pattern_or_paths, str | os.PathLike)
    paths: list[Path] = []
    for pattern in pattern_or_paths if several else [pattern_or_paths]:
        if not isinstance(pattern, str | os.PathLike):
            raise InvalidType(
                "expected a path of token files, a glob pattern or a list of them; got "
                f"{type(pattern_or_paths).__name__}. Ids in memory go to a file first: "
                "nbtrain.data.write_tokens(path, ids, vocab_size=...)."
            )
        found = [str(pattern)] if Path(pattern).exists() else sorted(glob.glob(str(pattern), recursive=True))
        if not found:
            raise InvalidValue(
                f"no token file matches {str(pattern)!r} (from the folder {Path.cwd()}). Check the path."
            )
        if Path(found[0]).is_dir():
            raise InvalidValue(f"{found[0]} is a folder; give its token files: {found[0]}/*.bin")
        paths += map(Path, found)
    if not paths:
        raise InvalidValue("expected at least one token file; got an empty list.")
    return paths


def _check_counts(**counts) -> None:
    for name, value in counts.items():
        if not (is_whole(value) and value >= 1):
            raise InvalidValue(f"{name} must be an integer, 1 or more; got {value!r}.")
