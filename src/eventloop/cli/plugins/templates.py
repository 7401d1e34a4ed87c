"""The files of a new plugin; words between @ are replaced."""

from __future__ import annotations

GROUPS = {"algorithm": "eventloop.algorithms", "callback": "eventloop.callbacks"}

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "eventloop-@NAME@"
version = "0.1.0"
description = "@CLASS@, as a plugin of eventloop."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["torch-eventloop@RANGE@"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."@GROUP@"]
@NAME@ = "@PACKAGE@:@CLASS@"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
@PACKAGE@ = ["py.typed"]

[tool.ruff]
line-length = 100
target-version = "py311"
src = ["src"]

[tool.ruff.lint]
select = ["E", "F", "W", "I", "UP", "B"]

[tool.mypy]
strict = true
mypy_path = "src"

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

_README = """\
# eventloop-@NAME@

## What it does

@WHAT@

## Install

    pip install eventloop-@NAME@

The next `eventloop fit` has it on; `-p no:@NAME@` leaves it out.

## Use

    eventloop fit task.py --@NAME@.@OPTION@

or, in Python, `Trainer(task, @ROLE@s=[@CLASS@(@ARGUMENT@)])`.

## Hooks

@HOOKS@

## Options

@OPTIONS@

## Cost

@COST@

## Evidence

What was measured, on what, with which command.

## Source

Where the method comes from.
"""

_INIT = '''\
"""@CLASS@, as a plugin of eventloop."""

from @PACKAGE@.plugin import @CLASS@

__all__ = ["@CLASS@"]
'''

_SCALING = '''\
"""The maths, free of hooks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def scale_(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiplies tensors by a factor.

    Args:
        tensors: of any shape and device; changed in place.
        factor: finite.
    """
    for tensor in tensors:
        tensor.mul_(factor)
'''

_ALGORITHM = '''\
"""The plugin: where the maths meets the loop."""

from __future__ import annotations

import math

from eventloop import State, hookimpl

from @PACKAGE@.scaling import scale_


class @CLASS@:
    """Scales the gradients of every step.

    Args:
        factor: what gradients are multiplied by, after clipping; 1 changes nothing.

    Raises:
        ValueError: `factor` isn't finite.
    """

    def __init__(self, *, factor: float = 1.0) -> None:
        if not math.isfinite(factor):
            raise ValueError(f"factor should be finite, but is {factor}")
        self.factor = factor

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Scales what the optimizer is about to use."""
        params = state.model.parameters()
        scale_((param.grad for param in params if param.grad is not None), self.factor)
'''

_CALLBACK = '''\
"""The plugin: what is counted, and when it is told."""

from __future__ import annotations

from typing import Any

from eventloop import StateView, hookimpl


class @CLASS@:
    """Counts the batches of a run, and logs their number now and then.

    Args:
        every: batches from one logged number to the next.

    Raises:
        ValueError: `every` is less than one.
    """

    def __init__(self, *, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every should be at least 1, but is {every}")
        self.every = every
        self.num_batches = 0

    @hookimpl
    def batch_end(self, state: StateView) -> None:
        """Counts the batch that has just ended."""
        self.num_batches += 1
        if self.num_batches % self.every == 0:
            state.log("@NAME@/batches", self.num_batches)

    def state_dict(self) -> dict[str, Any]:
        """Gives what a resumed run needs: tensors and values that JSON can hold."""
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        """Goes on from what `state_dict` gave, in the version of this package that is told."""
        self.num_batches = state["num_batches"]
'''

_TEST_ALGORITHM = '''\
"""The plugin in a training."""

from pathlib import Path

import pytest
import torch
from eventloop.testing import check_plugin, isolated_trainer

from @PACKAGE@ import @CLASS@


def weights_after(folder: Path, *algorithms: @CLASS@) -> torch.Tensor:
    with isolated_trainer(folder, algorithms=algorithms) as trainer:
        trainer.fit()
        return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()])


def test_it_is_what_every_plugin_must_be() -> None:
    """Documented options, the same run twice, also when resumed, no wait for the device."""
    check_plugin(@CLASS@, role="algorithm")


def test_a_factor_of_one_changes_nothing(tmp_path: Path) -> None:
    """The default must be safe to install."""
    without, with_it = weights_after(tmp_path / "a"), weights_after(tmp_path / "b", @CLASS@())

    torch.testing.assert_close(with_it, without, rtol=0, atol=0)


def test_a_factor_changes_the_training(tmp_path: Path) -> None:
    """What has no effect needn't be installed."""
    without = weights_after(tmp_path / "a")

    assert not torch.equal(weights_after(tmp_path / "b", @CLASS@(factor=0.5)), without)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    """It would spoil the weights in one step."""
    with pytest.raises(ValueError, match="finite"):
        @CLASS@(factor=float("nan"))
'''

_TEST_CALLBACK = '''\
"""The plugin in a training."""

from pathlib import Path

import pytest
from eventloop.testing import check_plugin, isolated_trainer

from @PACKAGE@ import @CLASS@


def test_it_is_what_every_plugin_must_be() -> None:
    """Documented options, read-only, no wait for the device, a resumed run is one, and so on."""
    check_plugin(@CLASS@, role="callback", options={"every": 1})


def test_every_batch_is_counted(tmp_path: Path) -> None:
    """Two epochs of three batches are six."""
    plugin = @CLASS@(every=2)

    with isolated_trainer(tmp_path, callbacks=[plugin], max_duration="2ep") as trainer:
        trainer.fit()

    assert plugin.num_batches == 6


def test_an_interval_of_nothing_is_refused() -> None:
    """It has no meaning."""
    with pytest.raises(ValueError, match="at least 1"):
        @CLASS@(every=0)
'''

_WORDS = {
    "algorithm": {
        "@WHAT@": "Multiplies the gradients of every step by a factor.",
        "@OPTION@": "factor 0.5",
        "@ARGUMENT@": "factor=0.5",
        "@HOOKS@": "`after_train_batch`: scales the gradients, which are complete and clipped.",
        "@OPTIONS@": "`factor` (float, 1.0): what gradients are multiplied by.",
        "@COST@": "One pass over the gradients a step; no wait for the device.",
    },
    "callback": {
        "@WHAT@": "Counts the batches of a run, and logs their number now and then.",
        "@OPTION@": "every 10",
        "@ARGUMENT@": "every=10",
        "@HOOKS@": "`batch_end`: counts.",
        "@OPTIONS@": "`every` (int, 100): batches from one logged number to the next.",
        "@COST@": "One addition a batch; no wait for the device.",
    },
}


def _files(role: str, more: dict[str, str]) -> dict[str, str]:
    readme = _README
    for word, text in _WORDS[role].items():
        readme = readme.replace(word, text)
    return {
        "pyproject.toml": _PYPROJECT,
        "README.md": readme,
        "src/@PACKAGE@/__init__.py": _INIT,
        "src/@PACKAGE@/py.typed": "",
        **more,
    }


FILES = {
    "algorithm": _files(
        "algorithm",
        {
            "src/@PACKAGE@/scaling.py": _SCALING,
            "src/@PACKAGE@/plugin.py": _ALGORITHM,
            "tests/test_@PACKAGE@.py": _TEST_ALGORITHM,
        },
    ),
    "callback": _files(
        "callback",
        {
            "src/@PACKAGE@/plugin.py": _CALLBACK,
            "tests/test_@PACKAGE@.py": _TEST_CALLBACK,
        },
    ),
}
