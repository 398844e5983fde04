"""A run's checkpoints: its folder of them, `checkpoints/step_00001000/` and so on.

Each is what `checkpoint.save` writes. A save on the way (`wait=False`) copies the state to memory of the
host and returns; a thread writes it beside the next steps. Once a checkpoint is on the disk, the older ones
go but for the last `keep_last` and every `keep_every`-th step, and with them what interrupted saves left.
"""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nbtrain.checkpoint import (
    REPLACED,
    STEP,
    STEPS,
    Checkpoint,
    check_replaceable,
    describe,
    is_complete,
    load,
    saved_steps,
    step_of,
    write,
)
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device.transfer import ALIGNMENT, Snapshots, snapshot_bytes
from nbtrain.errors import InvalidValue
from nbtrain.precision import LossScale
from nbtrain.train import OptState
from nbtrain.tree import Tree


class Saved(NamedTuple):
    """A checkpoint that is on the disk."""

    path: Path
    step: int
    stall_ms: float  # that the steps waited: for the copy of the state, and for an earlier save to end
    write_ms: float  # until it was on the disk and pruning was done, beside the steps


class Checkpoints:
    """The checkpoints in `folder`, the last `keep_last` of them and those whose step is a multiple of
    `keep_every` (0: none for that reason).

    A context manager; leaving it waits for a save under way, unless it is left by KeyboardInterrupt. For one
    thread.
    """

    def __init__(self, folder: str | Path, keep_last: int = 2, keep_every: int = 0):
        for name, value, least in (("keep_last", keep_last, 1), ("keep_every", keep_every, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidValue(f"{name} must be an int, {least} or more; got {value!r}.")
        self.folder = Path(folder).resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidValue(f"{self.folder} is a file; checkpoints go to a folder. Take another name.")
        self.keep_last, self.keep_every = keep_last, keep_every
        self.keep_replaced = False  # what `start` moved, beyond the next save
        self._snapshots: Snapshots | None = None
        self._thread: threading.Thread | None = None  # that writes
        self._saved: list[Saved] = []  # not told by `done` yet
        self._error: BaseException | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            self._thread.join()  # what failed first is what is told

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step_{step:08d}"

    def start(self, step: int) -> list[Path]:
        """A run begins behind `step`, 0 for a new one: checkpoints of later steps, which belong to the run
        that it replaces, are moved to the folder "replaced", and removed once this run has saved one,
        unless `keep_replaced`. Returns where those are now, the earliest first."""
        moved = []
        for entry in self._entries():
            if step_of(entry.name.partition(".")[0]) > step:
                aside = self.folder / REPLACED / entry.name
                aside.parent.mkdir(exist_ok=True)
                _remove(aside)
                moved.append(entry.rename(aside))
        return sorted(path for path in moved if is_complete(path))

    def reserve(self, params: Tree, opt_state: OptState | None) -> None:
        """Takes the memory of a snapshot now, instead of in the first save: 12 bytes a parameter, of the
        host's."""
        limits = ALIGNMENT  # a captured step has them, and the state that it begins with may not
        self._memory(params).reserve(snapshot_bytes(_arrays(params, opt_state)) + limits)

    def save(
        self,
        step: int,
        params: Tree,
        opt_state: OptState | None = None,
        *,
        wait: bool = False,
        config: GPTConfig,
        train_config: TrainConfig | None = None,
        tokenizer=None,
        data_state: dict | None = None,
        extra: dict | None = None,
    ) -> Path:
        """Writes the checkpoint of `step`, as `checkpoint.save` does, and returns its folder.

        Without `wait` the state is copied, and may be overwritten when this returns; on a GPU, by what is
        launched on the current stream. Errors of writing then rise in the next `save`, `done` or `close`. A
        second save while one is under way waits for that.
        """
        start = time.perf_counter()
        self._join()
        path = self.path(step)
        check_replaceable(path)
        index = describe(
            params,
            opt_state,
            config=config,
            train_config=train_config,
            tokenizer=tokenizer,
            data_state=data_state,
            extra=extra,
        )
        if wait:
            write(path, index, params if opt_state is None else opt_state.master, opt_state)
            self._prune(step)
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            self._saved.append(Saved(path, step, elapsed_ms, elapsed_ms))
            return path
        snapshots = self._memory(params)
        weights, opt_state = _copy(snapshots, params, opt_state)
        host_ms = 1e3 * (time.perf_counter() - start)

        def work() -> None:
            try:
                begun = time.perf_counter()
                stall_ms = host_ms + snapshots.wait()
                write(path, index, weights, opt_state)
                self._prune(step)
                self._saved.append(Saved(path, step, stall_ms, 1e3 * (time.perf_counter() - begun)))
            except BaseException as error:
                self._error = error

        # A daemon: the second interrupt leaves at once, and a save that is cut leaves what was there.
        self._thread = threading.Thread(target=work, name="nbtrain-checkpoint", daemon=True)
        self._thread.start()
        return path

    def newest(self, device: str = "auto", passed_over: Callable[[str], None] | None = None) -> Checkpoint:
        """The newest good one, as `checkpoint.load` finds it; `passed_over` is told of each damaged one."""
        return load(self.folder, device, passed_over=passed_over)

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def done(self) -> list[Saved]:
        """The saves that have ended since the last call; raises what one failed with."""
        if not self.saving:
            self._join()
        told = len(self._saved)
        saved, self._saved[:told] = self._saved[:told], []
        return saved

    def close(self) -> None:
        """Waits for a save under way, and gives the memory of snapshots back."""
        self._join()
        self._snapshots = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _memory(self, params: Tree) -> Snapshots:
        if self._snapshots is None:
            self._snapshots = Snapshots(params.device)
        return self._snapshots

    def _entries(self) -> list[Path]:
        """The folders of checkpoints and of interrupted saves, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [entry for entry in self.folder.iterdir() if STEP.fullmatch(entry.name)]
        return sorted(found, key=lambda entry: step_of(entry.name.partition(".")[0]), reverse=True)

    def _prune(self, saved: int) -> None:
        """Removes what is not to be kept, now that the checkpoint of step `saved` is on the disk."""
        if not self.keep_replaced:
            _remove(self.folder / REPLACED)
        whole = [path for path in saved_steps(self.folder) if is_complete(path)]
        keep = set(whole[: self.keep_last]) | {self.path(saved)}
        if self.keep_every:
            keep |= {path for path in whole if step_of(path.name) % self.keep_every == 0}
        for entry in self._entries():
            if entry not in keep:
                _remove(entry)


def run_folder(path: str | Path) -> Path:
    """The folder of a run: of `path` itself, of the checkpoints in it, or of one of them."""
    path = Path(path).resolve()
    if (path / STEPS).is_dir():
        return path
    folder = path if path.name in (STEPS, REPLACED) else path.parent
    if folder.name == REPLACED:
        folder = folder.parent
    return folder.parent if folder.name == STEPS else path.parent


def _remove(folder: Path) -> None:
    """Removes a checkpoint, or a folder of them; files that are no part of one stay."""
    if not folder.is_dir() or folder.is_symlink():
        return
    if folder.name == REPLACED:
        for entry in folder.iterdir():
            _remove(entry)
        if not any(folder.iterdir()):
            folder.rmdir()
        return
    try:
        check_replaceable(folder)
    except InvalidValue:
        return
    shutil.rmtree(folder, ignore_errors=True)


def _arrays(params: Tree, opt_state: OptState | None) -> list:
    """What a checkpoint holds, each array once."""
    if opt_state is None:
        return [params.buffer]
    trees = (opt_state.master, opt_state.m, opt_state.v)
    scalars = [opt_state.step, opt_state.updates, *opt_state.loss_scale, opt_state.seed]
    limits = [] if opt_state.limits is None else [opt_state.limits]
    return [tree.buffer for tree in trees] + scalars + limits


def _copy(snapshots: Snapshots, params: Tree, opt_state: OptState | None) -> tuple[Tree, OptState | None]:
    """The weights of record and the state, in memory of the host that holds them once `snapshots.wait`
    returns."""
    copies = snapshots.take(_arrays(params, opt_state))
    if opt_state is None:
        return Tree(params.layout, copies[0]), None
    master, m, v = (Tree(params.layout, buffer) for buffer in copies[:3])
    step, updates, value, good_steps, seed, *limits = copies[3:]
    return master, OptState(step, updates, master, m, v, LossScale(value, good_steps), seed, *limits)
