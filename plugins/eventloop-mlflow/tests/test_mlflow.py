"""The plugin in a training, read back through MLflow's client."""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from eventloop import PluginError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop_mlflow import Mlflow
from eventloop_mlflow.background_call import BackgroundCall
from eventloop_mlflow.sender import SENDER
from eventloop_mlflow.tracking import TrackedRun, called
from eventloop_testing import (
    differences,
    edited_checkpoint,
    isolated_trainer,
    last_checkpoint,
    run_ranks,
    tiny_batches,
    tiny_task,
)


class Dies:
    """An algorithm that ends the run, or its process, after a batch."""

    name = "dies"
    free_options = ("batch", "error")

    def __init__(self, batch=None, error=EOFError):
        self.batch, self.error = batch, error

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            if self.error is None:
                os._exit(9)
            raise self.error

    @hookimpl
    def eval_end(self, state):
        state.log_text("said", f"\ud800 after {state.clock.batch}")
        state.log_text("samples", {"prompt": ["a", None], "score": [math.inf, state.clock.batch]})


class Keeps:
    """A callback that logs numbers, one an epoch, and keeps all that are logged."""

    name = "keeps"

    def __init__(self, **values):
        self.values = values
        self.rows = []

    @hookimpl
    def epoch_start(self, state):
        for name, values in self.values.items():
            state.log(name, values[state.clock.epoch])

    @hookimpl
    def log(self, numbers, at):
        self.rows += [(name, at.batch, value) for name, value in numbers.items()]


class Store:
    """A database, and what a test reads from it; each test has an experiment of its own."""

    def __init__(self, folder, experiment):
        self.uri, self.experiment = f"sqlite:///{folder / 'mlflow.db'}", experiment

    @property
    def client(self):
        return MlflowClient(self.uri)

    def runs(self):
        experiment = self.client.get_experiment_by_name(self.experiment)
        return self.client.search_runs([experiment.experiment_id]) if experiment else []

    def run(self):
        (found,) = self.runs()
        return found

    def numbers(self, run=None):
        run = run or self.run()
        return sorted(
            (name, one.step, one.value)
            for name in run.data.metrics
            for one in self.client.get_metric_history(run.info.run_id, name)
        )

    def texts(self):
        """Returns the content of all texts and tables by their paths."""
        run_id, found = self.run().info.run_id, {}
        for name in ("said", "samples"):
            for one in self.client.list_artifacts(run_id, f"texts/test/{name}"):
                path = Path(self.client.download_artifacts(run_id, one.path))
                found[one.path] = path.read_text()
        return found

    def files(self, folder=None):
        found = self.client.list_artifacts(self.run().info.run_id, folder)
        return sorted(Path(one.path).name for one in found)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    Store(folder, "none").runs()  # makes the tables, which takes long
    return folder


@pytest.fixture
def copied(database, tmp_path):
    """A database that no other test has had a connection to."""
    shutil.copy(database / "mlflow.db", tmp_path)
    return Store(tmp_path, "copied")


@pytest.fixture
def in_process(monkeypatch):
    """Lets the thread that waits for the sender do its work, where a test can reach it."""

    def call(surroundings, uri, run_id, method, *args):
        return called(uri, run_id, method, args)

    monkeypatch.setattr(SENDER, "call", call)
    return monkeypatch


@pytest.fixture
def store(database, request):
    return Store(database, request.node.name)


def fit(folder, store, dies=None, *, keeps=None, task=None, options=None, **given):
    """Trains 9 batches, and saves every fourth."""
    settings = {"max_duration": "3ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    options = {"tracking_uri": store.uri, "experiment": store.experiment} | (options or {})
    plugins = {"callbacks": [Mlflow(**options), keeps or Keeps()], "algorithms": [dies or Dies()]}
    with isolated_trainer(folder, task, **plugins, **(settings | given)) as trainer:
        trainer.fit()


def fit_and_die(folder, store, batch, *, by_kill=False, **given):
    if not by_kill:
        with pytest.raises(EOFError):
            fit(folder, store, Dies(batch), **given)
        return
    fit_in_a_fork(folder, store, Dies(batch, None), **given)


def fit_in_a_fork(folder, store, dies, **given):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, store, dies, **given)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture(scope="module")
def in_one_go(database, tmp_path_factory):
    folder, keeps = tmp_path_factory.mktemp("one-go"), Keeps(own=[0.1, 2.0**70, -1e-300])
    store = Store(database, "in one go")
    fit(folder, store, keeps=keeps)
    return folder, store, sorted(keeps.rows)


def test_mlflow_holds_the_numbers_that_were_logged(in_one_go):
    """Bit for bit, with the batch that they belong to."""
    _, store, logged = in_one_go

    assert store.numbers() == logged
    assert {name for name, _, _ in logged} == {
        "train/loss", "lr/sgd", "test/accuracy", "test/loss", "own"
    }  # fmt: skip


def test_numbers_come_with_their_time(in_one_go):
    """MLflow draws over steps or over time."""
    _, store, _ = in_one_go
    history = store.client.get_metric_history(store.run().info.run_id, "train/loss")

    times = [one.timestamp for one in sorted(history, key=lambda one: one.step)]
    assert times == sorted(times)
    assert times[0] >= store.run().info.start_time


def test_a_run_tells_what_it_is_made_of(in_one_go):
    """Parameters, tags, name, status, the manifest, and the newest checkpoint, whole."""
    folder, store, _ = in_one_go
    run = store.run()
    place = Path(store.client.download_artifacts(run.info.run_id, "", str(folder)))

    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["max_duration"] == "3ep"
    assert run.data.tags["eventloop.run_dir"] == str(folder / "run")
    # With its version, where it is installed.
    assert run.data.tags["eventloop.plugins"].startswith("dies, keeps, mlflow")
    assert json.loads((place / "manifest.json").read_text())["settings"]["seed"] == 0
    assert store.files("checkpoints") == ["ba00000009"]
    assert read_checkpoint(place / "checkpoints" / "ba00000009").facts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("checkpoints", "files"), [("all", ["ba00000000", "ba00000004", "ba00000009"]), ("none", [])]
)
def test_checkpoints_are_copied_as_told(tmp_path, store, checkpoints, files):
    """They may be large."""
    fit(tmp_path, store, options={"checkpoints": checkpoints}, checkpoint_interval="4ba",
        max_duration="9ba")  # fmt: skip

    assert set(files) <= set(store.files("checkpoints"))
    assert bool(store.files("checkpoints")) == bool(files)


def test_numbers_that_are_none_are_there_too(tmp_path, store):
    """MLflow has NaN, and takes the largest number for infinity; that is so in its database."""
    fit(tmp_path, store, keeps=Keeps(own=[math.nan, -math.inf, 10**400]))

    found = [value for name, _, value in store.numbers() if name == "own"]
    assert sum(map(math.isnan, found)) == 1
    assert sorted(value for value in found if value == value) == [
        -sys.float_info.max, sys.float_info.max
    ]  # fmt: skip


def test_many_numbers_of_any_name_are_taken(tmp_path, store):
    """More than one request of MLflow's holds, and no two under one name."""
    values = {f"odd?{idx}//\u00fc": [idx] * 3 for idx in range(600)}

    fit(tmp_path, store, keeps=Keeps(**values), max_duration="1ep")

    found = [value for name, value in store.run().data.metrics.items() if name.startswith("odd")]
    assert sorted(found) == list(range(600))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("error", "status"), [(EOFError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_run_that_does_not_end_well_says_so(tmp_path, store, error, status):
    """With the numbers until then; they may tell why."""
    with pytest.raises(error):
        fit(tmp_path, store, Dies(5, error))

    assert store.run().info.status == status
    assert {step for _, step, _ in store.numbers()} >= {1, 2, 3, 4}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("batches", "by_kill"),
    [([1], False), ([3], True), ([5], False), ([9], True), ([6, 7, 5, 9], True)],
)
def test_a_resumed_run_goes_on_with_its_numbers_once(tmp_path, store, in_one_go, batches, by_kill):
    """In one run of MLflow's, however often it was killed, and whatever was sent by then."""
    for batch in batches:
        fit_and_die(tmp_path, store, batch, by_kill=by_kill, options={"send_every_s": 0})

    fit(tmp_path, store)

    _, _, logged = in_one_go
    assert store.numbers() == [row for row in logged if row[0] != "own"]
    assert store.run().info.status == "FINISHED"


class LogsTwice:
    """Logs a number before a checkpoint and after it, of one batch; or dies between the two."""

    name = "logs-twice"
    free_options = ("dies",)

    def __init__(self, dies=False):
        self.dies = dies

    @hookimpl
    def batch_end(self, state):
        state.log("twice", 1.0)

    @hookimpl
    def epoch_end(self, state):
        if self.dies:
            while not (state.run_dir / "checkpoints" / "ba00000003").is_dir():
                time.sleep(0.01)  # a thread writes it
            os._exit(9)
        state.log("twice", 2.0)


def test_what_was_told_before_a_checkpoint_is_told_apart(tmp_path, store):
    """Of one name at one batch: the first was sent with the checkpoint, the second never."""
    fit_in_a_fork(tmp_path, store, LogsTwice(dies=True), checkpoint_interval="3ba")

    fit(tmp_path, store, LogsTwice(), checkpoint_interval="3ba")

    at_3 = [value for name, step, value in store.numbers() if (name, step) == ("twice", 3)]
    assert at_3 == [1.0, 2.0]


def test_texts_are_files_of_the_run(in_one_go):
    """By name and batch; what is no character or no JSON is written as a text is."""
    _, store, _ = in_one_go

    table = '{{"columns": ["prompt", "score"], "data": [["a", "inf"], [null, {}]]}}'
    assert store.texts() == {
        **{f"texts/test/said/{batch:08}.txt": f"? after {batch}" for batch in (3, 6, 9)},
        **{f"texts/test/samples/{batch:08}.json": table.format(batch) for batch in (3, 6, 9)},
    }


def test_there_are_points_to_be_left_out(tmp_path, store, monkeypatch):
    """Control: the killed process had sent what comes again."""

    def ends(status, end=os._exit):
        for one in threading.enumerate():
            if one.name == "eventloop-mlflow":
                one.join()
        end(status)

    monkeypatch.setattr(os, "_exit", ends)
    fit_and_die(tmp_path, store, 7, by_kill=True, options={"send_every_s": 0})

    assert max(step for _, step, _ in store.numbers()) >= 5
    assert store.run().info.status == "RUNNING"


def test_a_run_is_found_by_its_folder(tmp_path, store, in_one_go):
    """Where the checkpoint is older than the plugin's state, or has none."""
    fit_and_die(tmp_path, store, 7)
    folder = tmp_path / "run" / "checkpoints" / "ba00000004"
    checkpoint = read_checkpoint(folder)
    del checkpoint.parts["plugins"]["mlflow"]
    shutil.rmtree(folder)
    write_checkpoint(folder, checkpoint.parts, checkpoint.facts, batch=4)

    fit(tmp_path, store)

    _, _, logged = in_one_go
    assert store.numbers() == [row for row in logged if row[0] != "own"]


def test_two_equal_runs_differ_in_what_is_of_one_run_alone(tmp_path, store):
    """`checkpoints diff` leaves out the ids of runs, and sees whatever else differs."""
    for name in "ab":
        fit(tmp_path / name, store)
    parts = [last_checkpoint(tmp_path / name).parts for name in "ab"]

    told = {one.path for one in differences(*parts, times=True) if one.of_one_run != "seconds"}

    assert list(differences(*parts)) == []
    assert told == {"plugins/mlflow/state/of_this_run/run_id"}


def test_a_run_goes_on_from_an_older_checkpoint(tmp_path, store, in_one_go):
    """There the id stands beside the step, and nothing is apart."""
    fit_and_die(tmp_path, store, 7)
    with edited_checkpoint(tmp_path) as checkpoint:
        state = checkpoint.parts["plugins"]["mlflow"]["state"]
        state.update(state.pop("of_this_run"))
        assert state.keys() == {"run_id", "step", "told"}

    fit(tmp_path, store)

    _, _, logged = in_one_go
    assert store.numbers() == [row for row in logged if row[0] != "own"]


def test_another_run_from_a_checkpoint_is_another_run(tmp_path, store):
    """They are two from then on."""
    fit_and_die(tmp_path, store, 7)
    before = store.numbers()

    place = str(tmp_path / "run" / "checkpoints" / "ba00000004")
    fit(tmp_path, store, run_dir=tmp_path / "fork", resume=place)

    fork, old = store.runs()
    assert store.numbers(old) == before
    assert {step for _, step, _ in store.numbers(fork)} == {5, 6, 7, 8, 9}


def test_a_trainer_that_only_evaluates_sends_nothing(tmp_path, store):
    """Looking at a model is not a run."""
    options = {"tracking_uri": store.uri, "experiment": store.experiment}
    with isolated_trainer(tmp_path, callbacks=[Mlflow(**options)]) as trainer:
        trainer.eval()

    assert store.runs() == []


def test_two_ranks_are_one_run(tmp_path, copied):
    """Rank 0 tells of it."""

    def run(folder):
        fit(folder, copied, task=tiny_task(train_dataloader=tiny_batches(6)))

    run_ranks(run, tmp_path)

    losses = [step for name, step, _ in copied.numbers() if name == "train/loss"]
    assert losses == list(range(1, 10))


class Waits:
    """Lets a run of MLflow begin only when a batch of the training has ended; or never."""

    def __init__(self, monkeypatch):
        self.has_trained, begin = threading.Event(), TrackedRun.begin

        def late(*args):
            assert self.has_trained.wait(60)
            return begin(*args)

        monkeypatch.setattr(TrackedRun, "begin", late)

    @hookimpl
    def batch_end(self, state):
        self.has_trained.set()


def test_the_first_batches_wait_for_no_store(tmp_path, store, in_one_go, in_process):
    """MLflow takes seconds to import and to open its database; the numbers come all the same."""
    fit(tmp_path, store, Waits(in_process), checkpoint_interval="none")

    _, _, logged = in_one_go
    assert store.numbers() == [row for row in logged if row[0] != "own"]


def test_no_batch_waits_for_a_server(tmp_path, store, in_one_go, in_process):
    """One that takes the first numbers only when the fifth batch is done."""
    has_begun, has_trained = threading.Event(), threading.Event()
    describe, send = TrackedRun.describe, TrackedRun.send

    class Trains:
        @hookimpl
        def batch_end(self, state):
            if state.clock.batch == 2:
                assert has_begun.wait(60)
            if state.clock.batch == 5:
                has_trained.set()

    def described(*args):
        describe(*args)
        has_begun.set()

    def late(*args):
        assert has_trained.wait(20)
        send(*args)

    in_process.setattr(TrackedRun, "describe", described)
    in_process.setattr(TrackedRun, "send", late)
    fit(tmp_path, store, Trains(), checkpoint_interval="none", options={"send_every_s": 0})

    _, _, logged = in_one_go
    assert store.numbers() == [row for row in logged if row[0] != "own"]


class Fails:
    """Lets MLflow's client fail for a number of calls."""

    def __init__(self, monkeypatch, num_calls):
        self.num_left, self.call = num_calls, MlflowClient.log_batch
        monkeypatch.setattr(MlflowClient, "log_batch", lambda *args, **given: self(*args, **given))

    def __call__(self, *args, **given):
        if given.get("metrics"):
            self.num_left -= 1
            if self.num_left >= 0:
                raise MlflowException("the server is gone")
        return self.call(*args, **given)


def test_a_store_that_fails_ends_the_run(tmp_path, store, in_process):
    """In words, with the ways out."""
    Fails(in_process, 10**9)

    with pytest.raises(PluginError, match="the server is gone") as raised:
        fit(tmp_path, store)

    assert store.uri in str(raised.value)
    assert 'Mlflow(on_error="warn")' in str(raised.value)


def test_a_store_that_fails_for_a_while_gets_the_numbers_later(
    tmp_path, store, in_one_go, in_process
):
    """All of them, each once, after one warning."""
    Fails(in_process, 2)

    with pytest.warns(UserWarning, match="the run goes on") as warned:
        fit(tmp_path, store, options={"on_error": "warn", "send_every_s": 0})

    _, _, logged = in_one_go
    assert len(warned) == 1
    assert store.numbers() == [row for row in logged if row[0] != "own"]


def test_a_store_that_fails_while_a_run_begins_has_one_run(tmp_path, store, in_process):
    """One that is gone once the run is made and before it is described."""
    log_dict, errors = MlflowClient.log_dict, [MlflowException("the server is gone")] * 2

    def fails_twice(*args):
        if errors:
            raise errors.pop()
        log_dict(*args)

    in_process.setattr(MlflowClient, "log_dict", fails_twice)
    with pytest.warns(UserWarning, match="the run goes on"):
        fit(tmp_path, store, options={"on_error": "warn", "send_every_s": 0})

    assert store.run().info.status == "FINISHED"
    assert not errors


def test_the_other_callbacks_end_first(tmp_path, store, in_process):
    """What they do at the end of a fit is done while the sender works."""
    ended, set_status = [], TrackedRun.set_status

    class Ends:
        name = "z-ends"

        @hookimpl
        def log(self, numbers):
            """So that it is a logger, too, by whose name alone it would come later."""

        @hookimpl
        def fit_end(self, state):
            ended.append("another")

    def noted(run, status):
        ended.append(status)
        set_status(run, status)

    in_process.setattr(TrackedRun, "set_status", noted)
    fit(tmp_path, store, keeps=Ends())

    assert ended == ["another", "FINISHED"]


@pytest.fixture
def interruptible():
    """A job in the background ignores SIGINT."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


def waits_for_thread():
    """Whether the main thread waits for the one that sends."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code is not BackgroundCall.wait.__code__:
        frame = frame.f_back
    return frame is not None


def test_an_interrupted_wait_leaves_the_numbers_to_the_thread(
    tmp_path, store, in_process, interruptible
):
    """Two that send the same numbers would send them twice, or drop what is new."""
    is_at_end, senders, num_senders = threading.Event(), set(), []
    send = TrackedRun.send

    class Ends:
        @hookimpl
        def batch_end(self, state):
            if state.clock.batch == 2:  # the first thread, which begins the run, has ended
                for thread in threading.enumerate():
                    if thread.name == "eventloop-mlflow":
                        thread.join()
            if state.clock.batch == 9:
                is_at_end.set()

    def late(*args):
        senders.add(threading.current_thread())
        if not num_senders and threading.current_thread() is not threading.main_thread():
            assert is_at_end.wait(60)
            os.kill(os.getpid(), signal.SIGINT)  # asks for the end
            time.sleep(0.3)  # two at once are one
            while not waits_for_thread():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)  # interrupts the wait
            time.sleep(0.3)
            num_senders.append(len(senders))
        send(*args)

    in_process.setattr(TrackedRun, "send", late)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, store, Ends(), checkpoint_interval="none", options={"send_every_s": 0})

    assert num_senders == [1]
    assert store.run().info.status == "KILLED"


def test_a_store_that_is_never_there_lets_a_run_go_on(tmp_path, store):
    """What was lost is said at the end."""
    (tmp_path / "file").touch()
    store.uri = f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}"

    with pytest.warns(UserWarning, match="MLflow at|never reached") as warned:
        fit(tmp_path, store, options={"on_error": "warn"})

    said = "24 numbers and 6 texts never reached sqlite"
    assert [str(one.message) for one in warned][-1].startswith(said)


def test_the_default_is_a_database_where_mlflow_looks(tmp_path, copied, monkeypatch):
    """`mlflow ui` in the same folder opens it."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)

    fit(tmp_path, copied, options={"tracking_uri": None, "experiment": None})

    assert Store(tmp_path, "eventloop").numbers()
    assert (tmp_path / "mlartifacts").is_dir()


@pytest.mark.parametrize(
    ("option", "value"), [("checkpoints", "some"), ("on_error", "ignore"), ("send_every_s", -1)]
)
def test_a_wrong_option_is_shown(option, value):
    """Before the run."""
    with pytest.raises(ValueError, match=str(value)):
        Mlflow(**{option: value})
