"""Each of Composer's algorithms: its trainer's weights and ours, bit by bit."""

from __future__ import annotations

import composer
import pytest
import torch
from composer.core import Algorithm
from composer_cases import CASES, MORE, algorithms, ours, trained

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY = {**CASES, **MORE}


def test_each_of_composers_algorithms_has_a_case():
    """One that a new version adds shall be seen."""
    found = {
        name
        for name, one in vars(algorithms).items()
        if isinstance(one, type) and issubclass(one, Algorithm)
    }

    assert found == CASES.keys()
    assert len(found) == 28


def differing(case, **given):
    """Returns the names of weights that differ between Composer's trainer and ours."""
    theirs, here = trained(composer.Trainer, case, **given), trained(ours, case, **given)
    assert theirs.keys() == here.keys()
    return [name for name, one in theirs.items() if not torch.equal(one, here[name])]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_several_microbatches_end_with_composers_weights(name):
    """The algorithm is the same object's code; order, passes, seeds and steps have to be, too."""
    assert differing(EVERY[name], device_train_microbatch_size=4) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_one_microbatch_ends_with_composers_weights(name):
    """A batch in one piece is scaled by nothing here, and by 1 there."""
    assert differing(EVERY[name]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", [one for one in EVERY if one != "GyroDropout"])  # wants even ones
def test_uneven_microbatches_end_with_composers_weights(name):
    """The last one has 2 samples of 8, and weighs as much as they do."""
    assert differing(EVERY[name], device_train_microbatch_size=3) == []


def test_two_algorithms_run_in_composers_order():
    """Control and claim: MixUp beside SAM draws once more in the second pass of a step."""
    case = CASES["MixUp"]
    both = type(case)(lambda: [*case.make(), *CASES["SAM"].make()])

    assert differing(both, device_train_microbatch_size=4) == []
    assert not torch.equal(*(trained(ours, one)["module.0.weight"] for one in (case, both)))
