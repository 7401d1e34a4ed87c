"""`eventloop plugins disable`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("no_others")

CODE = "class Plugin:\n    pass\n"


@pytest.fixture(autouse=True)
def aa_test(install):
    """The plugin that is switched off."""
    install("aa-test", CODE)


def test_a_plugin_is_off_from_then_on(run, clean):
    """In every run of the project; a second time changes nothing."""
    path = clean / "pyproject.toml"

    first = run("plugins", "disable", "aa-test")
    text = path.read_text()
    second = run("plugins", "disable", "AA_test")

    assert first.out.startswith("aa-test: off, ")
    assert 'disable = ["aa-test"]' in text
    assert second.out.endswith(f"{path} as it was\n")
    assert path.read_text() == text


def test_a_plugin_that_was_required_no_longer_is(run, clean):
    """The two lists would contradict each other."""
    path = clean / "pyproject.toml"
    path.write_text('[tool.eventloop]\nrequired = ["aa-test>=1"]\n')

    assert run("plugins", "disable", "aa-test").status == 0

    assert path.read_text() == '[tool.eventloop]\nrequired = []\ndisable = ["aa-test"]\n'


def test_a_file_whose_list_is_none_stays_as_it_is(run, clean):
    """It would be lost."""
    path = clean / "pyproject.toml"
    path.write_text("[tool.eventloop]\ndisable = 3\n")

    ran = run("plugins", "disable", "aa-test")

    assert ran.status == 2
    assert "disable should be a list of names, not 3" in ran.err
    assert path.read_text() == "[tool.eventloop]\ndisable = 3\n"
