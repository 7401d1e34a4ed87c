"""The plugin: sends rows to W&B, and again after a resume if a killed process lost them."""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from eventloop import Moment, PluginError, hookimpl
from eventloop.toolbox import RunFolder, as_option, switch_off
from eventloop_wandb.config import config_of
from eventloop_wandb.offline import offline_rows, wait_for_end

if TYPE_CHECKING:
    from wandb import Run

    from eventloop import StateView

Result = TypeVar("Result")
# A table is a dict of its columns.
Row = dict[str, Any]
# Prefix of a row's columns for the time when it was logged.
MOMENT = "moment/"
_BATCH = f"{MOMENT}batch"
# Columns that W&B adds.
OF_WANDB = frozenset({"_step", "_runtime", "_timestamp"})
# More than a killed process can have passed to W&B without W&B writing it to disk.
_MAX_CHARS = 128 * 1024


class Wandb:
    """Records a run in Weights & Biases: every logged number and text, and the run's config.

    It is off until a project or a mode is set. Options that aren't set come from W&B's own variables, such
    as `WANDB_MODE` and `WANDB_PROJECT`.

    Args:
        project: the project's name.
        entity: the user or team that it belongs to.
        name: the run's name; not set: W&B generates a name.
        group: name of a group of related runs.
        tags: tags of the run.
        notes: notes on the run.
        mode: online sends numbers as they come, offline writes files for `wandb sync`.

    Raises:
        ValueError: `mode` has another value.

    Attributes:
        run: W&B's run object, for pictures and the like; None before a fit, and on other ranks.
    """

    # Off until one of these options is set: not every user has an account.
    wakes_with = ("project", "mode")

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        if mode not in (None, "online", "offline"):
            raise ValueError(f"mode={mode!r} is neither online nor offline")
        self.project = project
        self.entity = entity
        self.name = name
        self.group = group
        self.tags = tags
        self.notes = notes
        self.mode = mode
        self.run: Run | None = None
        self._folder: RunFolder | None = None
        self._run_id: str | None = None
        # The step of the next row, and the last rows with their steps.
        self._step = 0
        self._rows: deque[tuple[int, str]] = deque()
        self._num_chars = 0
        # Rows logged before the fit begins.
        self._waiting: list[Row] = []
        # Names and batches of future numbers that a killed process has already sent.
        self._there: Counter[tuple[str, int]] = Counter()
        self._exit_code = 0

    @hookimpl(rank_zero=True)
    def after_load(self, state: StateView) -> None:
        """Resolves the path early, because a task may change the working directory."""
        self._folder = RunFolder(state.run_dir.absolute())

    @hookimpl(wrapper=True)
    def fit_start(self, state: StateView) -> Generator[None, None, None]:
        """Starts or resumes the run at W&B, once this process holds the run's lock."""
        yield
        self._exit_code = 0
        if state.rank == 0 and self.run is None:
            # Resuming from an explicitly named checkpoint begins a new run.
            if state.settings.resume != "auto":
                self._run_id = None
                self._step = 0
                self._num_chars = 0
                self._rows = deque()
            self._tried(lambda: self._begin(state.manifest))
            waiting = self._waiting
            self._waiting = []
            for row in waiting:
                self._tried(functools.partial(self._add, row))

    @hookimpl(rank_zero=True)
    def log(self, numbers: dict[str, float], at: Moment) -> None:
        """Sends a row: the numbers, and their moment."""
        self._send(numbers, at)

    @hookimpl(rank_zero=True)
    def log_text(self, texts: dict[str, str | dict[str, list[Any]]], at: Moment) -> None:
        """Sends a row of texts and tables."""
        self._send(texts, at)

    @hookimpl
    def exception(self, error: BaseException) -> None:
        """Records that the run has failed."""
        self._exit_code = 1

    @hookimpl
    def close(self) -> None:
        """Ends the run: W&B writes and sends the remaining data."""
        if self.run is not None:
            run = self.run
            self.run = None
            self._tried(lambda: run.finish(exit_code=self._exit_code))
            if run.offline and self._folder is not None:
                wait_for_end(self._folder, Path(run.dir).parent.name, run.id)

    def state_dict(self) -> dict[str, Any]:
        """Returns the run's id, the next step, and the last rows, which a kill may lose."""
        # Steps depend on the rows that a killed process has sent, so they aren't compared between runs.
        rows = [*map(list, self._rows)]
        return {"of_this_run": {"run_id": self._run_id, "step": self._step, "rows": rows}}

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Restores the run's id, step and last rows; the run is looked up when training resumes."""
        state = state.get("of_this_run", state)  # older checkpoints have no such key
        self._run_id = state["run_id"]
        self._step = state["step"]
        self._rows = deque((step, text) for step, text in state["rows"])
        self._num_chars = sum(len(text) for _, text in self._rows)
        self._waiting = []

    def _send(self, values: Mapping[str, Any], moment: Moment) -> None:
        row = {**values, **{f"{MOMENT}{name}": value for name, value in moment._asdict().items()}}
        if self.run is None:
            self._waiting.append(row)
        else:
            self._tried(lambda: self._add(row))

    def _begin(self, manifest: Mapping[str, Any]) -> None:
        import wandb  # importing it takes a second

        assert self._folder is not None
        self._folder.names("wandb")  # refuses a link, which W&B would follow
        goes_on = self._run_id is not None
        rows = offline_rows(self._folder, self._run_id) if self._run_id is not None else {}
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name,
            group=self.group,
            tags=self.tags,
            notes=self.notes,
            mode=self.mode,
            id=self._run_id,
            resume="allow" if goes_on else None,
            dir=self._folder.path,
            config=config_of(manifest),
            # Another trainer, or the script itself, may have an active run.
            reinit="create_new",
            # No console capture: the streams belong to the command. No symlinks: the run's folder refuses them.
            settings=wandb.Settings(console="off", symlink=False),
        )
        run.define_metric("*", step_metric=_BATCH)
        self.run = run
        self._run_id = run.id
        if goes_on:
            if not (run.offline or run.disabled):
                first_step = self._rows[0][0] if self._rows else self._step
                rows |= {row["_step"]: row for row in _sent(run, first_step)}
            self._go_on(run.starting_step, rows)

    def _go_on(self, starting_step: int, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Sends the numbers of the checkpoint again that the killed process had not yet sent.

        Args:
            rows: existing rows by step; online only the last ones.
        """
        rows_of_checkpoint = self._rows
        self._rows = deque()
        self._num_chars = 0
        first_step = rows_of_checkpoint[0][0] if rows_of_checkpoint else self._step
        is_local = self.run is not None and self.run.offline
        num_lost = first_step - sum(step < first_step for step in rows) if is_local else 0
        if num_lost > 0:
            warnings.warn(
                f"{num_lost} rows of numbers never reached W&B from a process that was killed",
                stacklevel=2,
            )
        self._step = max([starting_step, *(step + 1 for step in rows)])
        self._there = Counter(
            (name, row[_BATCH])
            for step, row in rows.items()
            if step >= first_step and _BATCH in row
            for name in row
            if name not in OF_WANDB and not name.startswith(MOMENT)
        )
        for _, text in rows_of_checkpoint:
            self._add(json.loads(text))

    def _add(self, row: Row) -> None:
        """Sends a row without the values that exist already; skips a row without new values."""
        assert self.run is not None
        batch = int(row[_BATCH])
        new = {name: value for name, value in row.items() if not self._is_there(name, batch)}
        if all(name.startswith(MOMENT) for name in new):
            return
        self.run.log(
            {name: _as_sent(value) for name, value in new.items()}, step=self._step, commit=True
        )
        self._rows.append((self._step, text := json.dumps(new)))
        self._step += 1
        self._num_chars += len(text)
        while self._num_chars - len(self._rows[0][1]) > _MAX_CHARS:
            self._num_chars -= len(self._rows.popleft()[1])

    def _is_there(self, name: str, batch: int) -> bool:
        is_there = self._there[name, batch] > 0
        if is_there:
            self._there[name, batch] -= 1
        return is_there

    def _tried(self, use: Callable[[], Result]) -> Result:
        import wandb

        try:
            return use()
        except (wandb.Error, OSError) as error:
            raise PluginError(
                f"W&B fails: {error}",
                fix="run `wandb login`, write files for later with "
                + as_option("wandb", mode="offline")
                + ", or "
                "switch the plugin off with " + switch_off("wandb"),
            ) from error


def _as_sent(value: Any) -> Any:
    """Converts a value to W&B's types: a table to a `wandb.Table`."""
    import wandb

    if not isinstance(value, dict):
        return _encodable(value)
    rows = [[_encodable(cell) for cell in row] for row in zip(*value.values(), strict=True)]
    return wandb.Table([*map(_encodable, value)], rows, allow_mixed_types=True)


def _encodable(value: Any) -> Any:
    # An unpaired surrogate can't be encoded.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _sent(run: Run, first_step: int) -> Iterable[Mapping[str, Any]]:
    """Returns the rows of a run on W&B's server, from a step on."""
    import wandb

    history: Iterable[Mapping[str, Any]] = (
        wandb.Api().run(run.path).scan_history(min_step=first_step)
    )
    return history
