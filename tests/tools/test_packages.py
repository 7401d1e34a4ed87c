"""Lists of packages, which tools/packages.py writes from the folders."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lists():
    return runpy.run_path(str(ROOT / "tools" / "packages.py"))["lists"]


def test_each_list_is_what_the_script_writes(lists):
    """Whoever adds a package runs the script."""
    stale = [path for path, text in lists().items() if path.read_text(encoding="utf-8") != text]

    assert stale == [], "run `python tools/packages.py`"


ENTRY_POINTS = """
[project.entry-points."eventloop.algorithms"]
beta = "eventloop_alpha.beta:Beta"
[project.entry-points."eventloop.commands"]
gamma-ray = "eventloop_alpha.gamma_ray:run"
[project.entry-points."eventloop.storage"]
"*" = "eventloop_alpha.storage:storage"
[project.entry-points.pytest11]
"eventloop_alpha.plugin" = "eventloop_alpha.plugin"
"""


def test_a_new_folder_is_in_the_lists(tmp_path, lists):
    """A plugin and a command are found by their names; the extra holds what standard.txt names."""
    for name, entry_points in (("eventloop-zeta", ""), ("eventloop-alpha", ENTRY_POINTS)):
        (tmp_path / "plugins" / name).mkdir(parents=True)
        project = f'[project]\nname = "{name}"\n{entry_points}'
        (tmp_path / "plugins" / name / "pyproject.toml").write_text(project)
    (tmp_path / "plugins" / "standard.txt").write_text(
        "# wanted by most\n./plugins/eventloop-zeta\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project.optional-dependencies]\nstandard = [\n    "eventloop-old",\n]\ntest = ["pytest"]\n'
    )

    published, project = lists(tmp_path).values()

    assert published.splitlines() == [
        "alpha eventloop-alpha",
        "beta eventloop-alpha",
        "gamma-ray eventloop-alpha",
        "zeta eventloop-zeta",
    ]
    assert tomllib.loads(project)["project"]["optional-dependencies"] == {
        "standard": ["eventloop-zeta>=0.1,<0.2"],
        "test": ["pytest"],
    }


def test_the_linter_knows_each_package():
    """A package that it isn't told of could build on what is private."""
    contracts = runpy.run_path(str(ROOT / "tools" / "lint_imports.py"))["contracts"]
    settings = tomllib.loads(contracts())["tool"]["importlinter"]
    (rule,) = (contract for contract in settings["contracts"] if contract["type"] == "forbidden")
    packages = {path.parent.name for path in ROOT.glob("plugins/*/src/*/__init__.py")}

    assert len(packages) > 30
    assert set(settings["root_packages"]) == packages | {"eventloop"}
    assert set(rule["source_modules"]) == packages
