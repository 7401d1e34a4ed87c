"""Each of Composer's callbacks and loggers in a run, with what it sees and what it makes written down."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import composer.callbacks as callbacks
import composer.loggers as loggers
import numpy as np
import torch
from composer.core import Callback as ComposerCallback
from composer.core import Event
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerClassifier, HuggingFaceModel
from composer_cases import Case, causal_texts, gpt2, tensors, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

# What a run of 6 batches in 2 epochs with two evaluations is made for.
RUN_NAME = "watched"
COUNTED = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch")
# Calls of a logger, all of which take their numbers as the first argument.
LOGGED = ("log_hyperparameters", "log_metrics", "log_traces", "log_table", "log_images")
# Numbers of the clock and of the machine, and names drawn at random: whether they are there is compared.
OF_THE_CLOCK = re.compile(
    r"^(time/(train|val|total|remaining_estimate)$|throughput/|cpu_|disk_|network_|mlflow_\w+_id$)"
)


def linear() -> ComposerClassifier:
    """A model that draws nothing: what an evaluation draws under Composer's trainer changes nothing."""
    return ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), num_classes=10)


@dataclass(frozen=True)
class Watched:
    """A callback or a logger, and the run in which it is watched.

    Args:
        make: makes it; the folder of the run is the working directory.
        made: what it has made in the folder, or by itself, when all is closed.
        model, data: make model and data set.
        arguments: of the trainer.
    """

    make: Callable[[], Any]
    made: Callable[[Any], Any] = lambda one: None
    model: Callable[[], Any] = linear
    data: Callable[[], Any] = tensors
    arguments: dict[str, Any] = field(default_factory=dict)


def classes(package: Any, base: type) -> dict[str, type]:
    """Returns all classes of a kind that a package of Composer's defines, by name."""
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    ]
    found = {
        name: one
        for module in modules
        for name, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, base) and one.__module__ == module.__name__ and one is not base
    }
    return dict(sorted(found.items()))


def counts(timestamp: Any) -> tuple[int, ...]:
    """Returns what a timestamp counts; not how long it took."""
    return tuple(getattr(timestamp, name).value for name in COUNTED)


def shown(value: Any, name: str = "") -> Any:
    """Returns a value that two runs can be compared by: exact, but for what is of the clock."""
    if OF_THE_CLOCK.search(name):
        return type(value).__name__
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): shown(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    return value


def untimed(value: Any) -> Any:
    """Returns a nest without what is a length of time, or the environment."""
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if not key.endswith("_wct")}
    if isinstance(value, list):
        return [untimed(one) for one in value]
    return value


class Receiver(LoggerDestination):
    """A logger that takes all that one can be given, as those of cloud services are."""

    def __init__(self, seen: list[Any]) -> None:
        for name in LOGGED:
            setattr(self, name, _noting(seen, name))
        self.seen = seen

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, **given: Any) -> None:
        """Notes the name, which may have the time of the day in it."""
        self.seen.append(("upload_file", re.sub(r"\d{8,}\S*", "", remote_file_name), given))


def _noting(seen: list[Any], name: str) -> Callable[..., None]:
    def note(*args: Any, **given: Any) -> None:
        seen.append((name, shown(args), shown(given)))

    return note


def watch(one: ComposerCallback, seen: list[Any]) -> None:
    """Has each hook that a class implements, and nothing else, write down what it sees."""
    for name in [event.value for event in Event] + ["run_event", "close", "post_close", *LOGGED]:
        own, base = (getattr(kind, name, None) for kind in (type(one), ComposerCallback))
        if own is not base and own is not getattr(LoggerDestination, name, None):
            setattr(one, name, _watched(type(one).__name__, name, getattr(one, name), seen))


def _watched(of: str, name: str, hook: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **given: Any) -> Any:
        event = args[0].value if name == "run_event" else name
        states = [one for one in args if hasattr(one, "eval_timestamp")]
        if not event.startswith("iteration"):  # we have none
            times = [
                counts(one)
                for state in states
                for one in (state.timestamp, state.eval_timestamp, state.predict_timestamp)
            ]
            rest = [shown(one) for one in args if not isinstance(one, Event | Logger)]
            seen.append((of, event, times if states else rest, shown(given)))
        return hook(*args, **given)

    return call


def watched_run(kind: Callable[..., Any], case: Watched) -> tuple[list[Any], Any]:
    """Returns what a callback or logger saw in a fit, an evaluation and a prediction, and made."""
    seen: list[Any] = []
    one = case.make()
    watch(one, seen)
    is_logger = isinstance(one, LoggerDestination)
    given: dict[str, Any] = {
        "callbacks": [] if is_logger else [one],
        "loggers": [one] if is_logger else [Receiver(seen)],
        "train_dataloader": DataLoader(case.data(), batch_size=8),
        "eval_dataloader": DataLoader(case.data(), batch_size=6),
        "device_train_microbatch_size": 4,
        "run_name": RUN_NAME,
        **case.arguments,
    }
    trainer = trainer_of(kind, Case(list, case.model, case.data), **given)
    trainer.fit()
    trainer.eval()
    trainer.predict(DataLoader(case.data(), batch_size=8))
    weights = {name: value.tolist() for name, value in trainer.state.model.state_dict().items()}
    trainer.close()
    return seen, (case.made(one), weights)


@contextmanager
def quiet_streams() -> Iterator[None]:
    """Undoes what a FileLogger does to the process's streams, which Composer leaves as it is."""
    import sys

    kept = {stream: vars(stream).get("write") for stream in (sys.stdout, sys.stderr)}
    try:
        yield
    finally:
        for stream, write in kept.items():
            if write is None:
                vars(stream).pop("write", None)
            else:
                stream.write = write  # type: ignore[method-assign]


def written_gpt2() -> HuggingFaceModel:
    """The GPT-2 of the other tests, with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", *(f"word{idx}" for idx in range(62))]
    made = Tokenizer(models.WordLevel({one: idx for idx, one in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )
    model = gpt2().model
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = (
                0.0  # it would draw in training what an evaluation draws under Composer's trainer
            )
    return HuggingFaceModel(model, tokenizer=tokenizer, use_logits=True)


class Unmeasured(ComposerClassifier):
    """The linear model without metrics of training, which need the outputs."""

    def __init__(self) -> None:
        super().__init__(linear().module, num_classes=10)

    def get_metrics(self, is_train: bool) -> Any:
        """Returns those of evaluation."""
        return {} if is_train else super().get_metrics(is_train)


def _loads_weights() -> Any:
    import composer

    other = trainer_of(composer.Trainer, Case(list, linear), seed=3, run_name="other")
    with torch.no_grad():
        for one in other.state.model.parameters():
            one.fill_(0.01)
    other.save_checkpoint("weights.pt", weights_only=True)
    other.close()
    return callbacks.LoadCheckpoint("weights.pt", load_weights_only=True)


def _mlperf() -> Any:
    from mlperf_logging.mllog import constants

    # Composer reads a name that the package doesn't have, and raises under its own trainer.
    vars(constants).setdefault("DEVICE_TRAIN_MICROBATCH_SIZE", "device_train_microbatch_size")
    return callbacks.MLPerfCallback("mlperf", index=0, system_name="here", target=0.99)


def _mlperf_events(one: Any) -> Any:
    lines = Path(one.filename).read_text().splitlines()
    events = [json.loads(line.partition(":::MLLOG ")[2]) for line in lines]
    return [(one["key"], one["value"], one["metadata"].get("epoch_num")) for one in events]


def _checkpoints(one: Any) -> Any:
    one.tmp_dir_for_symlink.cleanup()  # which Composer leaves to the end of the process
    made = {}
    for name in sorted(Path().rglob("*.pt")):
        state = torch.load(name, weights_only=False)["state"]
        del state["scaler"]  # eventloop's precision has one of its own
        made[str(name)] = untimed(shown(state))
    return made


def _exported(one: Any) -> Any:
    batch = next(iter(DataLoader(tensors(), batch_size=8)))
    return torch.jit.load(one.save_path)(batch).tolist()


def _scalars(one: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(Path("board") / RUN_NAME))
    read.Reload()
    return {
        tag: sorted((event.step, event.value) for event in read.Scalars(tag))
        for tag in sorted(read.Tags()["scalars"])
    }


def _mlflow() -> Any:
    return loggers.MLFlowLogger(
        tracking_uri=Path("runs").absolute(), log_system_metrics=False, synchronous=True
    )


def _mlflow_metrics(one: Any) -> Any:
    from mlflow import MlflowClient

    client, run = MlflowClient(one.tracking_uri), one._run_id
    return {
        name: [(at.step, at.value) for at in client.get_metric_history(run, name)]
        for name in sorted(client.get_run(run).data.metrics)
    }


def _bars(one: Any) -> Any:
    """Returns how far each bar was when it was closed; how often it is drawn depends on the clock."""
    found = re.findall(r"(\w+) +(Epoch|Batch) +(\d+): .*?(\d+/\d+)", one.stream.getvalue())
    return {tuple(rest): at for *rest, at in found}


class Terminal(io.StringIO):
    """A stream with a number, which Composer's progress bar asks for."""

    def fileno(self) -> int:
        """Returns that of a pipe that is no terminal."""
        return 0


STOPS = {"monitor": "MulticlassAccuracy", "dataloader_label": "eval"}
CALLBACKS = {
    "ActivationMonitor": Watched(lambda: callbacks.ActivationMonitor("2ba", only_log_wandb=False)),
    "CheckpointSaver": Watched(
        lambda: callbacks.CheckpointSaver(save_interval="2ba"), _checkpoints
    ),
    "EarlyStopper": Watched(
        lambda: callbacks.EarlyStopper(**STOPS, comp="less", patience="1ep"),
        lambda one: (shown(one.best), counts(one.best_occurred)),
        arguments={"max_duration": "5ep"},
    ),
    "ExportForInferenceCallback": Watched(
        lambda: callbacks.ExportForInferenceCallback(
            "torchscript", "model.pt", sample_input=torch.zeros(8, 3, 16, 16)
        ),
        _exported,
    ),
    "FreeOutputs": Watched(callbacks.FreeOutputs, model=Unmeasured),
    "Generate": Watched(
        lambda: callbacks.Generate(["word1 word2", "word3"], "2ba", max_new_tokens=4),
        model=written_gpt2,
        data=causal_texts,
    ),
    "ImageVisualizer": Watched(lambda: callbacks.ImageVisualizer("1ba")),
    "LRMonitor": Watched(callbacks.LRMonitor),
    "LoadCheckpoint": Watched(_loads_weights),
    "MLPerfCallback": Watched(_mlperf, _mlperf_events),
    "MemoryMonitor": Watched(callbacks.MemoryMonitor),
    "MemorySnapshot": Watched(callbacks.MemorySnapshot),
    "NaNMonitor": Watched(callbacks.NaNMonitor),
    "OOMObserver": Watched(callbacks.OOMObserver),
    "OptimizerMonitor": Watched(lambda: callbacks.OptimizerMonitor(batch_log_interval=1)),
    "RuntimeEstimator": Watched(callbacks.RuntimeEstimator),
    "SpeedMonitor": Watched(lambda: callbacks.SpeedMonitor(window_size=2)),
    "SystemMetricsMonitor": Watched(callbacks.SystemMetricsMonitor),
    "ThresholdStopper": Watched(
        lambda: callbacks.ThresholdStopper(**STOPS, threshold=2.0, comp="less"),
        arguments={"max_duration": "3ep"},
    ),
}
LOGGERS = {
    "ConsoleLogger": Watched(
        lambda: loggers.ConsoleLogger("1ba", Terminal(), log_traces=True),
        lambda one: one.stream.getvalue(),
    ),
    "FileLogger": Watched(
        lambda: loggers.FileLogger("log.txt", capture_stdout=False, capture_stderr=False),
        lambda one: Path("log.txt").read_text(),
    ),
    "InMemoryLogger": Watched(
        loggers.InMemoryLogger,
        lambda one: (
            {
                name: [(counts(at), shown(value, name)) for at, value in values]
                for name, values in one.data.items()
            },
            one.hyperparameters,
        ),
    ),
    "MLFlowLogger": Watched(_mlflow, _mlflow_metrics),
    "MosaicMLLogger": Watched(loggers.MosaicMLLogger),
    "ProgressBarLogger": Watched(lambda: loggers.ProgressBarLogger(Terminal()), _bars),
    "TensorboardLogger": Watched(lambda: loggers.TensorboardLogger("board"), _scalars),
}
# What none of these tests can run, and why.
NOT_HERE = {
    "CometMLLogger": "an account at Comet",
    "NeptuneLogger": "an account at Neptune",
    "RemoteUploaderDownloader": "an object store",
    "SlackLogger": "a workspace at Slack",
    "WandBLogger": "a wandb whose runs have `get_url`, which 0.31 hasn't",
}
