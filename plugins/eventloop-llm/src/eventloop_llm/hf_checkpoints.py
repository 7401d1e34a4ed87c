"""The plugin `hf-checkpoints`: chooses the checkpoints that are also written as folders of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from eventloop import PluginError, StateView, Time, Url, hookimpl
from eventloop.toolbox import switch_off
from eventloop_llm.models.folder_writer import FolderWriter
from eventloop_llm.models.folders import (
    Pretrained,
    batch_of,
    linked,
    remove_leftovers,
    whole_folders,
)
from eventloop_llm.models.pretrained import named_tokenizer


class HfCheckpoints:
    """Writes checkpoints as folders that `from_pretrained` of transformers loads.

    A background thread makes the folders from checkpoints that are written and verified: it doesn't
    touch the model, and training doesn't wait. The last checkpoint of a fit always gets a folder.

    Args:
        interval: writes a folder every so many batches, "1000ba"; None for every checkpoint.
        folder: where the folders go; None for `hf` in the run's folder.
        tokenizer: folder or name of the tokenizer; in Python the tokenizer itself.
        max_shard_size: maximum size of a file of weights.
        keep: number of folders to keep, the newest; None for all.
        store: URL to upload the folders to, `s3://bucket/model`; needs eventloop-remote.

    Raises:
        ValueError: an option has an invalid value.
    """

    off_until_named = True

    def __init__(
        self,
        *,
        interval: Time | None = None,
        folder: Path | None = None,
        tokenizer: str | Any = None,
        max_shard_size: str = "5GB",
        keep: int | None = None,
        store: str = "",
    ) -> None:
        self.interval = None if interval is None else Time(interval)
        if self.interval is not None and self.interval.unit != "ba":
            raise ValueError(f"interval={str(self.interval)!r} isn't in batches, such as '1000ba'")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={keep!r} is not an int of 1 or more")
        if store:
            Url(store)
        self.folder = None if folder is None else Path(folder)
        self.tokenizer = tokenizer
        self.max_shard_size = max_shard_size
        self.keep = keep
        self.store = store
        self._pretrained: Pretrained | None = None
        self._background: FolderWriter | None = None
        self._last_checkpoint: Path | None = None
        self._begun: set[int] = set()  # batches whose folders are written or scheduled

    @hookimpl(trylast=True)
    def init(self, state: StateView) -> None:
        """Copies the model's configuration, after other plugins have changed the model."""
        tokenizer = named_tokenizer(self.tokenizer)
        try:
            self._pretrained = Pretrained.of(state.model, tokenizer, self.max_shard_size)
        except TypeError as error:
            raise PluginError(
                f"hf-checkpoints: {error}, and no folder could be loaded there",
                fix="train one; lora exports adapters of peft as a folder; or switch "
                "hf-checkpoints off with " + switch_off("hf-checkpoints"),
            ) from error

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        """Starts the background writer; writes folders that a killed run left unwritten."""
        assert self._pretrained is not None
        folder = self._folder_of(state)
        folder.mkdir(parents=True, exist_ok=True)
        if self._background is None:
            remove_leftovers(folder)
            self._background = FolderWriter(self._pretrained, folder, self.keep, self.store)
        for checkpoint in sorted((state.run_dir / "checkpoints").glob("ba*")):
            if self._is_due(state, checkpoint) and not (folder / checkpoint.name).exists():
                self._write(state, checkpoint)

    @hookimpl(rank_zero=True)
    def checkpoint_saved(self, state: StateView, path: Path | Url) -> None:
        """Schedules a folder for this checkpoint, if one is due."""
        assert self._background is not None
        self._background.require()
        local = path
        if isinstance(path, Url):  # a run of a single process keeps a local copy
            local = state.run_dir / "checkpoints" / path.name.partition(".")[0]
        if not isinstance(local, Path) or not local.is_dir():
            warnings.warn(
                f"hf-checkpoints: no copy of {path} is on this machine, and no folder is written",
                stacklevel=2,
            )
            return
        self._last_checkpoint = local
        if self._is_due(state, local):
            self._write(state, local)

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        """Schedules a folder for the last checkpoint, and waits for all folders."""
        assert self._background is not None
        if self._last_checkpoint is not None:
            self._write(state, self._last_checkpoint)
        self._background.wait()

    @hookimpl
    def close(self, state: StateView) -> None:
        """Ends the thread."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def _folder_of(self, state: StateView) -> Path:
        return state.run_dir / "hf" if self.folder is None else self.folder

    def _is_due(self, state: StateView, checkpoint: Path) -> bool:
        """Whether a multiple of the interval lies between the previous folder and this checkpoint."""
        if self.interval is None:
            return True
        batch = batch_of(checkpoint)
        length = int(self.interval.value)
        folders = whole_folders(self._folder_of(state))
        batches_of_folders = self._begun | {batch_of(folder) for folder in folders}
        previous = max((number for number in batches_of_folders if number < batch), default=0)
        return batch // length > previous // length

    def _write(self, state: StateView, checkpoint: Path) -> None:
        """Schedules the folder of a checkpoint once: the last checkpoint of a fit may be saved twice."""
        assert self._background is not None
        if (batch := batch_of(checkpoint)) in self._begun:
            return
        self._begun.add(batch)
        self._background.write(linked(checkpoint, self._folder_of(state)), checkpoint.name)
