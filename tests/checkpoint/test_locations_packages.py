"""Runs at URLs: which package's storage is used, and what holds for the one of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eventloop.checkpoint.locations import storage_for
from eventloop.cli import main
from eventloop.errors import PluginError, UsageError
from eventloop.plugin import discover
from eventloop.storage import Url
from eventloop_remote.testing import check_storage

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-storage.md"
TASK = """
import torch
from eventloop import Task
from eventloop_testing import tiny_batches

task = Task(
    model=torch.nn.Linear(3, 3),
    loss=torch.nn.functional.cross_entropy,
    train_dataloader=tiny_batches(),
    eval_dataloaders={"test": tiny_batches(1)},
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    settings={"max_duration": "1ep", "device": "cpu"},
)
"""
NAMED = """
class checkpoints:
    def __init__(self, folder, copies):
        self.folder = {0!r}
def lock(run, local):
    return local
"""


@pytest.fixture
def add(install, monkeypatch):
    """Installs storages; those of the environment are left out."""
    everything = discover.installed_entry_points

    def visible():
        points, problems = everything()
        own = [one for one in points if one.group != "eventloop.storage" or "_module" in one.value]
        return own, problems

    monkeypatch.setattr(discover, "installed_entry_points", visible)
    monkeypatch.setattr("eventloop.cli.plugins_list.installed_entry_points", visible)

    def add(scheme, code, distribution, target=""):
        install(scheme, code, target=target, group="eventloop.storage", distribution=distribution)

    return add


@pytest.fixture
def example(add, clean):
    """The storage of the page, installed, and a task; its module."""
    (code,) = re.findall(
        r'```python\n# eventloop_sqlite.py\n("""Checkpoints of.*?)```', PAGE.read_text(), re.DOTALL
    )
    add("sqlite", code, "eventloop-sqlite", ":storage")
    (clean / "tiny.py").write_text(TASK)
    return storage_for(Url("sqlite://runs.db/first"))


@pytest.fixture
def run(capsys):
    """Runs `eventloop ...` in process; returns its status and what it wrote."""

    def run(*argv):
        capsys.readouterr()
        status = main(argv)
        return status, *capsys.readouterr()

    return run


# The page's example


def test_the_storage_of_the_page_keeps_the_contract(example, tmp_path):
    """Authors copy it."""
    check_storage(example, f"sqlite://{tmp_path}/runs.db/first", tmp_path / "copies")


def test_a_run_goes_on_in_the_storage_of_the_page(example, run, clean):
    """All commands that take a URL reach it by the group alone."""
    url = "sqlite://runs.db/first"
    fit = ("fit", "tiny.py", "--no-plugins", "--run-dir", url)
    assert run(*fit, "--max-duration", "1ep")[0] == 0

    status, out, err = run(*fit, "--max-duration", "2ep", "--allow-config-change")
    listed = run("checkpoints", url)
    compared = run("checkpoints", "diff", url, f"{url}/checkpoints/ba00000003")
    exported = run("export", url, "weights.safetensors")

    assert (status, err) == (0, "")
    assert f"resumed: {url}/checkpoints/ba00000003" in out
    names = [line[:10] for line in listed[1].splitlines()[1:]]
    assert names[:2] == ["ba00000006", "ba00000003"]
    assert run("checkpoints", "verify", url)[0] == 0
    assert (compared[0], exported[0]) == (1, 0)
    assert load_file("weights.safetensors").keys() == {"weight", "bias"}
    evaluate = ("eval", "tiny.py", "--no-plugins", "--json", "--weights")
    assert run(*evaluate, url)[:2] == run(*evaluate, "weights.safetensors")[:2]


# Which storage


def test_without_a_storage_the_packages_are_named(add, run, clean):
    """In one line, that can be pasted."""
    (clean / "tiny.py").write_text(TASK)

    for argv in (("fit", "tiny.py", "--run-dir"), ("checkpoints",), ("checkpoints", "verify")):
        status, _, err = run(*argv, "s3://bucket/run")

        assert status == 2
        assert "s3:// needs a storage package, and none is installed\n" in err
        assert "fix  python -m pip install eventloop-remote s3fs\n" in err


def test_those_that_do_not_know_a_scheme_are_named(add):
    """It may be a mistake in the URL."""
    add("zip", NAMED.format("zip"), "eventloop-zip")

    with pytest.raises(UsageError, match=r"none that is installed knows it: zip \(eventloop-zip"):
        storage_for(Url("zp://a/run"))


def test_a_schemes_own_storage_comes_before_one_for_all(add):
    """A package for one kind of store knows it better."""
    add("*", NAMED.format("all"), "eventloop-all")
    add("zip", NAMED.format("zip"), "eventloop-zip")

    assert storage_for(Url("ZIP://a/run")).checkpoints(None, None).folder == "zip"
    assert storage_for(Url("tar://a/run")).checkpoints(None, None).folder == "all"


@pytest.mark.parametrize("name", ["zip", "*"])
def test_two_storages_for_one_scheme_are_an_error(name, add, run):
    """Which of them has the checkpoints isn't guessed; `eventloop plugins list` says so, too."""
    add(name, NAMED.format("one"), "eventloop-one")
    add(name, NAMED.format("two"), "eventloop-two")

    with pytest.raises(PluginError, match=r"eventloop-one 1\.0 and eventloop-two 1\.0"):
        storage_for(Url("zip://a/run"))
    rows = [line for line in run("plugins", "list")[1].splitlines() if "storage" in line]
    assert [row.split()[4] for row in rows] == ["problem", "problem"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nosuch", r"storage 'zip' can't be imported: ModuleNotFoundError"),
        (
            "def checkpoints(folder, copies): pass",
            r"isn't a storage: it lacks `checkpoints` or `lock`",
        ),
    ],
)
def test_a_broken_storage_is_blamed(code, message, add):
    """With the line that removes it, or what it lacks."""
    add("zip", code, "eventloop-zip")

    with pytest.raises(PluginError, match=message) as caught:
        storage_for(Url("zip://a/run"))

    assert "eventloop-zip 1.0" in str(caught.value)
    assert "-p no:" not in str(caught.value)


def test_a_storage_is_imported_for_a_url_alone(add, run, clean):
    """What it imports costs neither a local run nor a list of what is installed."""
    add("zip", 'raise_when_imported = {}["imported"]', "eventloop-zip")
    (clean / "tiny.py").write_text(TASK)

    listed = run("plugins", "list")
    fitted = run("fit", "tiny.py", "--no-plugins", "--run-dir", "here")

    assert re.search(r"zip +storage +1\.0 +eventloop-zip +available", listed[1])
    assert fitted[0] == 0
    with pytest.raises(PluginError, match="can't be imported: KeyError"):
        storage_for(Url("zip://a/run"))


# What a storage raises by mistake


RAISING = """
from eventloop_remote import RemoteFolder, RemoteStorage

class Raising(RemoteFolder):
    def names(self):
        return []
    def sizes(self, name):
        return {}
    def read(self, name, file, num_bytes):
        raise FileNotFoundError(name)
    def upload(self, name, file, source):
        {}["no-such-key"]
    def remove(self, name):
        pass

storage = RemoteStorage(lambda url: Raising())
"""


def test_a_storage_that_raises_is_named_with_its_traceback(add, run, clean):
    """Its author needs the line, and the user must know that it isn't eventloop's."""
    add("broken", RAISING, "eventloop-broken", ":storage")
    (clean / "tiny.py").write_text(TASK)

    status, _, err = run("fit", "tiny.py", "--no-plugins", "--run-dir", "broken://runs/first")

    assert status == 1
    assert err.startswith(
        "KeyError: 'no-such-key'; raised by the storage broken (eventloop-broken 1.0"
    )
    assert ", in upload\n" in err
