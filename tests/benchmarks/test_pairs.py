"""Every pair of plugin packages is tried in benchmarks/; here a few, and what it would find."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from eventloop.naming import fold

ROOT = Path(__file__).parents[2]
HEAD = "import sys\nimport torch\nfrom eventloop import hookimpl\n\n\nclass Plugin:\n"
HARMLESS = """
    @hookimpl
    def batch_end(self, state): pass
"""
# What it keeps from batch to batch isn't saved.
FORGETFUL = """
    num = 0

    @hookimpl
    def batch_end(self, state):
        self.num += 1
        for param in state.model.parameters():
            param.data.mul_(1 - self.num / 1000)
"""
# It asks which of the two was found first.
DEPENDENT = """
    @hookimpl
    def training_start(self, state):
        sites = [one for one in sys.path if "site-" in one]
        if "eventloop_dependent" in str([*__import__("os").listdir(sites[0])]):
            for param in state.model.parameters():
                param.data.mul_(1.5)
"""
OWNER = """
    @hookimpl
    def build_optimizers(self, state):
        return {"main": torch.optim.SGD(state.model.parameters(), 0.1)}
"""
STANDS_OFF = """
    @hookimpl
    def unsuitable(self, state):
        return "it needs sounds"

    @hookimpl
    def batch_end(self, state): raise AssertionError
"""
BROKEN = """
    @hookimpl
    def init(self, state): raise LookupError("nothing found")
"""
CODES = {
    "harmless": HARMLESS,
    "forgetful": FORGETFUL,
    "dependent": DEPENDENT,
    "owner": OWNER,
    "other-owner": OWNER,
    "stands-off": STANDS_OFF,
    "broken": BROKEN,
}


@pytest.fixture(scope="module")
def pairs():
    """The module benchmarks/pairs.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("pairs")


@pytest.fixture(scope="module")
def made(pairs, tmp_path_factory):
    """Packages, each of which has a mistake of its own; by name."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, code in CODES.items():
        module = f"eventloop_{fold(name)}"
        source = folder / f"eventloop-{name}" / "src"
        source.mkdir(parents=True)
        (source / f"{module}.py").write_text(HEAD + code)
        (source.parent / "pyproject.toml").write_text(
            f'[project]\nname = "eventloop-{name}"\nversion = "0.1.0"\n'
            f'[project.entry-points."eventloop.algorithms"]\n{name} = "{module}:Plugin"\n'
        )
    return {one.name: one for one in pairs.packages_in(folder)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [("ema", "mixup"), ("jsonl", "label-smoothing")])
def test_packages_of_this_repository_live_together(names, pairs):
    """All of them are tried in the benchmark; it takes minutes."""
    packages = {one.name: one for one in pairs.packages_in(pairs.PLUGINS)}

    found = pairs.judge(*(packages[name] for name in names))

    assert (found.verdict, found.message, found.kind) == ("trains", "", "images")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("names", "verdict", "message"),
    [
        (("harmless", "forgetful"), "fails", "resumed: 0.weight is another"),
        (("harmless", "dependent"), "fails", "installed in the other order: 0.weight is another"),
        (("harmless", "broken"), "fails", "LookupError: nothing found"),
        (("owner", "other-owner"), "refused", "build_optimizers"),
        (("harmless", "harmless"), "trains", ""),
    ],
)
def test_a_pair_that_does_not_work_is_found_or_refuses(names, verdict, message, pairs, made):
    """Each made with that mistake: what the benchmark finds nothing in would prove nothing else."""
    found = pairs.judge(*(made[name] for name in names))

    assert found.verdict == verdict
    assert message in found.message


def test_who_has_no_part_anywhere_is_named_with_the_reason(pairs, made):
    """Not on images, nor on texts, nor on two ranks."""
    found = pairs.judge(made["harmless"], made["stands-off"])

    assert found.verdict == "no part"
    assert found.message == "stands-off is off: it needs sounds"


def test_the_matrix_has_a_mark_for_each_pair(pairs, capsys):
    """And below it every pair that doesn't train, with its reason."""
    verdicts = [
        pairs.Verdict("ema", "ema", "images", "trains"),
        pairs.Verdict("ema", "swa", "images", "refused", "ema and swa both average"),
        pairs.Verdict("swa", "swa", "images", "fails", "broken"),
    ]

    pairs.write(verdicts)

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [" 1 ema  .", " 2 swa  x  F"]
    assert "ema + swa (images): ema and swa both average" in lines
    assert "swa (images): broken" in lines


def test_a_package_that_is_not_there_is_told(pairs, monkeypatch, capsys):
    """An empty matrix would look like one without a failure."""
    monkeypatch.setattr("sys.argv", ["pairs.py", "--only", "ema", "nosuch"])

    with pytest.raises(SystemExit):
        pairs.main()
    assert "no package is named nosuch; there are agc, blurpool" in capsys.readouterr().err
