"""A plugin on its way from a folder to a run: built, installed, active, uninstalled, gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

import eventloop

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "eventloop-wheel-test"
version = "0.3"
dependencies = ["torch-eventloop"]

[project.entry-points."eventloop.callbacks"]
wheel-test = "eventloop_wheel_test:WheelTest"

[tool.setuptools]
py-modules = ["eventloop_wheel_test"]
"""

PLUGIN = '''
from eventloop import hookimpl


class WheelTest:
    """Says that it is there."""

    @hookimpl
    def fit_end(self, state):
        print("wheel-test heard fit_end")
'''

TASK = """
import torch
from eventloop import Task

task = Task(
    model=torch.nn.Linear(3, 3),
    loss=torch.nn.functional.cross_entropy,
    train_dataloader=[(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))],
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    settings={"max_duration": "1ep", "device": "cpu"},
)
"""

Run = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A plugin package as its author writes it."""
    folder = tmp_path / "eventloop-wheel-test"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "eventloop_wheel_test.py").write_text(PLUGIN)
    return folder


@pytest.fixture
def python(clean: Path, tmp_path: Path) -> Run:
    """Runs Python in a fresh environment that sees what is installed in the running one."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=os.name != "nt", with_pip=not any(distributions(name="pip")))
    (site,) = home.rglob("site-packages")
    running = [one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
    source = str(Path(eventloop.__file__).parents[1])  # where it isn't installed
    # With what their own .pth files add: an editable installation is one.
    lines = [f"import site; site.addsitedir({one!r})" for one in running]
    (site / "running.pth").write_text("\n".join([*lines, source]))
    executable = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # What is set for the pip and Python of these tests isn't meant for that environment.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def python(*argv: str | Path, status: int = 0) -> str:
        done = subprocess.run(
            [executable, *argv], capture_output=True, text=True, check=False, env=environ, cwd=clean
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + (done.stderr if status else "")

    return python


@pytest.mark.nightly
def test_a_plugin_is_active_from_install_to_uninstall(python, package, clean, tmp_path):
    """This is the promise: pip installs it, and the next fit has it; nothing else changes."""
    (clean / "task.py").write_text(TASK)
    offline = ("--no-index", "--no-deps")
    python("-m", "pip", "wheel", package, "-w", tmp_path, "--no-build-isolation", *offline)
    (wheel,) = tmp_path.glob("*.whl")

    before = listed(python)
    python("-m", "pip", "install", wheel, *offline)
    during, fit = listed(python), python("-m", "eventloop", "fit", "task.py")
    python("-m", "pip", "uninstall", "--yes", "eventloop-wheel-test")
    after, fit_after = listed(python), python("-m", "eventloop", "fit", "task.py")

    assert before == after
    assert [row for row in during if row not in before] == [
        {
            "name": "wheel-test",
            "role": "callback",
            "version": "0.3",
            "distribution": "eventloop-wheel-test",
            "status": "active",
            "reason": "",
            "marks": [],
        }
    ]
    (header,) = [line for line in fit.splitlines() if line.startswith("callbacks: ")]
    assert "wheel-test 0.3" in header
    assert "wheel-test heard fit_end" in fit
    assert "wheel-test" not in fit_after


def listed(python: Run) -> list[dict[str, str]]:
    """Returns the rows of `eventloop plugins`."""
    return json.loads(python("-m", "eventloop", "plugins", "--json"))


EXTENDED = {
    "regularizer": '''
from eventloop import hookimpl, hookspec


class Hooks:
    """What `regularizer` asks other packages."""

    @hookspec(per="microbatch", collection=True)
    def regularizer_terms(self, state, scale=1.0):
        """Returns a term to add to the loss."""

    @hookspec(per="microbatch", firstresult=True)
    def regularizer_factor(self, state):
        """Returns the weight of all terms."""


class Plugin:
    """Adds the terms of other packages to the loss."""

    hookspecs = Hooks

    @hookimpl(wrapper=True)
    def loss(self, state):
        loss = yield
        terms = state.call("regularizer_terms", scale=2.0)
        weight = state.call("regularizer_factor")
        print(f"{len(terms)} terms, weight {weight}")
        return loss + weight * sum(terms)

    @hookimpl(conditional=True, trylast=True)
    def regularizer_factor(self, state):
        return 0.5
''',
    "l1": '''
from eventloop import hookimpl


class Plugin:
    """Keeps weights small."""

    @hookimpl
    def regularizer_terms(self, state, scale):
        return scale * sum(param.abs().sum() for param in state.model.parameters())
''',
    "confidence": '''
from eventloop import hookimpl


class Plugin:
    """Keeps outputs small."""

    @hookimpl
    def regularizer_terms(self, state):
        return state.outputs.square().mean()
''',
    "weight": '''
from eventloop import hookimpl


class Plugin:
    """Says how much the terms count."""

    @hookimpl
    def regularizer_factor(self, state):
        return 0.25
''',
}


@pytest.mark.nightly
def test_packages_extend_another_from_install_to_uninstall(python, clean, tmp_path):
    """What each step prints names the packages: who declares, who implements, what is missing."""
    (clean / "task.py").write_text(TASK)
    others = [row["name"] for row in listed(python) if row["role"] in ("algorithm", "callback")]
    (clean / "pyproject.toml").write_text(f"[tool.eventloop]\ndisable = {others}\n")
    offline = ("--no-index", "--no-deps")
    folders = [written(tmp_path, name, code) for name, code in EXTENDED.items()]
    python("-m", "pip", "wheel", *folders, "-w", tmp_path / "w", "--no-build-isolation", *offline)
    wheels = {one.name.split("-")[0].removeprefix("eventloop_"): one
              for one in (tmp_path / "w").glob("*.whl")}  # fmt: skip
    eventloop = ("-m", "eventloop")

    python("-m", "pip", "install", *(wheels[name] for name in wheels if name != "weight"), *offline)
    terms = python(*eventloop, "plugins", "hooks", "regularizer_terms")
    order = python(*eventloop, "plugins", "order", "regularizer_factor")
    fit = python(*eventloop, "fit", "task.py")

    assert terms == (
        "def regularizer_terms(self, state, scale=1.0)\n"
        "    collection, per microbatch\n"
        "    declared by regularizer\n"
        "    implemented by confidence, l1\n"
        "\n"
        "Returns a term to add to the loss.\n"
    )
    assert "regularizer algorithm conditional, trylast" in " ".join(order.split())
    assert "2 terms, weight 0.5\n" in fit

    python("-m", "pip", "install", wheels["weight"], *offline)
    order = python(*eventloop, "plugins", "order", "regularizer_factor")
    owned = python(*eventloop, "fit", "task.py")

    assert "regularizer_factor weight algorithm owner" in " ".join(order.split())
    assert "2 terms, weight 0.25\n" in owned

    python("-m", "pip", "uninstall", "--yes", "eventloop-l1")
    assert "1 terms, weight 0.25\n" in python(*eventloop, "fit", "task.py")

    python("-m", "pip", "uninstall", "--yes", "eventloop-regularizer")
    check = python(*eventloop, "plugins", "check", status=1)
    refused = python(*eventloop, "fit", "task.py", status=1)

    for name, hook in [("confidence", "terms"), ("weight", "factor")]:
        for out in (check, refused):
            what = f"no hook is named 'regularizer_{hook}', and no installed plugin declares it"
            assert what in out
            assert f"{name} (eventloop-{name} 0.3), method Plugin.regularizer_{hook}" in out


def written(folder: Path, name: str, code: str) -> Path:
    """Writes a package with one plugin as its author does."""
    package = folder / f"eventloop-{name}"
    package.mkdir()
    pyproject = PYPROJECT.replace("wheel-test", name).replace("wheel_test", name)
    pyproject = pyproject.replace(":WheelTest", ":Plugin").replace("callbacks", "algorithms")
    (package / "pyproject.toml").write_text(pyproject)
    (package / f"eventloop_{name}.py").write_text(code)
    return package
