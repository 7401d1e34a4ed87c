"""The option `every`: an implementation runs once for each multiple."""

from __future__ import annotations

import pytest

from eventloop import PluginError, hookimpl, hookspec


def test_every_runs_once_for_each_multiple(make_trainer):
    """On the first call after it was crossed, from the clock alone."""

    class Sometimes:
        """Listens now and then."""

        def __init__(self):
            self.heard = []

        @hookimpl(every="2ba")
        def batch_end(self, state):
            self.heard.append(("batch_end", state.clock.batch))

        @hookimpl(every="2ba")
        def before_forward(self, state):
            self.heard.append(("before_forward", state.clock.batch))

    sometimes = Sometimes()
    make_trainer(callbacks=[sometimes], max_duration="5ba", microbatch_size=2).fit()

    assert sometimes.heard == [
        ("batch_end", 2), ("before_forward", 2), ("batch_end", 4), ("before_forward", 4),
    ]  # fmt: skip


def test_every_counts_once_however_often_the_hook_is_called(make_trainer):
    """A hook of the core's fires once a batch; a plugin's may be called any number of times."""

    class Specs:
        @hookspec(per="any")
        def ema_moved(self, state, decay):
            """Called after the averages have moved."""

    class Ema:
        """Calls twice a batch."""

        hookspecs = Specs

        @hookimpl
        def batch_end(self, state):
            state.call("ema_moved", 0.9)
            state.call("ema_moved", 0.9)

    class Sometimes:
        """Listens now and then."""

        heard = []

        @hookimpl(every="2ba")
        def ema_moved(self, state):
            self.heard.append(state.clock.batch)

    make_trainer(algorithms=[Ema()], callbacks=[Sometimes()], max_duration="5ba").fit()

    assert Sometimes.heard == [2, 4]


def test_a_question_is_asked_each_time(make_trainer):
    """Between two multiples it would have no answer."""

    class Sometimes:
        """Answers now and then."""

        @hookimpl(every="2ba")
        def should_stop(self, state):
            return False

    with pytest.raises(
        PluginError, match="every='2ba' is for events, but should_stop is a question"
    ):
        make_trainer(callbacks=[Sometimes()])
