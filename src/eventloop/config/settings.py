"""How a task is trained: one frozen dataclass, from which signature, options and reference come."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from eventloop.clock import Time
from eventloop.config.options import Option, convert_value, options_of
from eventloop.errors import SettingError
from eventloop.urls import Url, is_url_as_path, place_of

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
OnBadLoss = Literal["raise", "ignore"]
OnCallbackError = Literal["raise", "disable"]
OnSaveError = Literal["raise", "continue"]
Uneven = Literal["pad", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained. `Task` says what.

    Args:
        max_duration: how long the run is, as a time: 10ep, 5000ba, 1e9tok, 3600sec.
        precision: fp32; tf32 (products of float32 in TF32, on a GPU); bf16 (autocast); fp16
            (autocast, the loss scaled); or auto: on a GPU bf16 if it has that in hardware, else
            fp16; fp32 elsewhere. fp32 is all of float32, also on a GPU that could do TF32; bf16 and
            fp16 allow TF32 for what stays in float32.
        device: cpu, cuda, cuda:1, or auto: a GPU where there is one.
        seed: seeds Python, NumPy and torch before the model is built, and each plugin's generator.
        seed_samples: whether random draws of a map-style data set come from seed, epoch and index, the
            same with any number of workers and after any stop; false: from where the generators
            stand, as in a plain loop.
        microbatch_size: samples a forward and backward pass; the gradient of a batch stays the
            same, the memory shrinks. Not set: the whole batch. auto: the whole batch, halved as
            often as the memory runs out.
        clip_norm: largest norm of all gradients together; larger ones are scaled down to it.
        clip_value: largest absolute value of any entry of a gradient; after clip_norm.
        eval_interval: how often to evaluate, as a time; once more at the end. none: never.
        eval_at_start: whether to evaluate before the first batch, too.
        log_interval: how often logged numbers are brought to the host and handed to loggers, as
            a time; no number is lost in between.
        uneven: what becomes of samples and batches that some ranks have and others don't. pad: some
            samples are seen twice an epoch, and a rank that has run out of batches repeats one that
            counts for nothing; drop: they are left out; error: they are an error.
        sync_batch_norm: whether batch norms compute over the batches of all ranks together.
        find_unused_parameters: whether ranks look at each step which parameters took part, which
            costs time; for models of which some ranks leave parts unused.
        gc_interval: how often Python collects garbage while training, as a time other than seconds:
            at the same batch on every rank. none: whenever Python wants to.
        deterministic: whether two runs with one seed are the same bit by bit; what stands in the
            way is switched off, and named in the header.
        compile: whether torch.compile makes one region of forward and loss; layers: whether it
            compiles each layer that repeats by itself, those that are alike once. A mapping of its
            options, {"mode": "max-autotune"}, also enables it, with {"layers": true} by layer.
        run_dir: where the run's files go; one that was begun there goes on. A folder, or the URL of
            one, s3://bucket/run, for its checkpoints. Not set: a new folder runs/TASK/TIME-ID.
        resume: what a run in run_dir goes on from. auto: its newest usable checkpoint, if
            there is one; never: nothing, and there may be none; or the path or URL of a
            checkpoint to begin another run with.
        checkpoint_interval: how often to save a checkpoint, as a time; once more at the start and
            at the end. auto: 1ep where run_dir is set, else none; none: only at a signal, or on
            request.
        checkpoint_keep: how many of the newest checkpoints are kept; none: all.
        checkpoint_best: the metric of whose best evaluation the checkpoint is kept, too, and saved
            when it comes: test/accuracy; "min test/x" or "max test/x" where the metric doesn't say
            what is better.
        on_save_error: what becomes of a run of which a checkpoint can't be written. raise: it
            fails; continue: it goes on with a warning.
        on_bad_loss: what becomes of a run whose loss, before it is scaled, or whose weights are NaN
            or infinite. raise: it stops, ten batches after a loss at most; ignore: it goes on, and
            warns where the weights aren't finite.
        on_callback_error: what becomes of a run in which a callback raises. raise: it fails;
            disable: the callback is switched off with a warning, and the run goes on without it.
        autoload: whether installed plugins take part without being named.

    Raises:
        SettingError: a value is out of range.
    """

    max_duration: Time | None = None
    precision: Precision = "auto"
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
    autoload: bool = True

    def __post_init__(self) -> None:
        for name in SETTING_NAMES:
            if reason := _out_of_range(name, getattr(self, name)):
                raise SettingError(f"{name}: {reason}")


class SettingValues(TypedDict, total=False):
    """The settings as a caller may write them; for type checkers, held equal by a test."""

    max_duration: str | Time | None
    precision: Precision
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
    autoload: bool


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def setting_options() -> dict[str, Option]:
    """Returns every setting with its type, default and description, in the order of `Settings`."""
    return options_of(Settings)


def convert_setting(option: Option, raw: object) -> Any:
    """Turns what a person wrote for a setting into its value.

    Raises:
        ValueError: it isn't of the setting's type, or out of range.
    """
    if (text := str(raw)) != text.encode("utf-8", "ignore").decode():
        raise ValueError(f"{text!a} isn't UTF-8, as the run's files are; give another name")
    value = convert_value(option, raw)
    if reason := _out_of_range(option.name, value):
        raise ValueError(reason)
    return place_of(str(value)) if isinstance(value, Path) else value


def _out_of_range(name: str, value: Any) -> str:
    """Returns why a value can't stand, or "" where it can."""
    if value is None:
        return ""
    if name == "max_duration" and value.unit == "dur":
        return f"{value} is a fraction of the run, whose length it should say; write 10ep"
    if name == "gc_interval" and value.unit == "sec":
        return f"{value} passes at another batch on each rank; write it in batches: 100ba"
    if name == "seed" and not 0 <= value < 2**32:
        return f"{value} is outside 0 to {2**32 - 1}"
    if name == "checkpoint_keep" and value < 1:
        return f"{value} would keep no checkpoint; none: all"
    if name == "resume" and not value:
        return "it is empty; write auto, never, or the path of a checkpoint"
    if name in ("run_dir", "resume") and isinstance(value, Url) and value.problem:
        return value.problem
    if name == "run_dir" and isinstance(value, Path) and is_url_as_path(value):
        return f"{str(value)!r} was a URL; give it as text, not as a Path"
    if name == "microbatch_size" and value != "auto" and value < 1:
        return f"{value} is less than one sample; none: the whole batch"
    if name in ("clip_norm", "clip_value") and not (value > 0 and math.isfinite(value)):
        return f"{value} isn't a positive number; none: no clipping"
    return ""
