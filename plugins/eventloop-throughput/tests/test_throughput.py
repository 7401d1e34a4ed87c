"""The plugin in a training; its watch is moved by hand."""

import pytest
import torch
from torch import nn

from eventloop import PluginError, hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task
from eventloop_throughput import Throughput


class Watch:
    """Stands in for `time`: seconds pass when somebody says so."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    found = Watch()
    monkeypatch.setattr("eventloop_throughput.plugin.time", found)
    return found


class Slow:
    """A data loader that takes 3 seconds a batch."""

    def __init__(self, watch, num_batches=3, has_length=True):
        self.watch, self.batches = watch, tiny_batches(num_batches)
        if has_length:
            self.__class__ = SlowAndLong

    def __iter__(self):
        for batch in self.batches:
            self.watch.now += 3.0
            yield batch


class SlowAndLong(Slow):
    def __len__(self):
        return len(self.batches)


class Takes:
    """An algorithm by which a step takes a second, everything else far too long."""

    name = "takes"
    free_options = ("ends",)

    def __init__(self, watch, step_s=lambda batch: 1.0, ends=-1):
        self.watch, self.step_s, self.ends = watch, step_s, ends

    @hookimpl
    def before_train_batch(self, state):
        self.watch.now += self.step_s(state.clock.batch)
        if state.clock.batch == self.ends:
            raise EOFError

    @hookimpl
    def eval_end(self, state):
        self.watch.now += 1000.0

    @hookimpl
    def batch_checkpoint(self, state):
        self.watch.now += 1000.0

    @hookimpl
    def epoch_end(self, state):
        self.watch.now += 1000.0


class Logged:
    """A callback that keeps the numbers of throughput by batch, without those of single sets."""

    name = "logged"

    def __init__(self):
        self.rows = {}

    @hookimpl
    def log(self, numbers, at):
        for name, value in numbers.items():
            if name.startswith("throughput/") and name.count("/") == 1:
                self.rows.setdefault(at.batch, {})[name.removeprefix("throughput/")] = value


def fit(folder, watch, throughput=None, *, task=None, takes=None, **given):
    logged = Logged()
    given = {"max_duration": "3ep", "log_interval": "1ba", "eval_interval": "2ba"} | given
    plugins = {"callbacks": [throughput or Throughput(), logged]}
    plugins["algorithms"] = [takes or Takes(watch)]
    task = task or tiny_task(train_dataloader=Slow(watch))
    with isolated_trainer(folder, task, **plugins, **given) as trainer:
        trainer.fit()
    return logged.rows


@pytest.mark.parametrize("has_length", [True, False])
def test_the_rates_are_those_of_waiting_and_stepping(tmp_path, watch, has_length):
    """Evaluation and saving don't slow them; a loader without a length is waited for elsewhere."""
    task = tiny_task(
        train_dataloader=Slow(watch, has_length=has_length), num_tokens=lambda batch: 20
    )

    rows = fit(tmp_path, watch, task=task)

    assert list(rows) == [2, 3, 4, 5, 6, 7, 8, 9]
    for row in rows.values():
        rates = {name: row[name] for name in row if name != "tflops" and "memory" not in name}
        assert rates == {
            "samples_per_s": 1.0, "tokens_per_s": 5.0, "steps_per_s": 0.25, "data_wait_frac": 0.75
        }  # fmt: skip


def test_a_window_forgets(tmp_path, watch):
    """A run that slows down must show it, and show when it is over."""
    takes = Takes(watch, step_s=lambda batch: 5.0 if batch in (3, 4) else 1.0)

    rows = fit(tmp_path, watch, Throughput(window=2), takes=takes)

    rates = [row["steps_per_s"] for row in rows.values()]
    assert rates == [1 / 4, 1 / 4, 2 / 12, 2 / 16, 2 / 12, 1 / 4, 1 / 4, 1 / 4]


def test_a_slow_start_is_left_out(tmp_path, watch):
    """The first batch compiles, and fills caches."""
    takes = Takes(watch, step_s=lambda batch: 1.0 if batch else 600.0)

    rows = fit(tmp_path, watch, takes=takes, log_interval="3ba")

    assert [row["steps_per_s"] for row in rows.values()] == [0.25, 0.25, 0.25]


def test_a_resumed_run_has_no_spike(tmp_path, watch):
    """All the samples of the past in no time would be the rate of a lifetime."""
    given = {"checkpoint_interval": "4ba", "task": tiny_task()}
    with pytest.raises(EOFError):
        fit(tmp_path, watch, takes=Takes(watch, ends=6), **given)

    rows = fit(tmp_path, watch, **given)

    assert list(rows) == [6, 7, 8, 9]
    assert {row["samples_per_s"] for row in rows.values()} == {4.0}


def test_ranks_are_counted_together(tmp_path, watch):
    """Two ranks train on two batches in the time of one."""

    def run(folder):
        return fit(folder, watch, task=tiny_task(train_dataloader=tiny_batches(6)))

    rows, same = run_ranks(run, tmp_path)

    assert rows == same
    assert {(row["samples_per_s"], row["steps_per_s"]) for row in rows.values()} == {(8.0, 1.0)}
    (tflops,) = {row["tflops"] for row in rows.values()}
    assert tflops == pytest.approx(3 * 2 * 4 * (3 * 8 + 8 * 3) / 1e12)


MODES = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "microbatches": {"microbatch_size": 3},
}


class Again:
    """An algorithm that computes each gradient a second time, as L-BFGS does."""

    name = "again"

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        closure()
        return (yield)


def conv_task():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 1, 6, 6, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)
    ]
    layers = (
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip
    return tiny_task(
        model=lambda: nn.Sequential(*layers), train_dataloader=batches, eval_dataloaders=None
    )


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_mfu_is_that_of_the_model_in_any_mode(tmp_path, watch, mode):
    """However a batch is sliced; what a closure computes again doesn't make the model larger."""
    throughput = Throughput(peak_tflops=1e-6)
    plugins = {"algorithms": [Takes(watch), Again()], "callbacks": [throughput, logged := Logged()]}

    given = {"max_duration": "2ep", "log_interval": "1ba"} | mode
    with isolated_trainer(tmp_path, conv_task(), **plugins, **given) as trainer:
        trainer.fit()

    per_sample = 3 * 2 * (4 * 4 * 4 * 9 + 64 * 3)
    found = [row["mfu"] for row in logged.rows.values()]
    assert found == pytest.approx([4 * per_sample / 1e6] * 5)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_counting_changes_no_bit(tmp_path, mode):
    """Of weights, nor of the statistics of batch norms."""

    def weights(name, *callbacks):
        torch.manual_seed(0)
        folder = tmp_path / name
        with isolated_trainer(folder, conv_task(), callbacks=callbacks, **mode) as trainer:
            trainer.fit()
            return trainer.state.model.state_dict()

    found, expected = weights("with", Throughput(), Logged()), weights("without")

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_given_operations_are_used(tmp_path, watch):
    """A compiled model's can't be counted."""
    rows = fit(tmp_path, watch, Throughput(gflops_per_sample=500, peak_tflops=2))

    assert {(row["tflops"], row["mfu"]) for row in rows.values()} == {(0.5, 0.25)}


@pytest.mark.nightly
def test_operations_of_a_token_are_multiplied_by_tokens(tmp_path, watch):
    """Under `compile`, too, where they can't be counted."""
    task = tiny_task(train_dataloader=Slow(watch), num_tokens=lambda batch: 20)
    given = {"compile": {"backend": "eager"}, "task": task}

    rows = fit(tmp_path, watch, Throughput(gflops_per_token=100, peak_tflops=2), **given)
    by_sample = fit(tmp_path / "other", watch, Throughput(gflops_per_sample=500, peak_tflops=2))

    assert {row["mfu"] for row in [*rows.values(), *by_sample.values()]} == {0.25}
    with pytest.raises(ValueError, match="both given"):
        Throughput(gflops_per_token=50, gflops_per_sample=500)


def test_a_peak_for_nothing_is_refused(tmp_path):
    """With nothing to compare it with, MFU would be missing in silence."""
    with pytest.raises(PluginError, match="can't be counted") as raised:
        isolated_trainer(
            tmp_path, callbacks=[Throughput(peak_tflops=1)], compile={"backend": "eager"}
        )

    assert "Throughput(gflops_per_sample=" in str(raised.value)
    assert "Throughput(gflops_per_token=" in str(raised.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda part: nn.Sequential(torch.compile(part, backend="eager"), nn.Linear(3, 3)),
        torch.jit.script,
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_can_not_be_looked_into_has_no_operations(tmp_path, wrap):
    """Those of the other parts alone would look like a slow device."""
    task = tiny_task(model=lambda: wrap(nn.Linear(3, 3)))
    with isolated_trainer(
        tmp_path, task, callbacks=[Throughput(), logged := Logged()], log_interval="1ba"
    ) as trainer:
        trainer.fit()

    assert logged.rows
    assert not any("tflops" in row for row in logged.rows.values())


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("window", 0, ValueError),
        ("window", 1.5, TypeError),
        ("peak_tflops", 0, ValueError),
        ("peak_tflops", "x", TypeError),
        ("gflops_per_sample", float("nan"), ValueError),
        ("gflops_per_token", -1, ValueError),
    ],
)
def test_a_wrong_option_is_shown(option, value, error):
    """Before the run, not at its first number."""
    with pytest.raises(error) as raised:
        Throughput(**{option: value})

    assert str(value) in str(raised.value)
