"""Which weights eval and predict use: named, best, fitting in part, or as built."""

from __future__ import annotations

import pytest


def test_weights_that_do_not_exist_are_wrong_usage(run, tiny):
    """The check comes before the task is built."""
    ran = run("eval", "tiny.py", "--weights", "m.safetensors")

    assert ran.status == 2
    assert "there is no file 'm.safetensors'" in ran.err


def test_weights_that_fit_in_part_are_evaluated_where_that_is_asked_for(run, tiny):
    """A backbone, say; what the file lacks is told of."""
    run("fit", "tiny.py", "--no-plugins", "--export", "m.safetensors")
    code = (tiny / "tiny.py").read_text()
    (tiny / "more.py").write_text(code.replace("Linear(3, hidden_size),", "Linear(3, hidden_size),"
                                               " torch.nn.Linear(4, 4),"))  # fmt: skip
    argv = ("eval", "more.py", "--no-plugins", "--weights", "m.safetensors")

    strict = run(*argv)

    assert strict.status == 1
    assert "can't be loaded" in strict.err
    with pytest.warns(
        UserWarning, match=r"lacks 2 weights of the model, left as built: '2\.weight'"
    ):
        assert run(*argv, "--not-strict").status == 1  # the second layer has another shape


@pytest.mark.parametrize("flag", ["--best", "--not-strict"])
def test_what_is_said_of_weights_needs_some(flag, run, tiny):
    """It would have no effect."""
    ran = run("eval", "tiny.py", flag)

    assert ran.status == 2
    assert f"{flag} has no effect without --weights" in ran.err


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_the_header_says_which_weights_these_are(command, run, followed):
    """A number of weights that nothing has trained is none of the run."""
    argv = (command, "tiny.py", "--no-plugins")

    assert "weights: as the task builds them, not trained here" in run(*argv).out
    assert "weights: there\n" in run(*argv, "--weights", "there").out
    assert "weights: there, the best" in run(*argv, "--weights", "there", "--best").out
    assert "weights: those of the resumed run" in run(*argv, "--run-dir", "there",
                                                           "--allow-config-change").out  # fmt: skip
