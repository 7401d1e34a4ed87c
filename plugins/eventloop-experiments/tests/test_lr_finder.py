"""The curve alone, the plugin in a run, and the command."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import eventloop_experiments
from eventloop import hookimpl
from eventloop.commands import UsageError
from eventloop_experiments.lr_finder import Curve, run
from eventloop_experiments.lr_finder.finder import LrFinder
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def curve_of(loss_at, num_steps=100, **given):
    curve = Curve(1e-5, 10.0, num_steps, **given)
    for step in range(num_steps):
        rate = curve.rate(step)
        if curve.add(rate, loss_at(rate)):
            break
    return curve


def test_rates_grow_evenly_in_their_logarithm():
    """From the first to the last, both included."""
    curve = Curve(1e-3, 1.0, 4)

    assert [curve.rate(step) for step in range(4)] == pytest.approx([1e-3, 1e-2, 1e-1, 1.0])


def test_the_proposal_is_where_the_loss_falls_fastest():
    """A sigmoid over the logarithm falls fastest in its middle."""
    curve = curve_of(lambda rate: 1 / (1 + math.exp(4 * math.log10(rate / 0.01))), smoothing=0.0)

    proposal = curve.proposal()
    assert proposal.steepest == pytest.approx(0.01, rel=0.1)
    assert proposal.lowest == pytest.approx(10.0)


def test_a_loss_that_explodes_ends_the_curve():
    """What follows says nothing, and takes time."""
    curve = curve_of(lambda rate: 1 - rate if rate < 0.5 else 100.0)

    assert 0.5 < curve.rates[-1] < 2
    assert curve.proposal().steepest < 0.5


def test_a_loss_below_0_explodes_as_any_other():
    """It is measured by its rise, whatever its sign; a log-density of its own may fall below 0."""
    below = curve_of(lambda rate: -2 - rate if rate < 0.5 else 100.0)
    through = curve_of(lambda rate: 1 - 4 * rate if rate < 0.5 else 100.0)

    for curve in (below, through):
        assert 0.5 < curve.rates[-1] < 2
        assert curve.proposal().steepest < 0.5


@pytest.mark.parametrize("loss_at", [lambda rate: 1 + rate, lambda rate: math.nan])
def test_nothing_is_proposed_where_the_loss_never_falls(loss_at):
    """A rate out of noise would be trained with."""
    assert curve_of(loss_at).proposal() is None


def two_groups(model):
    first, second = model[0], model[-1]
    return torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.02}],
        lr=0.1,
    )


def seen_rates(folder, **given):
    seen = []

    class Seen:
        name = "seen"

        @hookimpl
        def batch_end(self, state):
            (optimizer,) = state.optimizers.values()
            seen.append([group["lr"] for group in optimizer.param_groups])

    finder = LrFinder(low=1e-3, high=1.0, steps=6, out=folder / "curve.json")
    task = tiny_task(optimizer=two_groups, train_dataloader=tiny_batches(6))
    plugins = {"algorithms": [finder], "callbacks": [Seen()]}
    with isolated_trainer(folder, task, **plugins, max_duration="6ba", **given) as trainer:
        trainer.fit()
    return seen, json.loads((folder / "curve.json").read_text())


def test_groups_keep_the_ratios_of_their_rates(tmp_path):
    """The proposal is the largest of them; a schedule has no say."""
    seen, content = seen_rates(tmp_path, microbatch_size=2)

    rates = [1e-3 * 1000 ** (step / 5) for step in range(6)]
    assert [one[0] for one in seen] == pytest.approx(rates)
    assert [one[1] for one in seen] == pytest.approx([rate / 5 for rate in rates])
    assert content["rates"] == pytest.approx(rates)
    assert len(content["losses"]) == 6


def test_two_ranks_write_one_curve(tmp_path):
    """And stop at one batch."""

    def found(folder):
        return seen_rates(folder)[1]

    one, other = run_ranks(found, tmp_path)

    assert one == other


TASK = """
import torch
from eventloop import Task


def task():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 8, 3, generator=generator)
    return Task(
        model=torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 3)),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[(one, one.argmax(1)) for one in inputs],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"device": "cpu"},
    )
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tiny.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Its run is a process of its own, where the package may not be installed.
    source = Path(eventloop_experiments.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(source))
    return tmp_path


def test_the_command_proposes_and_leaves_nothing_but_the_picture(tiny, capsys):
    """The run is in a folder that is gone afterwards."""
    before = sorted(one.name for one in tiny.iterdir())

    status = run(["tiny.py", "--no-plugins", "--low", "1e-3", "--steps", "60", "--plot", "lr.png"])

    out, _ = capsys.readouterr()
    assert status == 0
    assert out.startswith("learning rate: ")
    rate = float(out.split()[2].rstrip(","))
    assert 1e-3 < rate < 10
    assert (tiny / "lr.png").read_bytes().startswith(b"\x89PNG")
    after = {one.name for one in tiny.iterdir()} - {"__pycache__"}
    assert after == {*before, "lr.png"}


@pytest.mark.parametrize(
    "argv",
    [("--low", "0"), ("--low", "x"), ("--low", "1", "--high", "0.1"), ("--max-duration", "3ep")],
)
def test_rates_that_are_none_are_refused(tiny, argv):
    """Before anything is trained."""
    with pytest.raises(UsageError, match=r"learning rate|isn't less|no effect"):
        run(["tiny.py", *argv])
