"""Plugins that were built for another version of the core."""

from __future__ import annotations

import pytest

from eventloop import __version__
from eventloop.config.plugin_flags import Choice
from eventloop.config.plugin_rules import Requirement, Rules
from eventloop.errors import PluginError, raise_all
from eventloop.plugin.choose import choose, problems_of
from eventloop.plugin.discover import discover

NEXT = "torch-eventloop>=99.1"


@pytest.fixture
def found(install, tmp_path):
    """Finds a plugin whose distribution has a line of requirements."""

    def found(line: str):
        install("aa-test")
        path = tmp_path / "site" / "eventloop_aa_test-1.0.dist-info" / "METADATA"
        path.write_text(path.read_text() + f"Requires-Dist: numpy>=99\n{line}\n\ntext\n")
        (one,) = [one for one in discover()[0] if one.name == "aa-test"]
        return one

    return found


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("Requires-Dist: torch-eventloop>=99.1", ">=99.1"),
        ("Requires-Dist: Torch_EventLoop (>=99.1,<100)", ">=99.1,<100"),
        ("requires-dist: torch-eventloop<0.0.1", "<0.0.1"),
        ("Requires-Dist: torch-eventloop[examples]>=99", ">=99"),
    ],
)
def test_a_plugin_for_another_version_is_off_with_the_reason(found, line, needs):
    """It would fail where it meets what isn't there, or do what was meant otherwise."""
    plugin = found(line)

    (one,) = choose([plugin], Choice())

    assert plugin.needs == needs
    assert (one.status, one.kind) == ("off", "version")
    assert one.reason == f"needs torch-eventloop{needs}, and {__version__} is installed"
    assert problems_of([one], Choice()) == []


@pytest.mark.parametrize(
    "line",
    [
        "Requires-Dist: torch-eventloop",
        f"Requires-Dist: torch-eventloop=={__version__}",
        f"Requires-Dist: torch-eventloop (=={__version__})",
        'Requires-Dist: torch-eventloop>=99; extra == "new"',
        "Requires-Dist: torch-eventloop-tools>=99",
        "Summary: none",
    ],
)
def test_a_plugin_for_this_version_takes_part(found, line):
    """Extras and other distributions say nothing of it."""
    (one,) = choose([found(line)], Choice())

    assert one.status == "active"


@pytest.mark.parametrize(
    ("choice", "rules", "message"),
    [
        (Choice.parse(["aa-test"]), Rules(), r"aa-test was asked for, but needs"),
        (
            Choice(),
            Rules(required=(Requirement("aa-test", "", "pyproject.toml"),)),
            r"aa-test is required, but off: needs",
        ),
    ],
)
def test_one_that_is_asked_for_is_an_error_with_the_line_to_paste(found, choice, rules, message):
    """Who insists on it must know that it can't be had."""
    selected = choose([found(f"Requires-Dist: {NEXT}")], choice, rules)

    with pytest.raises(PluginError, match=message) as caught:
        raise_all(problems_of(selected, choice, rules))

    assert f"pip install '{NEXT}'" in str(caught.value)
    assert "pip install -U eventloop-aa-test" in str(caught.value)
