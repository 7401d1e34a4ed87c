"""The modes of `eventloop fit`."""

from __future__ import annotations

import itertools
import tempfile

import pytest

FIT = ("fit", "tiny.py", "--no-plugins")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    # torch makes this folder wherever it is first imported that far.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return folder


def test_a_dry_run_says_so_and_leaves_nothing(run, tiny, temporary):
    """Neither a folder nor the weights that would be mistaken for a result."""
    ran = run(*FIT, "--dry-run", "--export", "m.safetensors", "--max-duration", "50ep")

    assert (ran.status, ran.err) == (0, "")
    assert "dry run: two epochs of two batches; the run dir is removed at the end" in ran.out
    assert ran.out.splitlines()[-1].startswith("2 epochs, 4 batches in ")
    left = {path.name for path in tiny.iterdir()} - {"__pycache__"}
    assert left == {"pyproject.toml", "tiny.py"}
    assert list(temporary.iterdir()) == []


def test_a_dry_run_that_fails_leaves_nothing(run, tiny, temporary, install):
    """The plugin that broke it is named, and its folder is gone."""
    install("bad", BAD, group="eventloop.callbacks")

    ran = run("fit", "tiny.py", "--dry-run", "--no-plugins", "-p", "bad")

    assert ran.status == 1
    assert "raised by plugin bad" in ran.err
    assert list(temporary.iterdir()) == []


BAD = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def training_end(self, state):
        raise RuntimeError("bad")
"""


def test_overfitting_evaluates_on_what_it_trains_on(run, tiny):
    """The numbers are those of the batches that are learnt."""
    ran = run(*FIT, "--overfit-batches", "1", "--max-duration", "20ep")

    assert "overfit: trains and evaluates on the same batches, 1 of them" in ran.out
    assert ran.out.splitlines()[-1].startswith("20 epochs, 20 batches in ")
    assert "overfit/accuracy" in ran.out


def test_limits_shorten_training_and_evaluation(run, tiny):
    """An epoch of three batches becomes one of two."""
    ran = run(*FIT, "--limit-train-batches", "2", "--limit-eval-batches", "1", "--sanity-eval", "1")

    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines()[-1].startswith("2 epochs, 4 batches in ")


MODES = ("--dry-run", "--overfit-batches", "--limit-train-batches",
         "--limit-eval-batches", "--sanity-eval")  # fmt: skip
TOGETHER = {
    ("--dry-run", "--sanity-eval"), ("--overfit-batches", "--sanity-eval"),
    ("--limit-train-batches", "--limit-eval-batches"), ("--limit-train-batches", "--sanity-eval"),
    ("--limit-eval-batches", "--sanity-eval"),
}  # fmt: skip


@pytest.mark.parametrize("pair", list(itertools.combinations(MODES, 2)), ids=" ".join)
def test_two_modes_work_together_or_contradict_each_other(pair, run, tiny):
    """Every pair is one or the other; none is ignored in silence."""
    flags = [word for mode in pair for word in ([mode] if mode in MODES[:1] else [mode, "1"])]

    ran = run(*FIT, *flags)

    if pair in TOGETHER:
        assert (ran.status, ran.err) == (0, "")
    else:
        assert (ran.status, ran.out) == (2, "")
        assert "contradict each other" in ran.err
        assert "fix" in ran.err


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("text", ["0", "-1", "0.5", "two", "²", "9" * 5000])
def test_what_is_no_number_of_batches_is_refused(mode, text, run, tiny):
    """With the flag and the value."""
    ran = run(*FIT, f"{mode}={text}")

    assert (ran.status, ran.out) == (2, "")
    assert f"{mode} takes a whole number, 1 or more, not '{text[:50]}" in ran.err


@pytest.mark.parametrize("mode", ["--sanity-eval", "--limit-eval-batches"])
def test_a_mode_for_eval_data_needs_eval_data(mode, run, tiny):
    """A mode without effect would look like one that found nothing."""
    text = (tiny / "tiny.py").read_text().replace('eval_dataloaders={"test"', 'name="t" or {"test"')
    (tiny / "tiny.py").write_text(text)

    ran = run(*FIT, mode, "1")

    assert ran.status == 2
    assert f"{mode} has no effect: the task has no eval data" in ran.err


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by torch's compiler
def test_compile_is_a_switch_or_a_mapping_of_options(run, tiny):
    """The command says both; the header says what came of it."""
    for value in ('{"backend": "eager"}', "false"):
        ran = run(*FIT, "--compile", value)
        assert (ran.status, ran.err) == (0, "")
        assert ("compile: forward and loss in one region, backend=eager" in ran.out) == (
            value != "false"
        )
        assert ran.out.count("compiling: the first step") == (value != "false")

    by_layer = run(*FIT, "--compile", '{"layers": true, "backend": "eager"}')
    assert "compile: 2 layers, each compiled separately, backend=eager" in by_layer.out
    assert "isn't of type bool or layers or dict[str, Any]" in run(*FIT, "--compile", "maybe").err


OBSERVER = """
class Plugin:
    status = 1

    def __enter__(self):
        print("watches")

    def __exit__(self, *error):
        print("reports")

    def observed(self, one):
        return one
"""


def test_the_check_is_an_observer_of_a_package(run, tiny, install):
    """It reports when the run is over, and what it found is the exit status."""
    install("check", OBSERVER, group="eventloop.options")

    ran = run(*FIT, "--check")

    assert (ran.status, ran.err) == (1, "")
    assert ran.out.startswith("watches\n")
    assert ran.out.endswith("reports\n")
    assert run(*FIT).status == 0


def test_the_check_without_its_package_says_which_to_install(run, tiny, monkeypatch):
    """Before anything is trained, with the line that brings it."""
    monkeypatch.setattr("eventloop.plugin.discover.installed_entry_points", lambda: ([], []))
    monkeypatch.setattr("importlib_metadata.distributions", lambda **_: iter(()))

    ran = run(*FIT, "--check")

    assert (ran.status, ran.out) == (2, "")
    assert "--check needs eventloop-check, which isn't installed" in ran.err
    assert "`pip install ./plugins/eventloop-check`" in ran.err


def test_two_packages_with_a_check_are_an_error(run, tiny, install):
    """None is taken by chance, and each is named."""
    install("check", OBSERVER, group="eventloop.options", distribution="eventloop-check")
    install("check", OBSERVER, group="eventloop.options", distribution="eventloop-other")

    ran = run(*FIT, "--check")

    assert (ran.status, ran.out) == (1, "")
    assert "2 packages add the option 'check': " in ran.err
    assert "eventloop-check" in ran.err
    assert "eventloop-other" in ran.err
