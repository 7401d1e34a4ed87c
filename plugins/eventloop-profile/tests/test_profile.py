"""The profile: what is recorded, written and printed."""

import json

import pytest

from eventloop import hookimpl
from eventloop_profile import Profile
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


@pytest.fixture
def profiled(tmp_path, capsys):
    """Trains with a profile that leaves two batches out and records two; returns what is printed."""

    def profiled(max_duration):
        profile = Profile(wait=1, warmup=1, active=2)
        with isolated_trainer(tmp_path, callbacks=[profile], max_duration=max_duration) as trainer:
            trainer.fit()
            assert capsys.readouterr().out == ""
        return profile, trainer.state.run_dir, capsys.readouterr().out

    return profiled


def names_in(path):
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]


def test_the_recorded_batches_are_written_and_printed(profiled):
    """A trace to look at, a table to read, and where the trace is; after all that a fit prints."""
    profile, run_dir, out = profiled("9ba")

    assert profile.path == run_dir / "profile.json"
    assert names_in(profile.path).count("Optimizer.step#SGD.step") == 2
    assert out.count("aten::addmm") == 1
    assert out.endswith(f"profile: {profile.path}; open it in https://ui.perfetto.dev\n")


def test_a_run_that_ends_early_keeps_what_was_recorded(profiled):
    """A run of three batches has one that counts."""
    profile, _, _ = profiled("3ba")

    assert names_in(profile.path).count("Optimizer.step#SGD.step") == 1


def test_a_run_too_short_says_so(profiled):
    """An empty table would look like a fault."""
    _, run_dir, out = profiled("1ba")

    assert out == "profile: nothing was recorded; the first 2 batches are left out\n"
    assert not (run_dir / "profile.json").exists()


class Fails:
    """Raises in the third batch."""

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == 3:
            raise EOFError


def test_a_failure_leaves_the_profile(tmp_path, capsys):
    """What was recorded until then is what one wants to see."""
    profile = Profile(wait=0, warmup=1, active=9)
    with isolated_trainer(tmp_path, callbacks=[profile, Fails()], max_duration="9ba") as trainer:
        with pytest.raises(EOFError):
            trainer.fit()

    assert profile.path.exists()
    assert "aten::addmm" in capsys.readouterr().out


def test_what_is_printed_is_safe_on_a_terminal(tmp_path, capsys):
    """A folder may be named by a stranger."""
    profile = Profile(wait=0, warmup=1, active=1)
    with isolated_trainer(tmp_path / "a\x1b[31mb", callbacks=[profile]) as trainer:
        trainer.fit()

    assert "a\\x1b[31mb" in capsys.readouterr().out.splitlines()[-1]


def test_rank_0_records_and_prints(tmp_path, capfd):
    """Two tables would be in each other's way."""

    def run(folder):
        task = tiny_task(train_dataloader=tiny_batches(6))
        with isolated_trainer(folder, task, callbacks=[Profile(wait=0, active=1)]) as trainer:
            trainer.fit()

    run_ranks(run, tmp_path)

    assert capfd.readouterr().out.count("profile: ") == 1


@pytest.mark.parametrize("given", [{"wait": -1}, {"warmup": 0}, {"active": 0}])
def test_a_schedule_that_records_nothing_is_refused(given):
    """At the start, not at the end."""
    with pytest.raises(ValueError, match="1 or more"):
        Profile(**given)
