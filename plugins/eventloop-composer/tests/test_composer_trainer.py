"""The Trainer in the place of Composer's: its arguments, its methods, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from pathlib import Path

import composer
import pytest
import torch
from composer.core import Algorithm, Callback, Evaluator, Event, Time
from composer.devices import DeviceCPU
from composer.models import ComposerClassifier, ComposerModel
from composer.optim import ExponentialScheduler, LinearScheduler
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer_cases import CASES, MORE, cnn, ours, tensors, trained, trainer_of, weights_of
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import eventloop
from eventloop import EventloopError, SettingError, TaskError
from eventloop_composer import Trainer, task
from eventloop_composer.arguments import DEFAULTS, REFUSED
from eventloop_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

NONE = MORE["none"]


def same(one, other):
    return all(torch.equal(one[name], value) for name, value in other.items())


def loader(size=8):
    return DataLoader(tensors(), batch_size=size)


def perceptron():
    layers = torch.nn.Flatten(), torch.nn.Linear(768, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    return ComposerClassifier(torch.nn.Sequential(*layers), num_classes=10)


def test_it_knows_every_argument_of_composers_trainer():
    """One that a new version adds is taken or refused, not dropped."""
    theirs = inspect.signature(composer.Trainer.__init__).parameters

    assert DEFAULTS.keys() == theirs.keys() - {"self"}
    assert REFUSED.keys() <= DEFAULTS.keys()


class Broadcasts(ComposerModel):
    """Compares outputs (B, 1) with targets (B,), of which torch warns."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 1))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return mse_loss(outputs, batch[1].float())


def test_a_loss_that_broadcasts_trains_as_theirs():
    """A loss of eventloop's own tasks raises."""
    ends = []
    for kind in (composer.Trainer, Trainer):
        torch.manual_seed(0)
        model = Broadcasts()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        given = {"max_duration": "1ep", "progress_bar": False, "device": "cpu", "seed": 1}
        trainer = kind(model=model, train_dataloader=loader(), optimizers=optimizer, **given)
        trainer.fit()
        ends.append(weights_of(trainer))
        trainer.close()

    assert same(*ends)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
@pytest.mark.parametrize("action", ["ignore", "default", "error"])
def test_filters_of_the_users_hold_where_a_loss_broadcasts(kind, action):
    """Those set before, and those that a callback sets."""

    class Filters(Callback):
        def fit_start(self, state, logger):
            warnings.filterwarnings("ignore", "a filter of the user's")

    given = {"max_duration": "1ep", "progress_bar": False, "device": "cpu", "seed": 1}
    model, raised = Broadcasts(), ""
    trainer = kind(model=model, train_dataloader=loader(), callbacks=Filters(), **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings(action, "Using a target size")
        try:
            trainer.fit()
        except UserWarning as error:
            raised = str(error)
        filters = [str(one[1] and one[1].pattern) for one in warnings.filters]
    trainer.close()

    has_warned = any("Using a target size" in str(one.message) for one in caught)
    assert has_warned == (action == "default")
    assert ("Using a target size" in raised) == (action == "error")
    assert "a filter of the user's" in filters
    assert filters.count("Using a target size") == 1


def test_a_pass_of_the_users_may_drop_a_single_algorithm():
    """Composer's own passes do nothing to one alone, and aren't run there."""
    applied = []

    class Noted(Algorithm):
        def match(self, event, state):
            return event == Event.BATCH_END

        def apply(self, event, state, logger):
            applied.append(event)

    for passes in (None, lambda matching, event: []):
        trained(ours, NONE, algorithms=[Noted()], algorithm_passes=passes)

    assert len(applied) == 6  # all from the run without a pass


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_says_what_to_do(name):
    """An argument that changes nothing would be believed to change something."""
    other = {bool: True, type(None): {"any": "thing"}, float: 1.5, str: "other"}
    value = False if DEFAULTS[name] is True else other[type(DEFAULTS[name])]

    with pytest.raises(SettingError, match=f"^{name}=") as caught:
        trainer_of(ours, NONE, **{name: value})

    assert "fix  " in str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"max_duration": "1iter"}, "max_duration"),
        ({"precision": "amp_fp8"}, "isn't one of fp32, amp_bf16, amp_fp16"),
        ({"device": "tpu"}, "isn't one of cpu, gpu"),
        ({"device_train_microbatch_size": 0.5}, "a part of a sample"),
        ({"autoresume": True}, "no folder"),
        ({"save_folder": "x", "save_interval": lambda state, event: True}, "is a function"),
        ({"save_folder": "x", "save_num_checkpoints_to_keep": 0}, "keeps nothing"),
        ({"load_path": "x.pt"}, "a checkpoint of Composer's"),
        ({"scale_schedule_ratio": 0.5}, "has no effect without schedulers"),
        ({"optimizers": [1, 2]}, "takes one"),
        (
            {"eval_dataloader": [Evaluator(label="a", dataloader=loader()), loader()]},
            "wrap all in Evaluator",
        ),
        (
            {
                "eval_dataloader": Evaluator(
                    label="a", dataloader=loader(), device_eval_microbatch_size=2
                )
            },
            "in one piece",
        ),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(given, problem):
    """With what to write instead."""
    with pytest.raises(EventloopError, match=problem):
        trainer_of(ours, NONE, **given)


def test_an_unknown_argument_has_a_closest_one():
    """As Python says it, and with what was meant."""
    with pytest.raises(TypeError, match="'train_loader'; the closest is 'train_dataloader'"):
        Trainer(model=cnn(), train_loader=[])


def test_what_comes_with_fit_trains_as_what_came_with_the_trainer():
    """Data, length, schedules; nothing is drawn, since Composer's draws to find its place again."""
    weights = []
    for kind in (composer.Trainer, ours):
        torch.manual_seed(3)
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = kind(model=model, optimizers=optimizer, seed=3, device="cpu", progress_bar=False)
        trainer.fit(train_dataloader=loader(), duration="1ep")
        trainer.fit(duration="2ba", schedulers=ExponentialScheduler(gamma=0.5))
        assert trainer.state.timestamp.batch == 5
        weights.append(weights_of(trainer))
        trainer.close()

    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def test_results_of_evaluations_and_predictions_are_composers():
    """Metrics in the State, outputs as a list on the host."""
    found = []
    for kind in (composer.Trainer, ours):
        trainer = trainer_of(kind, NONE, eval_dataloader=loader(), train_dataloader=loader())
        trainer.eval()
        values = {name: one.compute() for name, one in trainer.state.eval_metrics["eval"].items()}
        trainer.eval(Evaluator(label="other", dataloader=loader(6)), subset_num_batches=1)
        values["other"] = trainer.state.eval_metrics["other"]["CrossEntropy"].compute()
        outputs = trainer.predict(loader(), subset_num_batches=2)
        assert trainer.predict(loader(), return_outputs=False) == []
        found.append((values, outputs))
        trainer.close()

    (theirs, their_outputs), (here, our_outputs) = found
    torch.testing.assert_close(here, theirs, rtol=0, atol=0)
    torch.testing.assert_close(our_outputs, their_outputs, rtol=0, atol=0)


def test_sets_with_intervals_of_their_own_are_evaluated_when_they_are_due():
    """One evaluation a batch count: what is due at the last batch waits for the end of the epoch."""
    seen = {}
    for kind in (composer.Trainer, ours):
        names = []

        class Names(Callback):
            def eval_start(self, state, logger):
                names.append((state.dataloader_label, state.timestamp.batch.value))

        sets = [
            Evaluator(label="often", dataloader=loader(), eval_interval="1ba"),
            Evaluator(label="seldom", dataloader=loader(), eval_interval="1ep"),
        ]
        trainer = trainer_of(kind, NONE, eval_dataloader=sets, callbacks=[Names()])
        trainer.fit()
        trainer.close()
        seen[kind] = names

    assert seen[ours] == seen[composer.Trainer]


def test_a_fit_that_is_done_needs_a_duration():
    """How long it shall train isn't known."""
    trainer = trainer_of(ours, NONE)
    trainer.fit()

    with pytest.raises(SettingError, match="is done"):
        trainer.fit()
    with pytest.raises(TaskError, match="no eval data loader"):
        trainer.eval()


@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
def test_epochs_of_a_loader_without_a_length_are_refused(kind):
    """It may be endless, and the fit with it; a number of batches makes it finite."""

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(lambda: tensors()[0], None)

    def fit(**given):
        made = kind(model=perceptron(), train_dataloader=DataLoader(Endless(), 8), **given)
        made.fit()
        return made.state.timestamp.batch

    with pytest.raises(ValueError, match="max_duration cannot be specified in epochs"):
        fit(max_duration="1ep")
    assert fit(max_duration="1ep", train_subset_num_batches=2) == fit(max_duration="2ba") == 2


@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
def test_an_eval_loader_without_a_length_is_refused(kind):
    """Its evaluation may never end; a number of batches makes it finite."""

    class Endless(DataLoader):
        def __len__(self):
            return None

    def built(**given):
        return kind(model=perceptron(), eval_dataloader=Endless(tensors(), 8), **given)

    with pytest.raises(ValueError, match="length"):
        built()
    assert len(built(eval_subset_num_batches=1).state.evaluators) == 1


def test_time_begins_anew_for_composers_objects():
    """With `reset_time`: schedules, callbacks and durations count from there; the weights go on."""

    class Times(Callback):
        def batch_end(self, state, logger):
            now, rate = state.timestamp, state.schedulers[0].get_last_lr()[0]
            seen[-1].append((now.epoch.value, now.batch.value, now.sample.value, rate))

    seen, trainers = [], []
    for kind in (composer.Trainer, ours):
        seen.append([])
        given = {"schedulers": LinearScheduler(1.0, 0.1), "callbacks": [Times()]}
        trainers.append(trainer := trainer_of(kind, NONE, **given))
        trainer.fit()
        trainer.fit(reset_time=True)
        trainer.fit(duration="1ep", reset_time=True)
        assert trainer.state.timestamp.epoch == "1ep"

    assert seen[0] == seen[1]
    assert max(one[:2] for one in seen[1]) == (1, len(trainers[1].state.dataloader) * 2)
    assert same(*map(weights_of, trainers))


def test_time_cannot_begin_anew_amid_an_epoch():
    """The epoch goes on in the data."""
    trainer = trainer_of(ours, NONE, max_duration="1ba")
    trainer.fit()

    with pytest.raises(SettingError, match="after 1 batches of an epoch"):
        trainer.fit(reset_time=True)


def test_a_run_that_is_resumed_counts_from_where_time_began_anew(tmp_path):
    """A kill in a second fit."""
    run = {"settings": {"run_dir": tmp_path / "run", "checkpoint_interval": "1ba"}}
    trainer = trainer_of(ours, NONE, max_duration="1ep", **run)
    trainer.fit()
    trainer.fit(reset_time=True, duration="1ba")
    trainer.close()

    resumed = trainer_of(ours, NONE, max_duration="1ep", **run)

    assert resumed.state.timestamp.batch == "1ba"
    resumed.close()


def test_files_of_composers_are_written_by_their_names(tmp_path):
    """With `save_filename`, beside the checkpoints from which a run goes on."""
    written, kept = [], []
    for kind in (composer.Trainer, ours):
        folder = tmp_path / kind.__module__
        given = {"save_folder": str(folder), "save_filename": "mine-ba{batch}.pt"}
        trainer = trainer_of(kind, NONE, save_interval="2ba", **given)
        trainer.fit()
        trainer.save_checkpoint_to_save_folder()
        written.append({one.name for one in folder.glob("*.pt")})
        kept.append([Path(one).name for one in trainer.saved_checkpoints])
        last = sorted(folder.glob("mine-ba*.pt"))[-1]
        found = torch.load(last, weights_only=False)["state"]["model"]
        assert same({name: one.cpu() for name, one in found.items()}, weights_of(trainer))
        trainer.close()

    assert written[0] == written[1]
    assert kept[0] == kept[1]
    assert list((tmp_path / ours.__module__ / "checkpoints").iterdir())


def test_a_file_of_composers_can_be_asked_for(tmp_path):
    """`save_checkpoint_to_save_folder` names it as Composer does, where no name was given."""
    names = []
    for kind in (composer.Trainer, ours):
        folder = tmp_path / kind.__module__
        trainer = trainer_of(kind, NONE, save_folder=str(folder), save_interval="2ep")
        trainer.fit(duration="3ba")
        trainer.save_checkpoint_to_save_folder()
        names.append({one.name for one in folder.glob("*ba3*.pt")})
        trainer.close()

    assert names[1] == {"ep1-ba3-rank0.pt"} <= names[0]  # Composer's has one of the fit's end, too
    with pytest.raises(ValueError, match="needs save_folder"):
        trainer_of(ours, NONE).save_checkpoint_to_save_folder()
    with pytest.raises(SettingError, match="has no effect without a folder"):
        trainer_of(ours, NONE, save_filename="a.pt")


def test_a_model_is_a_task_of_ours(tmp_path):
    """With our settings, our plugins and our files around it."""
    torch.manual_seed(17)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = task(
        model,
        DataLoader(tensors(), batch_size=8, shuffle=True),
        optimizers=optimizer,
        algorithms=CASES["MixUp"].make(),
        seed=17,
        device=DeviceCPU(),
        progress_bar=False,
        eval_dataloader=None,
    )

    with eventloop.Trainer(made, max_duration="2ep", autoload=False, run_dir=tmp_path) as trainer:
        result = trainer.fit()

    expected = trained(composer.Trainer, CASES["MixUp"], device="cpu")
    assert all(torch.equal(one, expected[name]) for name, one in result.model.state_dict().items())
    assert (tmp_path / "checkpoints").is_dir()


def test_a_plugin_of_ours_goes_beside_theirs():
    """Ours of the averages sees the steps that Composer's algorithms make."""
    from eventloop_ema import Ema

    trainer = trainer_of(ours, CASES["MixUp"], plugins=[Ema(decay=0.5, rampup=0)])
    trainer.fit()

    ema = trainer.eventloop.state.plugin("ema")
    weights = dict(trainer.eventloop.state.model.named_parameters())
    name = next(iter(weights))
    assert not torch.equal(ema.averages.state_dict()[name], weights[name])
    theirs = trained(composer.Trainer, CASES["MixUp"])
    assert torch.equal(weights[name].cpu(), theirs[name])


def test_bf16_ends_with_the_weights_of_a_plain_loop():
    """Composer's trainer refuses bf16 on the CPU; autocast encloses the same two calls here."""
    torch.manual_seed(17)
    model = perceptron()  # no convolutions, which bf16 puts into channels_last here
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in loader():
        with torch.autocast("cpu", torch.bfloat16):
            outputs = plain(batch)
            loss = plain.loss(outputs, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    trainer = ours(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=loader(),
        max_duration="1ep",
        precision="amp_bf16",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()

    here = weights_of(trainer)
    assert all(torch.equal(one, here[name]) for name, one in plain.state_dict().items())
    assert trainer.state.precision.value == "amp_bf16"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["MixUp", "SAM"])
def test_algorithms_train_in_bf16(name):
    """And not in float32 by mistake."""
    given = {"device_train_microbatch_size": 4}
    half, full = (
        trained(ours, CASES[name], precision=one, **given) for one in ("amp_bf16", "fp32")
    )

    assert all(torch.isfinite(one).all() for one in half.values())
    assert any(not torch.equal(one, half[key]) for key, one in full.items())


def on_ranks(kind, algorithm, sampler):
    """Returns the weights of a rank."""
    from composer.utils import dist, get_device

    dist.initialize_dist(get_device("cpu"))
    data = tensors()
    given = dist.get_sampler(data, shuffle=False) if sampler else None
    weights = trained(
        kind,
        CASES[algorithm],
        train_dataloader=DataLoader(data, batch_size=4, sampler=given),
        device_train_microbatch_size=2,
    )
    return {name.replace("module.module", "module"): one for name, one in weights.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["GradientClipping", "EMA", "MixUp"])
def test_two_ranks_end_with_composers_weights(name):
    """Composer's objects run on each; gradients, steps and clocks agree, and are Composer's."""
    first, second = run_ranks(on_ranks, ours, name, sampler=True)
    theirs, _ = run_ranks(on_ranks, composer.Trainer, name, sampler=True)

    assert theirs.keys() == first.keys()
    for key, one in theirs.items():
        torch.testing.assert_close(first[key], one, rtol=0, atol=1e-6)
        assert torch.equal(first[key], second[key]) or "running" in key


def test_sam_and_data_without_a_sampler_on_two_ranks():
    """Data is shared out as in any run of ours; SAM climbs by the gradient of all ranks."""
    first, second = run_ranks(on_ranks, ours, "SAM", sampler=False)

    assert all(torch.equal(one, second[key]) or "running" in key for key, one in first.items())


@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
def test_a_loss_that_is_not_finite_is_trained_on(kind):
    """Composer leaves it to a callback, NaNMonitor, to stop a run."""
    model = perceptron()
    model.loss = lambda outputs, batch: outputs.sum() * float("nan")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    trainer = kind(
        model=model, train_dataloader=loader(), optimizers=optimizer, max_duration="2ba",
        progress_bar=False,
    )  # fmt: skip
    trainer.fit()

    assert trainer.state.timestamp.batch == 2


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
def test_a_profiler_of_composers_marks_the_events(kind, tmp_path, monkeypatch):
    """Its trace has the same events from both trainers."""
    monkeypatch.chdir(tmp_path)  # torch's own profiler writes beside it, into the working directory
    model, schedule = perceptron(), cyclic_schedule(wait=0, warmup=0, active=4, repeat=1)
    handler = JSONTraceHandler(folder=str(tmp_path), overwrite=True)
    trainer = kind(
        model=model, train_dataloader=loader(), max_duration="2ep", progress_bar=False,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        profiler=Profiler(schedule=schedule, trace_handlers=[handler]),
    )  # fmt: skip
    trainer.fit()
    trainer.close()

    written = "".join(one.read_text() for one in tmp_path.rglob("*.json"))
    assert "event/batch_start" in written
    assert "event/after_forward" in written


class EvalTimes(Callback):
    """Makes evaluations last, and measures them and the fit."""

    def __init__(self):
        self.seen = []
        self.evaluated_s = 0.0

    def fit_start(self, state, logger):
        self.began = time.perf_counter()

    def eval_start(self, state, logger):
        self.eval_began = time.perf_counter()
        time.sleep(0.5)

    def eval_end(self, state, logger):
        self.seen.append(state.eval_timestamp)
        self.evaluated_s += time.perf_counter() - self.eval_began

    def fit_end(self, state, logger):
        self.trained_s = time.perf_counter() - self.began - self.evaluated_s


@pytest.mark.parametrize("kind", [composer.Trainer, Trainer])
def test_an_evaluation_has_a_clock_of_its_own(kind):
    """Speeds are computed from both; it begins anew with each evaluation."""
    model, times = perceptron(), EvalTimes()
    trainer = kind(
        model=model, train_dataloader=loader(), eval_dataloader=loader(), callbacks=[times],
        optimizers=torch.optim.SGD(model.parameters(), 0.1), max_duration="2ep", progress_bar=False,
    )  # fmt: skip
    trainer.fit()

    assert len(times.seen) == 2
    for one in times.seen:
        assert one.batch == len(loader())
        assert 0 < one.total_wct.total_seconds() < 60
    now = trainer.state.timestamp
    assert now.batch_wct < now.total_wct
    assert 0 < now.total_wct.total_seconds() < times.trained_s


def test_a_duration_of_composers_class_is_taken():
    """Composer's scripts write `Time`, too."""
    trainer = trainer_of(ours, NONE, max_duration=Time(4, "ba"))
    trainer.fit()

    assert trainer.eventloop.state.clock.batch == 4
