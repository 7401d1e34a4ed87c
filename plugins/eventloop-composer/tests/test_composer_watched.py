"""Every callback and logger of Composer's sees and makes the same under its own trainer and under ours."""

from __future__ import annotations

import re
from pathlib import Path

import composer
import composer.callbacks
import composer.loggers
import pytest
from composer.core import Callback
from composer.loggers import LoggerDestination
from composer_cases import ours
from composer_watched import (
    CALLBACKS,
    LOGGERS,
    NOT_HERE,
    Watched,
    classes,
    quiet_streams,
    watched_run,
)

from eventloop import PluginError

pytestmark = pytest.mark.filterwarnings("ignore")
WATCHED = CALLBACKS | LOGGERS


@pytest.fixture
def run_in(tmp_path_factory, monkeypatch):
    """Runs a case in a folder of its own."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which Composer's logger writes to

    def run(kind, case):
        monkeypatch.chdir(tmp_path_factory.mktemp("run"))
        with quiet_streams():
            return watched_run(kind, case)

    return run


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", WATCHED)
def test_it_sees_and_makes_the_same(name, run_in):
    """Hooks with their timestamps, what is logged and in which order, files, and the weights."""
    (their_seen, theirs), (our_seen, here) = (
        run_in(kind, WATCHED[name]) for kind in (composer.Trainer, ours)
    )

    assert len(their_seen) > 10
    for one, other in zip(our_seen, their_seen, strict=False):
        assert one == other
    assert len(our_seen) == len(their_seen)
    assert here == theirs


def test_none_is_forgotten():
    """A class that another version brings has to be watched, or left out with a reason."""
    found = {
        **classes(composer.callbacks, Callback),
        **classes(composer.loggers, LoggerDestination),
    }

    assert sorted(found) == sorted([*WATCHED, *NOT_HERE])


def test_the_readme_says_what_is_not_watched():
    """With the same reason as here."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()

    rows = dict(re.findall(r"^\| (\w+) \| not run: needs (.+) \|$", readme, re.MULTILINE))

    assert rows == NOT_HERE


def test_a_hook_that_is_called_once_more_would_be_seen(run_in):
    """Control: the comparison isn't blind."""

    class Twice(composer.callbacks.LRMonitor):
        def batch_end(self, state, logger):
            super().batch_end(state, logger)
            if state.timestamp.batch == 3:
                super().batch_end(state, logger)

    plain, _ = run_in(ours, Watched(composer.callbacks.LRMonitor))
    twice, _ = run_in(ours, Watched(Twice))

    assert len(twice) == len(plain) + 1


def test_a_whole_checkpoint_of_composers_is_refused(tmp_path):
    """It would train from the beginning with the weights of the end."""
    loads = composer.callbacks.LoadCheckpoint(str(tmp_path / "ep1.pt"))

    with pytest.raises(PluginError, match="load_weights_only=True"):
        ours(model=CALLBACKS["LRMonitor"].model(), max_duration="1ep", callbacks=[loads])
