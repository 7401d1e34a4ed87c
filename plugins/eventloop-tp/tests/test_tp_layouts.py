"""Layouts of four ranks: each trains what one process trains, and goes on from any other's checkpoint."""

from __future__ import annotations

import shutil

import pytest
import torch
from tp_cases import LAYOUTS, train

from eventloop_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its outputs are a view
CASES = [
    pytest.param(layout, optimizer, microbatches, id=f"{layout}, {optimizer}, {microbatches or 12}")
    for layout in LAYOUTS
    for optimizer in ("adamw", "muon")
    for microbatches in (None, 3)
]
# Which goes on in which; at every change one in other shards.
QUICK = ("fsdp", "tp 2 x dp 2")
PAIRS = [
    pytest.param(one, other, marks=[] if (one, other) == QUICK else pytest.mark.nightly)
    for one in (*LAYOUTS, "one")
    for other in (*LAYOUTS, "one")
]


def on_a_rank(folder, layout, **given):
    return train(folder, LAYOUTS[layout], **given)


def in_layout(folder, layout, **given):
    """Trains on four ranks, or in one process; returns what rank 0 gave, and what all hold."""
    if layout == "one":
        return train(folder, **given), []
    first, *others = run_ranks(on_a_rank, folder, layout, world_size=4, timeout_s=240, **given)
    for _, counts, _ in others:
        assert counts == first[1]
    return first, [held for *_, held in (first, *others)]


def assert_near(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.sampled(34)
@pytest.mark.parametrize(("layout", "optimizer", "microbatches"), CASES)
def test_each_layout_trains_what_one_process_trains(tmp_path, layout, optimizer, microbatches):
    """20 steps with dropout, clipping and a cosine over tokens: weights, counts and rates."""
    (expected, counts, _), _ = in_layout(tmp_path / "one", "one", optimizer=optimizer)

    (actual, found, _), held = in_layout(
        tmp_path / "ranks", layout, optimizer=optimizer, microbatch_size=microbatches
    )

    assert len(counts) == 20
    assert found == counts
    assert_near(actual, expected)
    num = sum(one.numel() for one in expected.values())
    assert all(whole == num for _, whole in held)
    assert layout == "ddp" or all(own < 0.6 * num for own, _ in held)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_layout_goes_on_from_a_checkpoint_of_any_other(tmp_path, first, second):
    """What a checkpoint holds doesn't depend on who saved it."""
    (expected, counts, _), _ = in_layout(tmp_path / "whole", "one")
    in_layout(tmp_path / "run", first, until="7ba", checkpoint_interval="7ba")

    (actual, found, _), _ = in_layout(tmp_path / "run", second, checkpoint_interval="7ba")

    assert found == counts[7:]
    assert_near(actual, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("tp 2 x dp 2", "adamw"),
        ("tp 2 x fsdp 2", "muon"),
        ("sequence 4", "muon"),
    ],
)
def test_a_layout_that_goes_on_is_one_run_to_the_bit(tmp_path, layout, optimizer):
    """Also the states of the optimizer, and what a rank alone knows."""
    given = {"optimizer": optimizer, "checkpoint_interval": "7ba"}
    (expected, counts, _), _ = in_layout(tmp_path / "whole", layout, **given)
    in_layout(tmp_path / "half", layout, until="7ba", **given)
    shutil.copytree(tmp_path / "half", tmp_path / "moved")

    (actual, found, _), _ = in_layout(tmp_path / "moved", layout, **given)

    assert found == counts[7:]
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
