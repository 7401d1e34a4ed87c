"""`eventloop plugins enable`."""

import pytest

from eventloop.cli.pyproject_lists import has_name

pytestmark = pytest.mark.usefixtures("no_others")


def test_a_plugin_is_added_to_a_list_that_allows_none(run, install, clean):
    """`allow = []` leaves all out, so that the plugin would stay off."""
    install("aa-test", "class Plugin:\n    pass\n")
    (clean / "pyproject.toml").write_text("[tool.eventloop]\nallow = []\n")

    ran = run("plugins", "enable", "aa-test")

    assert ran.status == 0
    assert has_name((clean / "pyproject.toml").read_text(), "allow", "aa-test")


@pytest.mark.parametrize("autoload", ["false", "'callbacks'"])
def test_a_plugin_that_autoload_leaves_out_is_required(autoload, run, install, clean):
    """Neither `disable` nor `allow` would make it take part."""
    install("aa-test", "class Plugin:\n    pass\n")
    path = clean / "pyproject.toml"
    path.write_text(f"[tool.eventloop]\nautoload = {autoload}\n")

    ran = run("plugins", "enable", "aa-test")

    assert ran.status == 0
    assert "aa-test: active" in ran.out
    assert has_name(path.read_text(), "required", "aa-test")

    assert "aa-test: off" in run("plugins", "disable", "aa-test").out
    assert not has_name(path.read_text(), "required", "aa-test")
