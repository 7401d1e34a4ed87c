"""Settings: the parameters of training that don't depend on the task, as a frozen dataclass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from eventloop.clock import Time
from eventloop.config.option_types import Option, convert_value, options_of
from eventloop.errors import SettingError
from eventloop.urls import Url, hidden, is_url_as_path, place_of
from eventloop.vocabulary import VALUES

PrecisionName = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
OnBadLoss = Literal["raise", "ignore"]
OnCallbackError = Literal["raise", "disable"]
OnSaveError = Literal["raise", "continue"]
Autoload = bool | Literal["callbacks"]
Uneven = Literal["pad", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; model, data, loss and optimizers are in `Task`.

    Args:
        max_duration: how long the run is, as a time: 10ep, 5000ba, 1e9tok, 3600sec.
        precision: fp32; tf32 (float32 with TF32 matrix products, on a GPU); bf16 (autocast); fp16
            (autocast with loss scaling); or auto: on a GPU bf16 if the hardware supports it, else
            fp16; fp32 elsewhere. fp32 never uses TF32; bf16 and fp16 allow TF32 for operations in
            float32.
        device: cpu, cuda, cuda:1, xpu, mps, ..., or auto: an accelerator if available.
        seed: seeds Python, NumPy and torch before the model is built, and each plugin's generator.
        seed_samples: whether random draws of a map-style data set depend only on seed, epoch and
            index, so that they are the same with any number of workers and after a resume; false:
            draws depend on the RNG states, as in a plain loop.
        microbatch_size: samples per forward and backward pass; uses less memory for the same
            gradient. Not set: the whole batch. auto: the whole batch, halved whenever memory runs
            out.
        clip_norm: the maximum norm of all gradients together; larger gradients are scaled down.
        clip_value: the maximum absolute value of a gradient's entries; applied after clip_norm.
        eval_interval: how often to evaluate, as a time; also at the end of the run. none: never.
        eval_at_start: whether to also evaluate before the first batch.
        log_interval: how often logged numbers are copied to the host and passed to loggers, as a
            time; numbers in between aren't lost.
        uneven: how to handle samples that don't divide evenly over ranks. pad: some samples are
            used twice in an epoch, and a rank without batches repeats a batch with weight 0; drop:
            surplus samples are left out; error: the run fails.
        sync_batch_norm: whether batch norms compute statistics over the batches of all ranks.
        find_unused_parameters: whether to find parameters without a gradient in each step, which
            costs time; for models with modules that some ranks don't use.
        gc_interval: how often Python collects garbage during training, as a time other than seconds:
            at the same batch on every rank. none: whenever Python decides to.
        deterministic: whether two runs with the same seed are identical bit by bit; features that
            prevent it are disabled, and named in the header.
        compile: whether to compile forward and loss together with torch.compile; layers: compiles
            repeated layers separately, identical layers once. A mapping of torch.compile's options,
            {"mode": "max-autotune"}, also enables it; with {"layers": true}, by layer.
        run_dir: the folder for the run's files; a run that began there is resumed. For
            checkpoints, it can be the URL of a folder, s3://bucket/run. Not set: a new folder
            runs/TASK/TIME-ID.
        resume: the checkpoint to resume from. auto: the newest usable checkpoint in run_dir, if
            any; never: none, and run_dir must not contain a checkpoint; or the path or URL of a
            checkpoint, to begin another run with it.
        checkpoint_interval: how often to save a checkpoint, as a time; also at the start and the
            end. auto: 1ep if run_dir is set, else none; none: only on a signal or a request.
        checkpoint_keep: how many of the newest checkpoints to keep; none: all.
        checkpoint_best: also keep the checkpoint with the best value of this metric:
            test/accuracy; "min test/x" or "max test/x" if the metric doesn't say which is better.
        on_save_error: the action when a checkpoint can't be written. raise: the run fails; continue:
            the run continues with a warning.
        on_bad_loss: the action when the unscaled loss or the weights are NaN or infinite. raise: the
            run stops, at most ten batches after the loss; ignore: the run continues, with a warning
            if the weights aren't finite.
        on_callback_error: the action when a callback raises. raise: the run fails; disable: the run
            continues without the callback, with a warning.
        autoload: whether to use installed plugins without naming them; callbacks: only callbacks,
            which don't change the training.

    Raises:
        SettingError: a value is out of range.
    """

    max_duration: Time | None = None
    precision: PrecisionName = "auto"
    device: str = "auto"
    seed: int = 0
    seed_samples: bool = True
    microbatch_size: int | Literal["auto"] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    eval_interval: Time | None = Time("1ep")  # noqa: RUF009 - a Time can't change
    eval_at_start: bool = False
    log_interval: Time = Time("10ba")  # noqa: RUF009
    uneven: Uneven = "pad"
    sync_batch_norm: bool = False
    find_unused_parameters: bool = False
    gc_interval: Time | None = Time("100ba")  # noqa: RUF009
    deterministic: bool = False
    compile: bool | Literal["layers"] | dict[str, Any] = False
    run_dir: Url | Path | None = None
    resume: Url | str = "auto"
    checkpoint_interval: Time | Literal["auto"] | None = "auto"
    checkpoint_keep: int | None = 2
    checkpoint_best: str | None = None
    on_save_error: OnSaveError = "raise"
    on_bad_loss: OnBadLoss = "raise"
    on_callback_error: OnCallbackError = "raise"
    autoload: Autoload = True

    def __post_init__(self) -> None:
        for name in SETTING_NAMES:
            if reason := _out_of_range(name, getattr(self, name)):
                raise SettingError(f"{name}: {reason}")


class SettingValues(TypedDict, total=False):
    """The types that a caller can write for settings, for type checkers; a test compares the names."""

    max_duration: str | Time | None
    precision: PrecisionName
    device: str
    seed: int
    seed_samples: bool
    microbatch_size: int | Literal["auto"] | None
    clip_norm: float | None
    clip_value: float | None
    eval_interval: str | Time | None
    eval_at_start: bool
    log_interval: str | Time
    uneven: Uneven
    sync_batch_norm: bool
    find_unused_parameters: bool
    gc_interval: str | Time | None
    deterministic: bool
    compile: bool | Literal["layers"] | dict[str, Any]
    run_dir: str | Path | None
    resume: str
    checkpoint_interval: str | Time | None
    checkpoint_keep: int | None
    checkpoint_best: str | None
    on_save_error: OnSaveError
    on_bad_loss: OnBadLoss
    on_callback_error: OnCallbackError
    autoload: Autoload


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def setting_options() -> Mapping[str, Option]:
    """Returns every setting with its type, default and description, in the order of `Settings`."""
    return options_of(Settings)


def convert_setting(option: Option, raw: object) -> Any:
    """Converts a value as the user wrote it to the setting's type.

    Raises:
        ValueError: the value isn't of the setting's type, or is out of range.
    """
    # Names of files from the system can have surrogates, which can't be written to the run's files.
    if (text := str(raw)) != text.encode("utf-8", "ignore").decode():
        raise ValueError(f"{text!a} isn't UTF-8, as the run's files are; give another name")
    # Often `--run-dir $UNSET`; as a Path it would be the working directory.
    if option.name == "run_dir" and not text:
        raise ValueError("it is empty; give a folder")
    value = convert_value(option, raw)
    if reason := _out_of_range(option.name, value):
        raise ValueError(reason)
    return place_of(str(value)) if isinstance(value, Path) else value


def _out_of_range(name: str, value: Any) -> str:
    """Returns the reason why a value is out of range; "" if it is valid."""
    if value is None:
        return ""
    if name == "max_duration" and value.unit == "dur":
        return f"{value} is a fraction of the run, but its length is needed; write 10ep"
    if name == "gc_interval" and value.unit == "sec":
        return f"{value} passes at a different batch in each run; write it in batches: 100ba"
    if name == "seed" and not 0 <= value < 2**32:
        return f"{value} is outside 0 to {2**32 - 1}"
    if name == "checkpoint_keep" and value < 1:
        return f"{value} would keep no checkpoint; none: all"
    if name == "device" and value.lower() in VALUES["device"]:
        return f"torch has no device {value!r}"
    is_word = name == "resume" and str(value).lower() in VALUES["resume"]
    if is_word and not Path(value).exists():
        return f"there is no checkpoint {value!r}"
    if name == "resume" and not value:
        return "it is empty; write auto, never, or the path of a checkpoint"
    if name in ("run_dir", "resume") and isinstance(value, Url) and value.problem:
        return value.problem
    if name == "run_dir" and isinstance(value, Path) and is_url_as_path(value):
        url = hidden(value.as_posix().replace(":/", "://", 1))
        return f"{str(value)!r} was a URL; give it as text with both slashes, {url}"
    if name == "microbatch_size" and value != "auto" and value < 1:
        return f"{value} is less than one sample; none: the whole batch"
    if name in ("clip_norm", "clip_value") and not (value > 0 and math.isfinite(value)):
        return f"{value} isn't a positive number; none: no clipping"
    return ""
