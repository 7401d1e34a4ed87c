"""The plugin in a training."""

import re

import pytest

from eventloop import PluginError, hookimpl
from eventloop_report import Report
from eventloop_testing import (
    differences,
    edited_checkpoint,
    isolated_trainer,
    last_checkpoint,
    run_ranks,
    tiny_batches,
    tiny_task,
)
from eventloop_trace import Trace


class Ends:
    """An algorithm that ends a run after a batch: by an error, or by a stop."""

    name = "ends"
    free_options = (
        "batch",
        "by_stop",
    )

    def __init__(self, batch=-1, *, by_stop=False):
        self.batch, self.by_stop = batch, by_stop
        self.reason, self.kind = "enough <b>now</b>", "plugin"

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            if not self.by_stop:
                raise EOFError("<no more>")
            state.request_stop(self.reason, self.kind)


def fit(folder, report=None, ends=None, others=(), **given):
    """Trains 2 epochs of 6 batches; gives the text of the page and the plugin."""
    settings = {"max_duration": "2ep", "log_interval": "1ba"} | given
    report = report or Report(pngs=False)
    task = tiny_task(train_dataloader=tiny_batches(6))
    plugins = {"algorithms": [ends or Ends()], "callbacks": [report, *others]}
    with isolated_trainer(folder, task, **plugins, **settings) as trainer:
        trainer.fit()
    return report


def text_of(folder):
    return (folder / "run" / "report.html").read_text()


def curves(report):
    """Returns the numbers that two runs share."""
    return {name: one.points() for name, one in report._numbers.by_name.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    report = fit(folder, Report(), others=[Trace()])
    return folder, report


def test_a_finished_run_has_its_plots_and_facts(finished):
    """What somebody wants to know of a run a year later."""
    folder, _ = finished
    text = text_of(folder)

    assert re.findall(r'<figure aria-label="([^"]*)"', text) == [
        "loss", "learning-rate", "accuracy", "samples-a-second",
    ]  # fmt: skip
    assert '<p class="status">finished</p>' in text
    assert "2 epochs, 12 batches, 48 samples" in text
    for fact in ("max_duration=2ep", "torch 2.", "ends", "test/accuracy", "waiting for train data"):
        assert fact in text


def test_each_plot_is_a_png_too(finished):
    """For slides and chats that take no page."""
    folder, _ = finished
    files = sorted((folder / "run" / "report").iterdir())

    assert [one.name for one in files] == ["accuracy.png", "learning-rate.png", "loss.png", "samples-a-second.png"]  # fmt: skip
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in files)


@pytest.mark.about_cpu  # on the pretend accelerator its hook is too cheap for the table
def test_with_a_trace_the_page_has_what_each_plugin_cost(finished):
    """Each hook of each plugin, the largest first."""
    folder, _ = finished

    assert "<td>ends</td><td>batch_end</td>" in text_of(folder)
    assert "weren't timed" not in text_of(folder)


def test_a_run_that_failed_has_a_page(tmp_path):
    """It is the one that somebody looks at; the message is text, not markup."""
    with pytest.raises(EOFError):
        fit(tmp_path, ends=Ends(4))

    text = text_of(tmp_path)

    assert '<p class="status failed">failed: EOFError: &lt;no more&gt;</p>' in text
    assert "loss" in re.findall(r'<figure aria-label="([^"]*)"', text)
    assert "times them" in text


def test_a_run_that_was_stopped_has_a_page(tmp_path):
    """With the reason."""
    fit(tmp_path, ends=Ends(4, by_stop=True))

    assert '<p class="status">stopped: enough &lt;b&gt;now&lt;/b&gt;</p>' in text_of(tmp_path)


def test_a_trial_that_was_pruned_says_so(tmp_path):
    """It isn't a run that a person stopped."""
    pruned = Ends(4, by_stop=True)
    pruned.reason, pruned.kind = "pruned by sweep at evaluation 2", "pruned"
    fit(tmp_path, ends=pruned)

    assert '<p class="status">pruned by sweep at evaluation 2</p>' in text_of(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("best", "weights"),
    [("max valid/loss", "the weights of ba00000006, the best"), (None, "the last weights")],
)
def test_what_test_sets_gave_stands_with_the_weights_that_they_had(best, weights, tmp_path):
    """A number without its weights is taken for the last ones'."""
    batches = tiny_batches(6)
    sets = {"eval_dataloaders": {"valid": batches}, "test_dataloaders": batches}
    task = tiny_task(train_dataloader=batches, **sets)
    settings = {"max_duration": "2ep", "checkpoint_interval": "1ep", "checkpoint_best": best}
    with isolated_trainer(tmp_path, task, callbacks=[Report(pngs=False)], **settings) as trainer:
        trainer.fit()

    assert re.search(
        rf"<td>test sets</td><td>[^<]*test/loss [0-9.]+, with {weights}<", text_of(tmp_path)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batches", [[7], [3, 11]])
def test_a_resumed_run_has_the_curves_of_one_in_one_go(batches, tmp_path, finished):
    """From its first batch on, each once."""
    given = {"checkpoint_interval": "2ba"}
    for batch in batches:
        with pytest.raises(EOFError):
            fit(tmp_path, ends=Ends(batch), **given)

    report = fit(tmp_path, **given)

    assert curves(report) == curves(finished[1])
    assert sum(report._seconds.values()) > 0


@pytest.mark.nightly
def test_the_curves_of_a_resumed_run_come_from_its_checkpoint(tmp_path, finished):
    """Control: without what was kept, they begin in the middle."""

    class Forgets(Report):
        def load_state_dict(self, state, version):
            pass

    given = {"checkpoint_interval": "2ba"}
    with pytest.raises(EOFError):
        fit(tmp_path, Forgets(pngs=False), Ends(7), **given)

    report = fit(tmp_path, Forgets(pngs=False), **given)

    assert curves(report) != curves(finished[1])


@pytest.mark.nightly
def test_two_equal_runs_differ_in_what_is_of_one_run_alone(tmp_path):
    """`checkpoints diff` leaves out times and throughput, and sees whatever else differs."""
    for name in "ab":
        fit(tmp_path / name, checkpoint_interval="2ba")
    parts = [last_checkpoint(tmp_path / name).parts for name in "ab"]

    told = {one.path for one in differences(*parts, times=True) if one.of_one_run != "seconds"}

    assert list(differences(*parts)) == []
    assert {path.removeprefix("plugins/report/state/of_this_run/").split("/")[0] for path in told} == {
        "seconds", "previous", "throughput",
    }  # fmt: skip


@pytest.mark.nightly
def test_a_run_goes_on_from_an_older_checkpoint(tmp_path, finished):
    """There the throughput is one of the numbers, and nothing is apart."""
    given = {"checkpoint_interval": "2ba"}
    with pytest.raises(EOFError):
        fit(tmp_path, ends=Ends(7), **given)
    with edited_checkpoint(tmp_path) as checkpoint:
        state = checkpoint.parts["plugins"]["report"]["state"]
        of_this_run = state.pop("of_this_run")
        state["numbers"]["named"].append(["samples a second", of_this_run.pop("throughput")])
        state.update(of_this_run)

    report = fit(tmp_path, **given)

    assert curves(report) == curves(finished[1])
    assert report._throughput.num_values == finished[1]._throughput.num_values
    assert "samples-a-second" in text_of(tmp_path)


class Counts:
    """Logs an integer that no float can hold."""

    @hookimpl
    def batch_end(self, state):
        state.log("count", 10**400)


def test_an_integer_beyond_every_float_is_a_gap(tmp_path):
    """A run shouldn't fail by what one of its plots can't show."""
    report = fit(tmp_path, others=[Counts()], max_duration="1ba")

    assert report._numbers.by_name["count"].latest == float("inf")
    assert "count" in text_of(tmp_path)


def test_a_path_may_be_given(tmp_path):
    """And a folder that isn't there is made."""
    fit(tmp_path, Report(path=str(tmp_path / "pages" / "first.html")), max_duration="1ep")

    assert (tmp_path / "pages" / "first.html").is_file()
    assert (tmp_path / "pages" / "first" / "loss.png").is_file()
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("page", ["file/page.html", "folder.html"])
def test_a_path_that_can_not_be_written_is_named_before_the_first_step(page, tmp_path):
    """Not after hours of training."""
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()

    with pytest.raises(PluginError, match=r"can't be written to [\s\S]*Report\(path=") as caught:
        fit(tmp_path, Report(path=tmp_path / page, pngs=False), ends=Ends(1))
    assert "fit_start" in str(caught.value.__notes__)


@pytest.mark.parametrize("path", ["page", "page.png", ""])
def test_a_page_is_named_as_one(path):
    """Its name without `.html` is that of the folder of the PNGs."""
    with pytest.raises(ValueError, match=r"ends in \.html"):
        Report(path=path)


def test_a_trainer_that_trains_nothing_writes_nothing(tmp_path):
    """Looking at a model makes no page."""
    with isolated_trainer(tmp_path, callbacks=[Report()]) as trainer:
        trainer.eval()

    assert not (tmp_path / "run" / "report.html").exists()


def test_two_ranks_write_one_page(tmp_path):
    """Rank 0 does."""

    def run():
        report = fit(tmp_path, max_duration="1ep")
        return len(report._numbers.by_name)

    kept = run_ranks(run)

    assert kept[0] > 0
    assert kept[1] == 0
    assert "2 ranks" in text_of(tmp_path)


class Watch:
    """Stands in for `time`."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Slow:
    """Three batches that take a time each; its length isn't known."""

    def __init__(self, watch, seconds):
        self.watch, self.seconds = watch, seconds

    def __iter__(self):
        for batch in tiny_batches(3):
            self.watch.now += self.seconds
            yield batch


class Steps:
    """An algorithm: a step takes a second, a save 7."""

    name = "steps"

    def __init__(self, watch):
        self.watch = watch

    @hookimpl
    def before_train_batch(self):
        self.watch.now += 1.0

    @hookimpl
    def eval_before_forward(self):
        self.watch.now += 0.5

    @hookimpl
    def epoch_checkpoint(self):
        self.watch.now += 7.0

    @hookimpl
    def training_end(self):
        self.watch.now += 100.0


def test_waits_are_told_apart(tmp_path, monkeypatch):
    """For train data, also of a loader that is asked whether there is another batch, and each set."""
    watch = Watch()
    monkeypatch.setattr("eventloop_report.plugin.time", watch)
    task = tiny_task(
        train_dataloader=Slow(watch, 3.0),
        eval_dataloaders={"quick": tiny_batches(2), "slow": Slow(watch, 1.5)},
    )
    plugins = {"callbacks": [report := Report(pngs=False)], "algorithms": [Steps(watch)]}

    with isolated_trainer(tmp_path, task, **plugins, max_duration="2ep") as trainer:
        trainer.fit()

    assert report._seconds == {
        "waiting for train data": 18.0, "training": 6.0, "evaluation": 5.0, "everything else": 14.0,
        "waiting for quick": 0.0, "waiting for slow": 9.0,
    }  # fmt: skip
    assert "waiting for slow" in text_of(tmp_path)
