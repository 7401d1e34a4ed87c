"""The table of samples lost and repeated: exact, refused, or a doubt that is stated before training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from eventloop_streaming.plugin import Streaming

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from stream_kinds import KINDS
from stream_resume import by_eventloop, on_ranks, resumed

# What is neither exact nor refused, and the words of the header or of a warning at the start.
DOUBTS = {
    "an iterable that counts epochs": "may get other batches",
    "datasets, shuffle buffer": "in a buffer of 16 samples that isn't saved",
    "webdataset, shuffle buffer": "without a seed",
}
REFUSED = {"generator": "used up after one epoch"}
INSTALLED = [
    name
    for name, kind in KINDS.items()
    if all(importlib.util.find_spec(one) is not None for one in kind.needs)
]
# These start services or processes of their own, which aren't for a test; the script has them.
HEAVY = {"Ray Data"} | {name for name in KINDS if name.startswith(("litdata", "mosaicml"))}
LIGHT = [name for name in INSTALLED if name not in HEAVY]
OTHERS = ("webdataset", "grain", "datasets", "litdata", "mosaicml", "Ray")  # not tried on two
# The ranks of `run_ranks` are daemons, which mustn't have processes of their own.
ON_RANKS = [
    name
    for name in LIGHT
    if name not in (*DOUBTS, *REFUSED) and not name.startswith(OTHERS) and "workers" not in name
]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LIGHT)
def test_no_sample_is_lost_in_silence(name):
    """Two stops each, at three points of two epochs."""
    found = resumed(by_eventloop, KINDS[name].make, 3)

    if name in REFUSED:
        assert REFUSED[name] in found["refused"]
    elif name in DOUBTS:
        plugin = Streaming()

        class State:
            train_dataloader = KINDS[name].make()

        plugin.init(State)
        assert any(DOUBTS[name] in said for said in (plugin.note, *found["warnings"]))
    else:
        assert (found["lost"], found["repeated"], found["other order"]) == (0, 0, 0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_lose_and_repeat_none(name):
    """Each rank goes on with its own."""
    found = resumed(on_ranks(2), KINDS[name].make, 1, 2)

    assert (found["lost"], found["repeated"], found["other order"]) == (0, 0, 0)


def test_the_table_sees_a_loss(tmp_path):
    """Control: a source that says it has a state and begins anew each time."""

    class Forgets:
        def __iter__(self):
            return KINDS["generator"].make()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    found = resumed(by_eventloop, Forgets, 1)

    assert found["repeated"] > 0


class BeginsAnew:
    """A loader with a length that, loaded behind its last batch, begins the next epoch: litdata's."""

    def __init__(self):
        self.num = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.num %= len(self)
        for batch in KINDS["IterableDataset, DataLoader"].make():
            if self.num <= batch[0] // len(batch):
                self.num += 1
                yield batch

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


def test_a_stop_behind_the_last_batch_adds_no_epoch(tmp_path):
    """One of the three stops is there."""
    found = resumed(by_eventloop, BeginsAnew, 3)

    assert (found["lost"], found["repeated"], found["other order"]) == (0, 0, 0)
