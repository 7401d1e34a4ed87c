"""Every package in `plugins/` is what every plugin must be."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task
from eventloop.plugin.records import GROUPS
from eventloop_remote.testing import check_storage
from eventloop_testing import check_plugin, tiny_batches, tiny_task


def images() -> Task:
    """A task of images of 8 x 8 pixels, for a model that takes any size."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(3, 4, 1, 8, 8, generator=generator)
    batches = [(batch, batch[:, 0, 0].argmax(1) % 3) for batch in pixels]
    return tiny_task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, 3),
        ),
        train_dataloader=batches,
        eval_dataloaders={"test": batches[:2]},
    )  # fmt: skip


def texts() -> Task:
    """A task of sequences of 16 tokens, for a model that takes any length."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, (3, 4, 16), generator=generator)
    batches = [(batch, (batch + 1) % 8) for batch in tokens]
    return tiny_task(
        model=lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)),
        loss=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        train_dataloader=batches,
        eval_dataloaders={"test": batches[:2]},
        metrics=None,
        num_tokens=lambda inputs: inputs.numel(),
    )


def deep() -> Task:
    """The tiny task with a matrix between its first and its last layer."""
    layers = (3, 8), (8, 8), (8, 3)
    return tiny_task(model=lambda: nn.Sequential(*(nn.Linear(*sizes) for sizes in layers)))


def loaded() -> Task:
    """The tiny task with a data loader that makes its batches."""
    inputs, targets = (torch.cat(parts) for parts in zip(*tiny_batches(6), strict=True))
    return tiny_task(train_dataloader=DataLoader(TensorDataset(inputs, targets), 3, shuffle=True))


class Counts:
    """A callback as Orca knows them."""

    def before_run(self, runner: Any) -> None:
        if runner.global_step == 0:
            runner.put("num_steps", 0)

    def after_iter(self, runner: Any) -> None:
        runner.update("num_steps", runner.get("num_steps") + 1)


# Checked by their own tests, beside the frameworks that they are for.
BRIDGES = {
    "eventloop-composer",
    "eventloop-lightning",
    "eventloop-llm",
    "eventloop-transformers",
}
FOLDERS = sorted(
    one
    for one in (Path(__file__).parents[2] / "plugins").glob("eventloop-*")
    if one.name not in BRIDGES
)
PROJECTS = {one: tomllib.loads((one / "pyproject.toml").read_text())["project"] for one in FOLDERS}
# The URL of a run, at which nothing is, for each package that adds a storage.
STORAGES = {"eventloop-remote": "memory://catalogue/run"}
# What plugins are built with that need an option, or show more with one, by folder.
OPTIONS: dict[str, dict[str, object]] = {
    "eventloop-checkpointing": {"layers": "?"},
    "eventloop-curriculum": {"batch_size": {"1ep": 6}},
    "eventloop-distill": {"teacher": nn.Linear(3, 3)},
    "eventloop-early-stopping": {"metric": "train/loss", "patience": "1ep", "min_delta": 0.2},
    "eventloop-gradcache": {"microbatch_size": 2},
    "eventloop-orca": {"callbacks": [Counts]},
    "eventloop-profile": {"wait": 0, "warmup": 1, "active": 1},
    "eventloop-tensorboard": {"histograms": "1ba"},
    "eventloop-tp": {"size": 2, "plan": {"0": "colwise", "1": "rowwise"}},
    "eventloop-wandb": {"mode": "offline"},
}
# What those train that need other data than a few numbers, by folder.
TASKS: dict[str, Callable[[], Task]] = {
    "eventloop-blurpool": images,
    "eventloop-curriculum": loaded,
    "eventloop-cutmix": images,
    "eventloop-muon": deep,
    "eventloop-progressive-resizing": images,
    "eventloop-report": lambda: tiny_task(eval_dataloaders=None),  # fewer plots, drawn many times
    "eventloop-seq-length-warmup": texts,
    "eventloop-tp": deep,
}
# Checked with every change, one of each kind: of the others their own tests run, and the contract at night.
QUICK = {"eventloop-ema", "eventloop-fsdp", "eventloop-jsonl"}
# How many ranks those need that one process doesn't suit.
WORLD_SIZES = {"eventloop-fsdp": 2, "eventloop-tp": 2}


def with_entry_points(groups: Iterable[str], *, is_slow: bool = False) -> pytest.MarkDecorator:
    """Runs a test for each package that has an entry point of a kind."""
    folders = [
        one
        for one in FOLDERS
        if not PROJECTS[one].get("entry-points", {}).keys().isdisjoint(groups)
    ]
    return pytest.mark.parametrize(
        "folder",
        [
            pytest.param(one, marks=pytest.mark.nightly)
            if is_slow and one.name not in QUICK
            else one
            for one in folders
        ],
        ids=lambda folder: folder.name,
    )


@with_entry_points(GROUPS, is_slow=True)
def test_a_plugin_of_the_catalogue_keeps_the_contract(folder, clean, monkeypatch):
    """One that is new is covered the day its folder is there."""
    monkeypatch.syspath_prepend(folder / "src")

    for group, _, plugin in entry_points_of(folder):
        if group in GROUPS:
            check_plugin(
                plugin,
                role=GROUPS[group],
                options=OPTIONS.get(folder.name),
                task=TASKS.get(folder.name, tiny_task),
                world_size=WORLD_SIZES.get(folder.name, 1),
            )


@with_entry_points(["eventloop.commands"])
def test_a_command_of_the_catalogue_describes_itself(folder, clean, monkeypatch, capsys):
    """A command is documented, and says how it is written without a task."""
    monkeypatch.syspath_prepend(folder / "src")

    for group, name, command in entry_points_of(folder):
        if group != "eventloop.commands":
            continue
        assert command.__doc__
        # They start a plugin, or switch one: none takes part.
        is_alone = name in ("plugins-new", "plugins-enable", "plugins-disable")
        assert command(["--help", *["--no-plugins"] * (not is_alone)]) == 0
        written = name.replace("plugins-", "plugins ")
        assert capsys.readouterr().out.startswith(f"usage: eventloop {written} ")


@with_entry_points(["eventloop.storage"])
def test_a_storage_of_the_catalogue_keeps_the_contract(folder, clean, monkeypatch, tmp_path):
    """As its author can check it, too."""
    monkeypatch.syspath_prepend(folder / "src")

    for _, _, storage in entry_points_of(folder):
        check_storage(storage, STORAGES[folder.name], tmp_path)


def entry_points_of(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Yields what a package adds: group, name, and what the entry point names."""
    for group, points in PROJECTS[folder].get("entry-points", {}).items():
        for name, value in points.items():
            module, _, attribute = value.partition(":")
            target = importlib.import_module(module)
            yield group, name, getattr(target, attribute) if attribute else target


def test_there_is_a_catalogue():
    """Control: a folder that was moved would leave nothing to check."""
    assert len(FOLDERS) >= 3
