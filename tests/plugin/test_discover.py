"""Discovery from metadata alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import site
import sys

import importlib_metadata
import pytest

from eventloop.config.plugin_flags import Choice
from eventloop.plugin.choose import choose
from eventloop.plugin.discover import discover, extensions


@pytest.fixture
def entry_points(install, tmp_path):
    """The entry points of five distributions, none of which can be imported."""
    for name in ("mixup", "ema", "Label-Smoothing", "cutmix"):
        install(name, "raise RuntimeError('imported')")
    install("progress", "raise RuntimeError('imported')", group="eventloop.callbacks")
    found = importlib_metadata.distributions(path=[str(tmp_path / "site")])
    return [point for distribution in found for point in distribution.entry_points]


def test_installed_plugins_are_found_with_role_and_distribution(install):
    """What is installed is active, so it must be found by its metadata."""
    install("watch-test", group="eventloop.callbacks", distribution="some-watch", version="2.1")

    (found,) = [one for one in discover()[0] if one.name == "watch-test"]

    assert (found.role, found.distribution, found.version) == ("callback", "some-watch", "2.1")
    assert found.origin == "watch-test (some-watch 2.1)"


def test_discovery_imports_nothing(entry_points):
    """Listing a broken plugin must work, and a stranger's code shouldn't run for it."""
    discover(installed=(entry_points, []))

    assert not [name for name in sys.modules if re.fullmatch(r"eventloop_\w+_module", name)]


def test_order_never_depends_on_discovery(entry_points):
    """The file system lists distributions as it likes; two machines must train alike."""
    shuffled = random.Random(0)
    orders = set()
    for _ in range(50):
        shuffled.shuffle(entry_points)
        orders.add(
            tuple(
                one.found.name
                for one in choose(discover(installed=(entry_points, []))[0], Choice())
            )
        )

    assert orders == {("cutmix", "ema", "Label-Smoothing", "mixup", "progress")}


def test_other_groups_are_left_alone(install):
    """Every package has entry points."""
    install("not-ours", group="console_scripts")

    assert "not-ours" not in [one.name for one in discover()[0]]


def test_metadata_is_read_with_any_line_endings_and_only_its_header(install, tmp_path):
    """A description may hold anything, a line that looks like a field too."""
    install("aa-test")
    text = "name: Some-Watch \r\nVERSION:\t2.1\r\nName: again\r\n\r\nName: wrong\r\nVersion: 9\r\n"
    info = tmp_path / "site" / "eventloop_aa_test-1.0.dist-info"
    (info / "METADATA").write_bytes(text.encode())

    (found,) = [one for one in discover()[0] if one.name == "aa-test"]

    assert (found.distribution, found.version) == ("Some-Watch", "2.1")


def test_an_egg_info_has_a_name_too(install, tmp_path):
    """Old tools left a file or a folder of that name."""
    install("aa-test")
    info = tmp_path / "site" / "eventloop_aa_test-1.0.dist-info"
    (info / "METADATA").rename(info / "PKG-INFO")
    info.rename(info.with_name("eventloop_aa_test-1.0.egg-info"))

    (found,) = [one for one in discover()[0] if one.name == "aa-test"]

    assert found.origin == "aa-test (eventloop-aa-test 1.0)"


def mark(name: str) -> tuple[str, ...]:
    (found,) = [one for one in discover()[0] if one.name == name]
    return found.marks


def test_what_nobody_asked_for_is_marked(install, tmp_path):
    """It changes the training, although it came in with something else."""
    install("aa-test", requested=False)
    install("bb-test")
    install("cc-test", requested=False)
    (tmp_path / "site" / "eventloop_cc_test-1.0.dist-info" / "INSTALLER").write_text("conda\n")

    assert [mark(name) for name in ("aa-test", "bb-test", "cc-test")] == [("dependency",), (), ()]


def test_what_comes_from_an_unusual_place_is_marked(install, tmp_path, monkeypatch):
    """The user site and PYTHONPATH outlive the environment that one thinks one is in."""
    install("aa-test")
    folder = tmp_path / "site"

    monkeypatch.setenv("PYTHONPATH", f"/nosuch{os.pathsep}{folder}")
    by_path = mark("aa-test")
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(folder))

    assert by_path == ("PYTHONPATH",)
    assert mark("aa-test") == ("user site",)


@pytest.mark.parametrize("field", ["Name: eventloop-odd{}", "Summary: a{}b", "Requires-Dist: {}"])
@pytest.mark.parametrize("before", ["", "torch-eventloop", "torch-eventloop ("])
def test_metadata_of_any_length_is_read_at_once(install, tmp_path, field, before):
    """A search that goes back and forth in so many spaces would take hours."""
    install("odd")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / "METADATA").write_text(
        "Name: eventloop-odd\nVersion: 1.0\n" + field.format(before + " " * 1_000_000 + "x") + "\n"
    )

    (found,) = [one for one in discover()[0] if one.name == "odd"]

    assert (found.distribution, found.version) == ("eventloop-odd", "1.0")


@pytest.mark.parametrize(
    ("written", "needs"),
    [
        ("torch-eventloop>=0.1,<0.2", ">=0.1,<0.2"),
        ("torch_eventloop[all] (>=0.1)  ", ">=0.1"),
        ("Torch.Eventloop", ""),
        ("torch-eventloop>=9; extra == 'dev'", ""),
        ("torch-eventloop-other>=9", ""),
    ],
)
def test_the_core_that_a_package_needs_is_read(install, tmp_path, written, needs):
    """In all the ways in which tools write it; what an extra needs isn't what the plugin needs."""
    install("odd")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    with (info / "METADATA").open("a") as file:
        file.write(
            f"Requires-Dist: torch>=2\nRequires-Dist: {written}\n\nRequires-Dist: torch-eventloop>=8\n"
        )

    (found,) = [one for one in discover()[0] if one.name == "odd"]

    assert found.needs == needs


@pytest.mark.parametrize("name", ["METADATA", "entry_points.txt", "REQUESTED", "INSTALLER"])
def test_no_pipe_is_waited_for(install, tmp_path, name):
    """Opening a FIFO waits for who writes into it: forever, as a rule."""
    install("odd", requested=False)
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / name).unlink(missing_ok=True)
    os.mkfifo(info / name)

    found, problems = discover()

    is_broken = name == "entry_points.txt"
    assert ["odd" in one.name for one in found].count(True) == (not is_broken)
    assert ["pipe" in str(one) for one in problems] == [True] * is_broken


@pytest.mark.parametrize(
    "leftover", ["~ventloop_aa_test-1.0.dist-info", "~-entloop_aa_test-1.0.dist-info"]
)
def test_what_pip_left_of_an_uninstalled_package_is_no_second_plugin(install, tmp_path, leftover):
    """Pip renames the folder before it deletes it, which fails where a file is in use."""
    install("aa-test")
    site = tmp_path / "site"
    shutil.copytree(site / "eventloop_aa_test-1.0.dist-info", site / leftover)

    found, problems = discover()

    assert [one.name for one in found if one.name == "aa-test"] == ["aa-test"]
    assert problems == []


def test_what_pip_left_alone_is_no_plugin(install, tmp_path):
    """The package is gone, so that importing it would fail."""
    install("aa-test")
    (tmp_path / "site/eventloop_aa_test-1.0.dist-info").rename(
        tmp_path / "site/~ventloop_aa_test-1.0.dist-info"
    )

    assert not [one for one in discover()[0] if one.name == "aa-test"]


def test_what_pip_left_adds_no_second_command(install, tmp_path):
    """Commands, options and storages are read from the same metadata."""
    install("hi-test", group="eventloop.commands")
    site = tmp_path / "site"
    shutil.copytree(
        site / "eventloop_hi_test-1.0.dist-info", site / "~ventloop_hi_test-1.0.dist-info"
    )

    assert len([one for one in extensions() if one.name == "hi-test"]) == 1
