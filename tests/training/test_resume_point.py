"""Where the loop goes on: a fit that is over before its first batch enters no epoch."""

from __future__ import annotations

import pytest

from eventloop import Time


def test_an_end_that_is_moved_to_what_is_done_trains_nothing(make_trainer, make_plugin):
    """Not one more batch, and no epoch that begins and doesn't end."""

    def move(state):
        state.until = Time("1ep")

    trainer = make_trainer(algorithms=[make_plugin(fit_start=move)], max_duration="2ep")

    trainer.fit()
    trainer.fit()

    assert trainer.state.clock.moment()[:2] == (1, 3)


@pytest.mark.parametrize("hook", ["training_start", "fit_start"])
def test_a_run_that_is_stopped_before_its_first_batch_trains_on_none(
    hook, make_trainer, make_plugin
):
    """A plugin that finds nothing to do there isn't given a batch first."""
    stops = make_plugin(**{hook: lambda state: state.request_stop("enough")})
    trainer = make_trainer(callbacks=[stops])

    with pytest.warns(UserWarning, match="nothing was trained: the run is stopped by made"):
        trainer.fit()

    assert trainer.state.clock.batch == 0
    assert str(trainer.state.stop_reason) == "enough"
