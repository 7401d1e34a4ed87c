"""The text of a lock, and what differs from it."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib

import pytest
from importlib_metadata import EntryPoint, PathDistribution

from eventloop.errors import PluginError
from eventloop.plugin.lock_file import check_lock, lock_text
from eventloop.plugin.records import Found, Plugin
from eventloop.plugin.registry import Registry, arrange


@pytest.fixture
def three() -> list[Plugin]:
    """Three plugins without a hook."""
    return [Plugin(name, "algorithm", object(), "a test") for name in ("a", "b", "c")]


def registry_of(plugins) -> Registry:
    return arrange(plugins)


def found(plugin: Plugin, options: dict[str, object] | None = None) -> Plugin:
    point = EntryPoint(plugin.name, "module:Plugin", "eventloop.algorithms")
    record = Found(plugin.name, "algorithm", point, f"eventloop-{plugin.name}", "1.0")
    return dataclasses.replace(
        plugin,
        found=record,
        distribution=record.distribution,
        version="1.0",
        options=options or {},
    )


def test_every_kind_of_option_is_written_as_toml(three):
    """What TOML doesn't know is written as text."""
    options = {
        "flag": True,
        "number": 1,
        "share": 0.5,
        "text": 'a"b\n',
        "many": ("x", 2),
        "no": None,
        "größe": 3,
    }
    plugin = found(three[0], options)

    read = tomllib.loads(lock_text(registry_of([plugin])))["plugins"][0]["options"]

    assert read == options | {"many": ["x", 2], "no": "None"}


def test_what_is_handed_over_in_python_is_not_locked(three):
    """It stands in the code, which has its own history."""
    assert "plugins" not in tomllib.loads(lock_text(registry_of(three)))


def test_no_lock_means_no_difference(three, tmp_path):
    """A project needn't have one."""
    check_lock(tmp_path / "eventloop.lock", registry_of(three))


def test_a_difference_is_shown_as_a_diff(three, tmp_path):
    """Comments and blank lines are none."""
    path = tmp_path / "eventloop.lock"
    one, other = found(three[0]), found(three[1])
    path.write_text("# mine\n\n" + lock_text(registry_of([one])))

    check_lock(path, registry_of([one]))
    with pytest.raises(PluginError) as caught:
        check_lock(path, registry_of([one, other]))

    for part in ("--- locked", "+++ installed", '+name = "b"', "eventloop plugins lock"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"[[plugins", b"\xff\xfe"])
def test_a_lock_that_is_none_is_said_to_be_unreadable(three, tmp_path, content):
    """A diff of garbage would hide that somebody must write it anew."""
    path = tmp_path / "eventloop.lock"
    path.write_bytes(content)

    with pytest.raises(PluginError, match=r"eventloop\.lock can't be read") as caught:
        check_lock(path, registry_of(three))

    assert "eventloop plugins lock" in str(caught.value)


def test_an_editable_installation_is_marked_and_its_sources_are_read(three, tmp_path, monkeypatch):
    """Its RECORD lists a link alone; in a namespace, only the plugin's own package is its."""
    package = tmp_path / "sources" / "shared_namespace" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1")
    (package / "part.py").write_text("2")
    other = tmp_path / "sources" / "shared_namespace" / "others"
    other.mkdir()
    (other / "__init__.py").write_text("3")
    info = tmp_path / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "RECORD").write_text("mine.pth,,\n")
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable":true}}')
    monkeypatch.syspath_prepend(str(tmp_path / "sources"))
    point = EntryPoint("a", "shared_namespace.mine.part:Plugin", "eventloop.algorithms")
    point = point._for(PathDistribution(info))
    plugin = dataclasses.replace(
        found(three[0]), found=Found("a", "algorithm", point, "mine", "1.0")
    )

    read = tomllib.loads(lock_text(registry_of([plugin])))["plugins"][0]

    assert read["editable"] is True
    assert sorted(read["files"]) == [
        "shared_namespace.mine/__init__.py",
        "shared_namespace.mine/part.py",
    ]


def test_a_plugin_from_a_file_has_its_digest(three, tmp_path):
    """The path isn't in the lock: a project may lie anywhere."""
    (tmp_path / "watch.py").write_bytes(b"code")
    point = EntryPoint("a", "watch.py:Watch", "eventloop.callbacks")
    record = Found("a", "callback", point, "", "", path=tmp_path / "watch.py")

    read = tomllib.loads(
        lock_text(registry_of([dataclasses.replace(found(three[0]), found=record)]))
    )

    assert read["plugins"][0]["files"] == {
        "watch.py": f"sha256:{hashlib.sha256(b'code').hexdigest()}"
    }
