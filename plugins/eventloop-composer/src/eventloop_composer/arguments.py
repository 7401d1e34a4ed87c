"""The arguments of Composer's trainer: which setting of ours each is, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from composer import Trainer as ComposerTrainer
from composer.callbacks import CheckpointSaver
from composer.core import Precision
from composer.core import Time as ComposerTime
from composer.core.time import ensure_time
from composer.devices import Device

from eventloop import SettingError, Time
from eventloop.toolbox import closest
from eventloop_composer.times import to_ours

DEFAULTS: Mapping[str, Any] = {
    name: one.default
    for name, one in inspect.signature(ComposerTrainer.__init__).parameters.items()
    if name != "self"
}
_PRECISIONS = {Precision.FP32: "fp32", Precision.AMP_BF16: "bf16", Precision.AMP_FP16: "fp16"}
_DEVICES = ("cpu", "gpu")

# What can't be honoured with another value than Composer's default: why, and what does it here.
REFUSED: Mapping[str, tuple[str, str]] = {
    "spin_dataloaders": (
        "a resumed run finds its place in the data without going through what is over",
        "leave it out",
    ),
    "auto_log_hparams": (
        "a trainer's arguments aren't read from its frame",
        "leave it out: settings, options and versions are in manifest.json of the run's folder",
    ),
    "load_object_store": (
        "a checkpoint is found by its path or URL",
        "give load_path='s3://bucket/run/checkpoints/...', with eventloop-remote installed",
    ),
    "load_ignore_keys": (
        "a checkpoint is loaded as a whole, or its weights are",
        "give load_weights_only=True, or assign weights to the model yourself",
    ),
    "load_exclude_algorithms": (
        "a run goes on with the algorithms that it was begun with",
        "give load_weights_only=True to begin another run with its weights",
    ),
    "save_overwrite": (
        "a run's checkpoints aren't overwritten by another run",
        "give another save_folder, or delete the old one",
    ),
    "parallelism_config": (
        "Composer's own sharding isn't used",
        "leave it out, and install eventloop-fsdp",
    ),
    "precision_config": ("there is no FP8", "leave it out, and give precision='amp_bf16'"),
    "dist_timeout": (
        "the process group is eventloop's, and a rank that hangs is found by its heartbeat",
        "leave it out",
    ),
    "ddp_sync_strategy": (
        "gradients are exchanged once a batch, with its last microbatch",
        "leave it out; settings={'find_unused_parameters': True} looks for unused parameters",
    ),
}
# What Composer's own files are like, which are written beside ours where one of these is given.
_OF_FILES = ("save_filename", "save_latest_filename", "save_weights_only", "save_ignore_keys")


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with their defaults.

    Raises:
        TypeError: Composer's trainer has no such argument, or the model is missing.
        SettingError: one can't be honoured.
    """
    for name in given:
        if name not in DEFAULTS:
            raise TypeError(f"Composer's Trainer has no argument {name!r}{closest(name, DEFAULTS)}")
    if "model" not in given:
        raise TypeError("Trainer needs a model: Trainer(model=...)")
    for name, (why, fix) in REFUSED.items():
        value = given.get(name, DEFAULTS[name])
        if value != DEFAULTS[name]:
            raise SettingError(f"{name}={value!r} can't be honoured: {why}", fix=fix)
    if (names := named_files(given)) and given.get("save_folder") is None:
        raise SettingError(
            f"{names[0]}={given[names[0]]!r} has no effect without a folder",
            fix="give save_folder='runs/mine'",
        )
    return {**DEFAULTS, **given}


def named_files(given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that ask for files of Composer's own."""
    return [
        name
        for name in _OF_FILES
        if given.get(name, DEFAULTS[name]) != DEFAULTS[name]
        and (name, given[name]) != ("save_latest_filename", None)
    ]


def saver_of(given: Mapping[str, Any]) -> CheckpointSaver | None:
    """Returns what writes files of Composer's own into `save_folder`; None without a folder."""
    if given.get("save_folder") is None:
        return None
    value = {**DEFAULTS, **given}
    return CheckpointSaver(
        folder=value["save_folder"],
        filename=value["save_filename"],
        latest_filename=value["save_latest_filename"],
        save_interval=value["save_interval"],
        weights_only=value["save_weights_only"],
        ignore_keys=value["save_ignore_keys"],
        num_checkpoints_to_keep=value["save_num_checkpoints_to_keep"],
        overwrite=True,  # that the folder has no other run is checked for ours
    )


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our settings for arguments of Composer's trainer.

    Raises:
        SettingError: a value has no counterpart here.
    """
    device = _device(given["device"])
    settings: dict[str, Any] = {
        # When to evaluate is the evaluators' affair.
        "eval_interval": None,
        "device": device,
        "precision": _precision(given["precision"], device),
        "deterministic": given["deterministic_mode"],
        # Random transforms of a data set draw from where the generators stand, as under Composer.
        "seed_samples": False,
        # Composer trains on; NaNMonitor, one of its callbacks, is what stops a run.
        "on_bad_loss": "ignore",
        **_saving(given),
    }
    if given["seed"] is not None:
        settings["seed"] = given["seed"]
    if (size := _microbatch_size(given["device_train_microbatch_size"])) is not None:
        settings["microbatch_size"] = size
    if given["compile_config"] is not None:
        settings["compile"] = given["compile_config"] or True
    if given["max_duration"] is not None:
        duration = time_of("max_duration", given["max_duration"])
        ratio = given["scale_schedule_ratio"]
        settings["max_duration"] = duration if ratio == 1.0 else scaled(duration, ratio)
    return settings


def time_of(name: str, value: int | str | ComposerTime) -> Time:
    """Returns a time as Composer takes it, a number of epochs or a text, as ours.

    Raises:
        SettingError: it is in a unit that isn't counted here.
    """
    try:
        return to_ours(ensure_time(value, "ep"))
    except ValueError as error:
        raise SettingError(
            f"{name}: {error}", fix="write it in epochs or batches: '10ep', '100ba'"
        ) from None


def scaled(time: Time, ratio: float) -> Time:
    """Returns a duration that Composer's `scale_schedule_ratio` shortens or lengthens.

    Raises:
        SettingError: nothing is left of it.
    """
    value = int(time.value * ratio)
    if value < 1:
        raise SettingError(
            f"scale_schedule_ratio={ratio} leaves nothing of {time}", fix="give a larger ratio"
        )
    return Time(value, time.unit)


def _microbatch_size(given: Any) -> Any:
    if isinstance(given, float):
        raise SettingError(
            f"device_train_microbatch_size={given} is a part of a sample, for sequence parallelism",
            fix="give a number of samples, or 'auto'",
        )
    return given


def _device(given: str | Device | None) -> str:
    name = given.name if isinstance(given, Device) else given
    if name is None:
        return "auto"
    if name not in _DEVICES:
        raise SettingError(f"device={name!r} isn't one of cpu, gpu", fix="give one of them")
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if name == "gpu" and found is not None else name


def _precision(given: str | Precision | None, device: str) -> str:
    if given is None:
        import torch

        is_gpu = device != "cpu" and torch.accelerator.is_available()
        return "fp16" if is_gpu else "fp32"
    precision = Precision(given)
    if precision not in _PRECISIONS:
        raise SettingError(
            f"precision={precision.value!r} isn't one of fp32, amp_bf16, amp_fp16",
            fix="give precision='amp_bf16'",
        )
    return _PRECISIONS[precision]


def _saving(given: Mapping[str, Any]) -> dict[str, Any]:
    folder = given["save_folder"]
    load_path = given["load_path"]
    if folder is None and given["autoresume"]:
        raise SettingError(
            "autoresume=True has no folder to look in", fix="give save_folder='runs/mine'"
        )
    settings: dict[str, Any] = {}
    if folder is not None:
        if isinstance(given["save_interval"], Callable):  # type: ignore[arg-type]
            raise SettingError(
                "save_interval is a function, which eventloop doesn't ask",
                fix="give a time, '100ba', or a callback that calls "
                "trainer.eventloop.state.request_checkpoint()",
            )
        keep = given["save_num_checkpoints_to_keep"]
        if keep == 0:
            raise SettingError(
                "save_num_checkpoints_to_keep=0 keeps nothing to go on from",
                fix="give -1 for all, or 1; with run_dir='s3://...' they are kept there alone",
            )
        settings["run_dir"] = folder
        settings["resume"] = "auto" if given["autoresume"] else "never"
        settings["checkpoint_interval"] = time_of("save_interval", given["save_interval"])
        settings["checkpoint_keep"] = None if keep < 0 else keep
    if load_path is not None and not given["load_weights_only"]:
        if str(load_path).endswith(".pt"):
            raise SettingError(
                f"load_path={str(load_path)!r} is a checkpoint of Composer's, which has no place in the "
                "data and no generators to go on from exactly",
                fix="give load_weights_only=True for its weights, or a checkpoint of eventloop",
            )
        settings["resume"] = str(load_path)
    return settings
