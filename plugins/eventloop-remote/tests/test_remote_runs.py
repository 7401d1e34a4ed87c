"""Runs at a URL: they go on as runs in a folder do, from another machine, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.registry import known_implementations

from eventloop import CheckpointError, ResumeError, SettingError, UsageError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.files.run_folder import local_folder
from eventloop.storage import Url
from eventloop_remote import lease
from eventloop_testing import differences
from eventloop_testing.case import isolated_trainer, tiny_batches, tiny_task
from eventloop_testing.ranks import run_ranks


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A URL at which nothing is."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return "memory://a run" if request.param == "memory" else f"file://{tmp_path}/store/a run"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Changes to another machine, which has nothing of the run."""

    def machine(name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)

    machine("first")
    return machine


class Stops:
    """A callback that fails after a batch."""

    name = "stops"
    free_options = ("batch",)

    def __init__(self, batch):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise RuntimeError("the machine fails")


def trainer(where, *callbacks, **given):
    task = tiny_task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.3))
    )
    values = {"max_duration": "3ep", "checkpoint_interval": "2ba", "checkpoint_keep": None}
    return isolated_trainer(
        Path.cwd(), task, callbacks=callbacks, **(values | given), run_dir=where
    )


def parts_at(one):
    """Returns what the newest checkpoint of a trainer's run holds."""
    folder = one.state.run_dir / "checkpoints"
    return read_checkpoint(max(folder.glob("ba*"))).parts


def test_a_run_goes_on_bit_by_bit_on_another_machine(url, machine, tmp_path):
    """Whatever is needed is at the URL."""
    with trainer(tmp_path / "uninterrupted") as one:
        one.fit()
    expected = parts_at(one)
    with pytest.raises(RuntimeError, match="the machine fails"):
        with trainer(url, Stops(5)) as one:
            one.fit()

    machine("second")
    with trainer(url) as one:
        assert f"resumed: {url}/checkpoints/ba00000004, epoch 2, batch 4" in one.notes
        one.fit()

    assert list(differences(expected, parts_at(one))) == []
    machine("first")
    with trainer(url) as one, pytest.warns(UserWarning, match="nothing to train: 3ep is done"):
        one.fit()


def test_another_place_would_end_otherwise(url, machine, tmp_path):
    """Control: the comparison isn't blind."""
    with trainer(tmp_path / "uninterrupted") as one:
        one.fit()
    expected = parts_at(one)

    with trainer(url, seed=1) as one:
        one.fit()

    assert list(differences(expected, parts_at(one)))


def test_plugins_have_a_local_folder(url, machine):
    """Always the same, so that logs go on; without a password in it."""
    with trainer(url) as one:
        run_dir = one.state.run_dir

    assert run_dir == local_folder(Url(f"{url}/"))
    assert run_dir.parts[:2] == ("runs", url.partition(":")[0])
    assert run_dir.name.startswith("a-run-")
    assert local_folder(Url("sftp://me:a@h/run")) == local_folder(Url("sftp://me:b@h/run"))
    assert local_folder(Url("s3://a/run")) != local_folder(Url("s3://b/run"))


def test_what_is_written_of_a_run_has_no_password(machine, monkeypatch):
    """Manifests are looked at by many."""
    secret = "memory://me:secret@host/run"
    monkeypatch.setattr(sys, "argv", ["eventloop", "fit", f"--run-dir={secret}"])

    with trainer(secret, resume="auto") as one:
        one.fit()

    texts = [repr(one.state.settings), str(one.state.manifest), *one.notes]
    texts += [path.read_text() for path in one.state.run_dir.rglob("*.json")]
    assert any("me:***@host" in text for text in texts)
    assert not any("secret" in text for text in texts)


def test_a_second_process_is_refused(url, machine):
    """Also one that has another working directory."""
    with trainer(url) as one, trainer(url) as other:
        one.fit(until="1ep")

        with pytest.raises(ResumeError, match="another Trainer of this process trains in"):
            other.fit()
        machine("second")
        with trainer(url) as third, pytest.raises(ResumeError, match="another process trains at"):
            third.fit()


def test_a_run_that_lost_its_lease_stops(url, machine):
    """Two that write would end as neither."""

    class TakesOver:
        name = "takes-over"

        @hookimpl
        def batch_start(self, state):
            if state.clock.batch == 3:
                fsspec.url_to_fs(url)[0].pipe_file(f"{url}/{lease.FILE}", b'{"id": "other"}')

    with trainer(url, TakesOver()) as one:
        with pytest.raises(ResumeError, match=r"another process trains at .* now"):
            one.fit()

    assert one.state.clock.batch < 9


def test_a_run_may_begin_with_a_checkpoint_at_a_url(url, machine, tmp_path):
    """In a folder, or at another URL; and a run at a URL with one from a folder."""
    with trainer(url) as one:
        one.fit(until="2ep")
    expected = one.state.model[0].weight.clone()
    chosen = f"{url}/checkpoints/ba00000006.1-"
    (name,) = [one for one in ls(f"{url}/checkpoints") if one.startswith(chosen[-13:])]

    for target, wanted in (
        (tmp_path / "other", f"{url}/checkpoints/{name}"),
        (f"{url}-other", f"{url}/checkpoints/{name}"),
        (f"{url}-third", str(tmp_path / "other" / "downloads" / "ba00000006")),
    ):
        with trainer(target, resume=wanted) as one:
            assert one.state.clock.batch == 6
            assert torch.equal(one.state.model[0].weight, expected)
    with pytest.raises(CheckpointError, match=r"ba00000099' can't be used: manifest\.json: "):
        trainer(tmp_path / "fourth", resume=f"{url}/checkpoints/ba00000099")


def ls(url):
    files, path = fsspec.url_to_fs(url)
    return [one.rpartition("/")[2] for one in files.ls(path, detail=False)]


def test_resume_never_refuses_a_run_at_a_url(url, machine):
    """As one in a folder."""
    with trainer(url) as one:
        one.fit()

    with pytest.raises(ResumeError, match=f"{url} holds a run already"):
        trainer(url, resume="never")


def test_where_none_verifies_the_run_does_not_begin_again(url, machine):
    """With the reasons."""
    with trainer(url) as one:
        one.fit(until="1ba")
    files, path = fsspec.url_to_fs(url)
    for one in files.find(f"{path}/checkpoints"):
        if one.endswith("model.safetensors"):
            files.pipe_file(one, files.cat_file(one)[:-1] + b"\xaa")
    machine("second")

    with pytest.raises(CheckpointError, match=r"used\n  reasons\s+ba0") as caught:
        trainer(url)
    assert f"none of the 2 checkpoints at {url}/checkpoints can be used" in str(caught.value)


def test_two_ranks_go_on_from_a_url(machine, tmp_path):
    """One of each machine downloads."""
    url = f"file://{tmp_path}/store/run"

    def fit(until):
        with trainer(url, uneven="pad") as one:
            one.fit(until=until)
            return one.state.clock.batch, one.state.model[0].weight.detach().clone()

    first = run_ranks(fit, "1ep")
    machine("second")
    second = run_ranks(fit, "3ep")

    assert first[0][0] * 3 == second[0][0]
    assert torch.equal(second[0][1], second[1][1])


# What is missing, and what can't be


def test_without_the_package_of_a_protocol_it_is_named(machine, monkeypatch):
    """Which fsspec knows."""
    known = {"class": "no_such_package.files.Files", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "nosuch", known)

    with pytest.raises(UsageError, match="needs a package that isn't installed: Inst") as caught:
        trainer("nosuch://me:secret@bucket/run")
    assert "fix  pip install no_such_package" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_unknown_protocol_is_told(machine):
    """With the closest."""
    with pytest.raises(UsageError, match="no store by memry://; the closest is 'memory'"):
        trainer("memry://run")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("memory://a/../b", r"run_dir: memory://a/../b has '\.\.'"),
        ("s3://key:secret@b/*", r"run_dir: s3://key:\*\*\*@b/\* has '\*'"),
        (Path("s3://bucket/run"), "run_dir: 's3:/bucket/run' was a URL"),
    ],
)
def test_an_odd_url_is_refused(value, message, machine):
    """Before it is understood in two ways."""
    with pytest.raises(SettingError, match=message):
        trainer(value)


def test_a_password_is_not_in_an_error(machine, monkeypatch):
    """Also where the package's own message has it."""
    kind = type(fsspec.filesystem("memory"))

    def fail(self, path, **given):
        raise RuntimeError(f"can't open {path}")

    monkeypatch.setattr(kind, "ls", fail)

    with pytest.raises(CheckpointError, match=r"can't open /me:\*\*\*@host") as caught:
        trainer("memory://me:secret@host/run")
    assert caught.value.__cause__ is None
    assert "secret" not in str(caught.value)


LOCAL = """
import sys
from pathlib import Path
from eventloop_testing.case import isolated_trainer, tiny_task
for time in range(2):
    task = tiny_task(metrics=None)  # with them each process would import torchmetrics
    with isolated_trainer(Path.cwd(), task, checkpoint_interval="1ba") as trainer:
        trainer.fit(until=f"{time + 1}ba")
print([one for one in sys.modules if one.startswith("fsspec")])
"""


@pytest.mark.nightly
def test_a_local_run_imports_no_fsspec(machine):
    """Nor whatever that imports."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOCAL]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def with_a_test_set(where, **given):
    """A trainer whose loss falls, so that the highest is that of the first evaluation."""
    batches = tiny_batches(3, 4)
    task = tiny_task(eval_dataloaders={"valid": batches}, test_dataloaders=batches, metrics=None)
    values = {"max_duration": "3ep", "checkpoint_best": "max valid/loss", "run_dir": where}
    values |= {"checkpoint_interval": "1ep"}
    return isolated_trainer(Path.cwd(), task, **values | given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_kept", [None, 1])
def test_a_test_set_has_the_best_weights_of_a_run_at_a_url(url, machine, num_kept):
    """They are downloaded; the last weights, which are at hand, would give another number."""
    with with_a_test_set(url, checkpoint_keep=num_kept) as one:
        result = one.fit()
        last = {name: value.clone() for name, value in one.state.model.state_dict().items()}
    machine("second")
    with with_a_test_set(url, checkpoint_keep=num_kept) as again:
        resumed = dict(again.state.model.state_dict())

    first = result.history[0]["valid/loss"]
    assert result.metrics["test"]["loss"].item() == first
    assert result.metrics["valid"]["loss"].item() < first
    assert all(torch.equal(resumed[name], value) for name, value in last.items())


def test_two_ranks_have_the_best_weights_of_a_run_at_a_url(machine, tmp_path):
    """One of them downloads the checkpoint."""
    url = f"file://{tmp_path}/store/run"

    def train():
        with with_a_test_set(url) as one:
            result = one.fit()
        return result.metrics["test"]["loss"].item(), result.history[0]["valid/loss"]

    for found, first in run_ranks(train):
        assert found == pytest.approx(first, rel=1e-6)
