"""Fixtures for all tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

import eventloop
from eventloop import Task, Trainer, TrainerBuilder, hookimpl
from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.distributed import rank_variables
from eventloop.distributed.rank_store import wait_until
from eventloop.events import EVENTS
from eventloop_testing import case

ROOT = Path(__file__).parents[1]
Batches = list[tuple[Tensor, Tensor]]
# Ranks that hang for so long are killed, a minute after they have written where they are.
_HANGS_S = 300


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums are added up in one order, and tests that run side by side share the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def make_batches() -> Callable[..., Batches]:
    """Makes batches of a problem with three classes; the same ones each time."""

    def make_batches(num_batches: int = 3, batch_size: int = 4) -> Batches:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(num_batches, batch_size, 3, generator=generator)
        return [(batch, batch.argmax(1)) for batch in inputs]

    return make_batches


@pytest.fixture
def make_task(make_batches: Callable[..., Batches]) -> Callable[..., Task]:
    """Makes a task that trains in a blink: 3 batches of 4 samples an epoch, SGD."""

    def make_task(**given: Any) -> Task:
        values = {
            "model": lambda: nn.Linear(3, 3),
            "loss": cross_entropy,
            "train_dataloader": make_batches(),
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        }
        return Task(**values | given)

    return make_task


@pytest.fixture
def make_trainer(clean: Path, make_task: Callable[..., Task]) -> Iterable[Callable[..., Trainer]]:
    """Builds trainers on `--device`, without what is installed, for one epoch; closes them."""
    built = []

    def make_trainer(task: object = None, **given: Any) -> Trainer:
        values = {"device": case.default_device, "autoload": False, "max_duration": "1ep"}
        if case.default_device != "cpu":
            values["precision"] = "fp32"  # by default a GPU computes in bf16
        values |= given
        builder = TrainerBuilder(observers=values.pop("observers", ()))
        built.append(builder.build(make_task() if task is None else task, **values))
        return built[-1]

    yield make_trainer
    for trainer in reversed(built):  # each restores what it found
        trainer.close()


@pytest.fixture
def make_plugin() -> Callable[..., Any]:
    """Makes a plugin of one function a hook: `make_plugin(batch_end=lambda state: ...)`."""

    def make_plugin(name: str = "made", **hooks: Callable[..., Any]) -> Any:
        hooks = hooks or {"close": lambda: None}
        methods = {hook: staticmethod(hookimpl(function)) for hook, function in hooks.items()}
        return type("Made", (), {"name": name, **methods})()

    return make_plugin


@pytest.fixture
def make_recorder() -> Callable[..., Any]:
    """Makes a plugin whose `seen` lists the hooks by name as they are called: every event."""

    def make_recorder(hooks: Iterable[str] = tuple(EVENTS), name: str = "recorder") -> Any:
        methods = {hook: hookimpl(_recording(hook)) for hook in hooks}
        return type("Recorder", (), {"name": name, "seen": [], **methods})()

    return make_recorder


def _recording(hook: str) -> Callable[..., None]:
    def record(self: Any, state: object) -> None:
        self.seen.append(hook)

    return record


@pytest.fixture
def run_python(clean: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a process of its own, with the package that these tests run with."""

    def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"PYTHONPATH": str(Path(eventloop.__file__).parents[1])}
        command = [sys.executable, *flags, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)

    return run_python


@pytest.fixture(scope="session")
def run_mypy() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs mypy with the project's settings; what it once read of torch it doesn't read again."""

    def run_mypy(*paths: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        settings = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
        return subprocess.run(
            [sys.executable, "-m", "mypy", *settings, *paths],
            cwd=cwd,
            env=os.environ | {"MYPYPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )

    return run_mypy


class Ended(NamedTuple):
    """How ranks ended, and when."""

    statuses: list[int]
    err: str
    at: float


@pytest.fixture
def end_ranks(tmp_path: Path) -> Callable[..., Ended]:
    """Calls a function on ranks that may fail: forks, whose exit status is what it gives.

    The store is lost when `store_until` comes true.
    """

    def end_ranks(
        function: Callable[..., int],
        *args: Any,
        world_size: int = 2,
        store_until: Callable[[], bool] | None = None,
    ) -> Ended:
        import torch._dynamo  # noqa: F401  DDP wants it, and each rank would take seconds for it

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        errors, port = tmp_path / f"stderr-{store.port}", store.port
        pids = []
        gc.freeze()  # what libraries do after a fork may collect, and abort: see `run_ranks`
        for rank in range(world_size):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ |= rank_variables(rank, world_size, port)
                sys.stderr = os.fdopen(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w")
                os.dup2(sys.stderr.fileno(), 2)
                faulthandler.dump_traceback_later(_HANGS_S - 60, file=sys.stderr)
                _call_and_exit(function, args)
        gc.unfreeze()
        if store_until is not None:
            assert wait_until(store_until, 60)
            del store
        late = threading.Timer(_HANGS_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
        late.start()  # ranks that hang fail their test alone
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        late.cancel()
        return Ended(statuses, errors.read_text(), time.time())

    return end_ranks


def _call_and_exit(function: Callable[..., int], args: tuple[Any, ...]) -> None:
    """Ends a fork; what pytest would do in it is its parent's to do."""
    status = 70
    try:
        status = function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def read_configuration(tmp_path):
    """Reads a configuration of a project's rules, a `--config` file's and a site's."""

    def read(
        project: str = "", *flags: str, config: str = "", site: str = "", **given
    ) -> Configuration:
        (tmp_path / "pyproject.toml").write_text(f"[tool.eventloop]\n{project}")
        environ = {}
        if config:
            (tmp_path / "run.yaml").write_text(config)
            given["config_file"] = tmp_path / "run.yaml"
        if site:
            (tmp_path / "site.toml").write_text(site)
            environ = {"EVENTLOOP_SITE_CONFIG": str(tmp_path / "site.toml")}
        choice = Choice.parse(flags)
        return Configuration.read(directory=tmp_path, environ=environ, choice=choice, **given)

    return read
