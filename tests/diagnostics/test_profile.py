"""The profile: what is recorded, written and shown."""

from __future__ import annotations

import json

import pytest

from eventloop.diagnostics.profile import Profile


@pytest.fixture
def profiled(make_trainer):
    """Trains with a profile that leaves two batches out and records two."""

    def profiled(**given):
        profile = Profile(wait=1, warmup=1, active=2)
        trainer = make_trainer(callbacks=[profile], **given)
        trainer.fit()
        return profile, trainer.state.run_dir

    return profiled


def test_the_recorded_batches_are_written_and_shown(profiled):
    """A trace to look at, a table to read."""
    profile, run_dir = profiled(max_duration="9ba")

    names = [event.get("name") for event in json.loads(profile.path.read_text())["traceEvents"]]
    assert profile.path.parent == run_dir
    assert names.count("Optimizer.step#SGD.step") == 2
    assert "aten::addmm" in profile.table()


def test_a_run_that_ends_early_keeps_what_was_recorded(profiled):
    """A run of three batches has one that counts."""
    profile, _ = profiled(max_duration="3ba")

    names = [event.get("name") for event in json.loads(profile.path.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == 1


def test_a_run_too_short_says_so(profiled):
    """An empty table would look like a fault."""
    profile, run_dir = profiled(max_duration="1ba")

    assert profile.table() == "profile: nothing was recorded; the first 2 batches are left out"
    assert not (run_dir / "profile.json").exists()


def test_a_failure_leaves_the_profile(make_trainer, make_plugin):
    """What was recorded until then is what one wants to see."""
    profile = Profile(wait=0, warmup=1, active=9)
    failing = make_plugin("failing", batch_end=lambda state: 1 // (3 - state.clock.batch))
    trainer = make_trainer(callbacks=[profile], algorithms=[failing], max_duration="9ba")

    with pytest.raises(ZeroDivisionError):
        trainer.fit()

    assert profile.path.exists()


@pytest.mark.parametrize("given", [{"wait": -1}, {"warmup": 0}, {"active": 0}])
def test_a_schedule_that_records_nothing_is_refused(given):
    """At the start, not at the end."""
    with pytest.raises(ValueError, match="1 or more"):
        Profile(**given)
