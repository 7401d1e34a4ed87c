"""What came of a sweep."""

import optuna
import pytest

from eventloop_sweep.report import draw


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_plot_is_one_picture_where_it_was_asked_for(tmp_path):
    """As the other commands draw theirs."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    path = tmp_path / "sweep.png"
    assert not draw(study, path)

    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)

    assert draw(study, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
