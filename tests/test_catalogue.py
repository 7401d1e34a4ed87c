"""Every package in `plugins/` is what every plugin must be."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from torch import nn

from eventloop.plugin.discover import GROUPS
from eventloop.task import Task
from eventloop.testing import check_plugin, tiny_batches, tiny_task

FOLDERS = sorted((Path(__file__).parents[1] / "plugins").glob("eventloop-*"))
# What plugins with options that have no default are built with, by folder.
OPTIONS: dict[str, dict[str, object]] = {}


def image_task() -> Task:
    """The tiny task with its inputs as images of 3 x 3 pixels, whose rows are alike."""
    images = [(inputs.expand(1, 3, -1, -1).permute(2, 0, 1, 3), y) for inputs, y in tiny_batches()]
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3))  # noqa: E731
    return tiny_task(model=model, train_dataloader=images, eval_dataloaders={"test": images})


# Who doesn't suit the tiny task, by folder.
TASKS = {"eventloop-cutmix": image_task}
# How many ranks those need that one process doesn't suit.
WORLD_SIZES = {"eventloop-fsdp": 2}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_of_the_catalogue_keeps_the_contract(folder, clean, monkeypatch):
    """One that is new is covered the day its folder is there."""
    monkeypatch.syspath_prepend(folder / "src")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]

    for group, entry_points in project["entry-points"].items():
        for value in entry_points.values():
            module, _, name = value.partition(":")
            plugin = getattr(importlib.import_module(module), name)
            check_plugin(
                plugin,
                role=GROUPS[group],
                options=OPTIONS.get(folder.name),
                task=TASKS.get(folder.name, tiny_task),
                world_size=WORLD_SIZES.get(folder.name, 1),
            )


def test_there_is_a_catalogue():
    """Control: a folder that was moved would leave nothing to check."""
    assert len(FOLDERS) >= 3
