"""Fixtures: a check whose runs are made in this process, and ranks as forks of it.

`loss_cases` is importable by its name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Task
from eventloop_check.check_loss.compare import Comparison
from eventloop_check.check_loss.laws import Variant
from eventloop_check.check_loss.loss_check import Measured, Report, Row, check
from eventloop_check.check_loss.measurement import Measurement
from eventloop_check.check_loss.probe import CheckLoss
from eventloop_testing import isolated_trainer, run_ranks

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes of their own, which import the package installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


class Checked:
    """What was found, by the names of the variants."""

    def __init__(self, found: Report) -> None:
        self.found = found
        self.results = {row.variant.name: row.result for row in found.rows}
        self.differing = {name for name, one in self.results.items() if one == "differs"}
        self.causes = {row.cause.kind for row in found.rows if row.cause}

    def row(self, name: str) -> Row:
        """Returns the row of a variant."""
        return next(row for row in self.found.rows if row.variant.name == name)

    def comparison(self, name: str) -> Comparison:
        """Returns the comparison of a variant that differs."""
        update = self.row(name).update
        assert update is not None
        assert update.compared is not None
        return update.compared

    def factor(self, name: str) -> float:
        """Returns the factor of its loss."""
        return self.comparison(name).loss_factor

    def gradient_factor(self, name: str) -> float:
        """Returns the factor of its gradient."""
        return self.comparison(name).scale


Check = Callable[..., Checked]


def trained(make: Callable[[], Task], variant: Variant, folder: Path, settings: Any) -> None:
    """Makes the run of a variant, with a task of its own."""
    torch.manual_seed(0)
    probe = CheckLoss(variant=variant.name, folder=folder)
    own = {"microbatch_size": variant.microbatch_size, "eval_interval": None, "precision": "fp32"}
    given = {"max_duration": "1ba", "on_bad_loss": "ignore", **own, **settings}
    place = folder / "runs" / variant.name
    with isolated_trainer(place, make(), algorithms=[probe], **given) as trainer:
        trainer.fit()


@pytest.fixture
def checked(tmp_path: Path) -> Check:
    """Checks a task: `checked(make, declared={}, **settings)`."""

    def checked(
        make: Callable[[], Task], declared: Mapping[str, str] | None = None, **settings: Any
    ) -> Checked:
        def measured(variant: Variant) -> Measurement | str:
            arguments = (make, variant, tmp_path, settings)
            try:
                if variant.num_ranks > 1:
                    run_ranks(trained, *arguments)
                else:
                    trained(*arguments)
            except Exception as error:  # as the command, which reads its message
                return str(error)
            content = json.loads((tmp_path / f"{variant.name}.json").read_text())
            return Measurement.from_json(content)

        def measure(variants: Sequence[Variant]) -> Measured:
            return {one.name: measured(one) for one in variants}

        return Checked(check(measure, declared or {}))

    return checked
