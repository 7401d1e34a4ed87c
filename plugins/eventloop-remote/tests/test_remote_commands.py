"""The command with runs at URLs."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from eventloop_remote.folder import Folder

SECRET = "memory://me:secret@host/run"
TASK = """
import torch
from eventloop import Task
from eventloop_testing import tiny_batches

task = Task(
    model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)),
    loss=torch.nn.functional.cross_entropy,
    train_dataloader=tiny_batches(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    settings={"max_duration": "2ep", "device": "cpu"},
)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The working directory, with `tiny.py` in it."""
    (tmp_path / "tiny.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def url(run, tiny):
    """A run at a URL, with the checkpoints of two epochs and the first."""
    url = f"file://{tiny}/store/a run"
    ran = run(
        *("fit", "tiny.py", "--no-plugins", "--run-dir", url),
        *("--checkpoint-interval", "1ep", "--checkpoint-keep", "none"),
    )
    assert (ran.status, ran.err) == (0, "")
    return url


def damage(tiny, batch):
    (path,) = (tiny / "store" / "a run" / "checkpoints").glob(f"ba0000000{batch}*/model.safetens*")
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")


def test_the_header_shows_both_places(run, tiny, url):
    """Where the logs are, and where the checkpoints."""
    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", f"{url}/", "--max-duration", "2ep")

    assert f"checkpoints: {url}\n" in ran.out
    assert "run dir: runs/file/a-run-" in ran.out
    assert f"resumed: {url}/checkpoints/ba00000006" in ran.out


def test_checkpoints_at_a_url_are_listed(run, tiny, url):
    """By the URL of the run, or of what is in it; verified or not."""
    damage(tiny, 3)

    listed = run("checkpoints", url)
    quick = run("checkpoints", f"{url}/checkpoints/", "--quick", "--json")

    assert (listed.status, listed.err) == (0, "")
    assert [line.split()[0][:10] for line in listed.out.splitlines()[1:] if "ba0" in line] == [
        "ba00000006",
        "ba00000003",
        "ba00000000",
    ]
    assert "its bytes" in listed.out
    rows = json.loads(quick.out)
    assert [(row["batch"], row["verified"]) for row in rows] == [(6, None), (3, None), (0, None)]
    assert rows[1]["checkpoint"].startswith(f"{url}/checkpoints/ba00000003")


def test_checkpoints_at_a_url_are_verified(run, tiny, url):
    """Exit status 4 if anything is wrong; one may be named."""
    assert run("checkpoints", "verify", url).status == 0
    damage(tiny, 3)

    ran = run("checkpoints", "verify", url)
    one = run("checkpoints", "verify", f"{url}/checkpoints/ba00000000")

    assert ran.status == 4
    assert "doesn't verify\n  model.safetensors: " in ran.out
    assert "2 of 3 checkpoints verified" in ran.out
    assert (one.status, one.out) == (0, f"{url}/checkpoints/ba00000000: verified\n")


def test_a_checkpoint_at_a_url_is_exported(run, tiny, url):
    """The newest that verifies; no copy of it stays."""
    damage(tiny, 6)
    before = {path.name for path in tiny.iterdir()}

    ran = run("export", url, "weights.safetensors")

    assert ran.status == 0
    assert "isn't used: model.safetensors" in ran.err
    assert f"of {url}/checkpoints/ba00000003" in ran.out
    assert load_file("weights.safetensors").keys() == {
        *("0.weight", "0.bias", "1.weight", "1.bias"),
    }
    assert {path.name for path in tiny.iterdir()} == {*before, "weights.safetensors"}


def test_checkpoints_at_urls_are_compared(run, tiny, url):
    """With each other, and with those in folders."""
    (copy,) = (tiny / "runs" / "file").glob("*/checkpoints/ba*")

    same = run("checkpoints", "diff", url, str(copy))
    other = run("checkpoints", "diff", url, f"{url}/checkpoints/ba00000000")

    assert (same.status, same.out.splitlines()[-1]) == (0, "no difference")
    assert other.status == 1
    assert f"B  {url}/checkpoints/ba00000000" in other.out


@pytest.mark.parametrize(
    "argv", [["checkpoints"], ["checkpoints", "verify"], ["export"], ["checkpoints", "diff"]]
)
def test_where_none_is_it_is_told(argv, run, tiny):
    """Not with an empty table: it may be a mistake in the URL."""
    more = {"export": ["out.safetensors"], "diff": [SECRET]}.get(argv[-1], [])

    ran = run(*argv, SECRET, *more)

    assert ran.status == 2
    assert "there are no checkpoints at memory://me:***@host/run" in ran.err
    assert "secret" not in ran.out + ran.err


@pytest.fixture
def removing(tiny, monkeypatch):
    """Removes checkpoints, as a run under way does, when one's manifest or weights are read."""

    def removing(*batches, method="read", num_calls=1):
        plain, calls = getattr(Folder, method), []

        def watched(folder, name, *arguments):
            calls.append(name.startswith(f"ba0000000{batches[0]}"))
            if calls[-1] and sum(calls) == num_calls:
                for one in batches:
                    folder.remove(f"ba0000000{one}")
            return plain(folder, name, *arguments)

        monkeypatch.setattr(Folder, method, watched)

    return removing


@pytest.mark.parametrize("command", ["verify", "list"])
@pytest.mark.parametrize(("method", "gone"), [("read", 6), ("download", 6), ("read", 3)])
def test_what_a_run_removes_meanwhile_is_not_damaged_at_a_url(
    command, method, gone, run, url, removing
):
    """A cron job that verifies runs under way would report a loss several times a day."""
    removing(gone, method=method)

    ran = run("checkpoints", command, url, "--json")

    rows = [(row["checkpoint"][-1], row["verified"]) for row in json.loads(ran.out)]
    assert ran.status == 0
    assert rows == [(str(one), True) for one in (6, 3, 0) if one != gone]


def test_where_all_that_were_listed_are_removed_it_looks_again(run, tiny, url, monkeypatch):
    """A run under way has others by then."""
    names, listings = Folder.names, []

    def first(folder):
        listings.append(names(folder))
        if len(listings) > 1:
            return listings[-1]
        for one in ("ba00000000", "ba00000003"):
            folder.remove(one)
        return ["ba00000000", "ba00000003"]

    monkeypatch.setattr(Folder, "names", first)

    ran = run("checkpoints", "verify", url)

    assert (ran.status, ran.out) == (0, f"{url}/checkpoints/ba00000006: verified\n")


@pytest.mark.parametrize(("method", "num_calls"), [("read", 1), ("read", 3), ("download", 1)])
def test_what_is_removed_while_it_is_compared_is_looked_for_again(
    method, num_calls, run, tiny, url, removing
):
    """Before its manifest was read, after it was verified, or while it is downloaded."""
    removing(6, method=method, num_calls=num_calls)

    ran = run("checkpoints", "diff", url, f"{url}/checkpoints/ba00000000", "--json")

    assert (ran.status, ran.err) == (1, "")
    assert json.loads(ran.out)["a"] == f"{url}/checkpoints/ba00000003"


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_a_checkpoint_at_a_url_that_is_named_and_removed_is_not_there(command, run, url, removing):
    """It can't be looked for again, but isn't damaged."""
    removing(6)
    named = f"{url}/checkpoints/ba00000006"

    ran = run("checkpoints", command, named, *([url] if command == "diff" else []))

    assert (ran.status, f"no checkpoints at {named}" in ran.err) == (2, True)


def test_a_password_is_not_printed(run, tiny, monkeypatch):
    """By any of the ways in which it may be given."""
    monkeypatch.setenv("EVENTLOOP_RESUME", "memory://me:secret@host/run/checkpoints/ba00000003")

    ran = run("fit", "tiny.py", "--no-plugins", "--run-dir", SECRET, "--print-config")

    assert "run_dir: memory://me:***@host/run  # flag" in ran.out
    assert "resume: memory://me:***@host/run/checkpoints/ba00000003  # EVENTLOOP_RESUME" in ran.out
    assert "secret" not in ran.out + ran.err
