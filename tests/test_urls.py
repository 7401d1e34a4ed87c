"""URLs of runs: what is one, what can't be used, and that passwords aren't shown."""

from __future__ import annotations

import pickle
from pathlib import PurePath

import pytest

from eventloop.urls import Url, hidden, is_url_as_path


@pytest.mark.parametrize(
    "text", ["s3://bucket/run", "memory://run", "file:///tmp/a b", "gs://b", "abfs://c@a.b.net/run"]
)
def test_a_url_is_what_was_written(text):
    """A scheme of two letters, `://`, and a path that nothing is decoded in."""
    assert (str(Url(text)), repr(Url(text)), Url(text).problem) == (text, f"Url({text!r})", "")


@pytest.mark.parametrize("text", ["runs/a", "/tmp/run", "C:\\run", "C:/run", "c://run", "auto", ""])
def test_a_path_is_none(text):
    """Nor is a drive of Windows."""
    with pytest.raises(ValueError, match="not a URL"):
        Url(text)


def test_one_place_has_one_url():
    """Slashes at the end and the case of the scheme make no difference."""
    assert Url("S3://Bucket/run//") == Url("s3://Bucket/run")
    assert hash(Url("memory://run/")) == hash(Url("memory://run"))


def test_parts_of_a_url():
    """As of a path."""
    url = Url("s3://bucket/run") / "checkpoints"

    assert (url, url.protocol) == (Url("s3://bucket/run/checkpoints"), "s3")
    assert (url.name, url.parent, url.parent.parent.parent) == (
        "checkpoints",
        Url("s3://bucket/run"),
        Url("s3://bucket"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("simplecache::s3://bucket/run", "'::'"),
        ("zip://run::file:///tmp/a.zip", "'::'"),
        ("s3://", "names no folder"),
        ("memory:///", "names no folder"),
        ("file://tmp/run", "write file:///tmp/run"),
        ("s3://bucket/run?versionId=3", r"'\?'"),
        ("s3://bucket/*/run", r"'\*'"),
        ("s3://bucket/ru\nn", r"'\\n'"),
        ("s3://bucket/../other", r"'\.\.'"),
        ("s3://bucket/./run", r"'\.'"),
        ("s3://bucket//run", "'//'"),
    ],
)
def test_what_stores_would_misunderstand_is_refused(text, problem):
    """Some take `..` for a name, some for a step up."""
    with pytest.raises(AssertionError, match=problem):
        assert Url(text).problem == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:secret@host/run", "sftp://me:***@host/run"),
        ("sftp://me:se:cr@et@host:22/run", "sftp://me:***@host:22/run"),
        ("sftp://me:sec/ret@host/run", "sftp://me:***@host/run"),
        ("s3://key:22@bucket/run", "s3://key:***@bucket/run"),
        ("sftp://me@host:22/a@b", "sftp://me@host:22/a@b"),
        ("sftp://host:22/a@b", "sftp://host:22/a@b"),
        ("memory://a:b/c", "memory://a:b/c"),
        ("https://ghp_secret@host/run", "https://***@host/run"),
        ("https://host/run&sig=secret&a=b", "https://host/run&sig=***&a=b"),
    ],
)
def test_a_password_is_not_shown(text, shown):
    """Nor in the representation; in the full text it is."""
    url = Url(text)

    assert (str(url), repr(url), url.full) == (shown, f"Url({shown!r})", text)
    assert (str(url / "a"), str((url / "a").parent)) == (f"{shown}/a", shown)
    assert (hidden(f"--run-dir={text}"), pickle.loads(pickle.dumps(url))) == (
        f"--run-dir={shown}",
        url,
    )


def test_a_password_is_taken_out_of_other_texts():
    """Messages of packages have it, decoded, maybe."""
    url = Url("sftp://me:s%40cret@host/run")

    assert url.hide("login of me with s@cret (s%40cret) failed") == (
        "login of me with *** (***) failed"
    )
    assert Url("memory://run").hide("nothing to hide") == "nothing to hide"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("s3://bucket/run", True), ("file:///tmp", True), ("runs/s3:/a", False), ("c:/run", False)],
)
def test_a_url_that_became_a_path_is_known(path, expected):
    """It has lost a slash, and would be a folder called `s3:`."""
    assert is_url_as_path(PurePath(path)) == expected
