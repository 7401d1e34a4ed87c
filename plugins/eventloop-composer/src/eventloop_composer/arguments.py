"""The arguments of Composer's trainer: their eventloop settings, and those that are refused."""

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
    name: parameter.default
    for name, parameter in inspect.signature(ComposerTrainer.__init__).parameters.items()
    if name != "self"
}
_PRECISIONS = {Precision.FP32: "fp32", Precision.AMP_BF16: "bf16", Precision.AMP_FP16: "fp16"}
_DEVICES = ("cpu", "gpu")

# Arguments that must keep Composer's default: the reason, and the alternative in eventloop.
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
# Arguments of Composer's own checkpoint files, which are written in addition if one of them is set.
_OF_FILES = ("save_filename", "save_latest_filename", "save_weights_only", "save_ignore_keys")


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with their defaults.

    Raises:
        TypeError: Composer's trainer has no such argument, or the model is missing.
        SettingError: an argument can't be honoured.
    """
    for name in arguments:
        if name not in DEFAULTS:
            raise TypeError(f"Composer's Trainer has no argument {name!r}{closest(name, DEFAULTS)}")
    if "model" not in arguments:
        raise TypeError("Trainer needs a model: Trainer(model=...)")
    for name, (reason, fix) in REFUSED.items():
        value = arguments.get(name, DEFAULTS[name])
        if value != DEFAULTS[name]:
            raise SettingError(f"{name}={value!r} can't be honoured: {reason}", fix=fix)
    if (names := named_files(arguments)) and arguments.get("save_folder") is None:
        raise SettingError(
            f"{names[0]}={arguments[names[0]]!r} has no effect without a folder",
            fix="give save_folder='runs/mine'",
        )
    return {**DEFAULTS, **arguments}


def named_files(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that request Composer's own files."""
    return [
        name
        for name in _OF_FILES
        if arguments.get(name, DEFAULTS[name]) != DEFAULTS[name]
        and (name, arguments[name]) != ("save_latest_filename", None)
    ]


def saver_of(arguments: Mapping[str, Any]) -> CheckpointSaver | None:
    """Returns the callback that writes Composer's own files into `save_folder`; None without a folder."""
    if arguments.get("save_folder") is None:
        return None
    value = {**DEFAULTS, **arguments}
    return CheckpointSaver(
        folder=value["save_folder"],
        filename=value["save_filename"],
        latest_filename=value["save_latest_filename"],
        save_interval=value["save_interval"],
        weights_only=value["save_weights_only"],
        ignore_keys=value["save_ignore_keys"],
        num_checkpoints_to_keep=value["save_num_checkpoints_to_keep"],
        overwrite=True,  # eventloop already refuses a folder with another run
    )


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the eventloop settings for arguments of Composer's trainer.

    Raises:
        SettingError: a value has no counterpart here.
    """
    device = _device(arguments["device"])
    settings: dict[str, Any] = {
        # Each evaluator has its own interval.
        "eval_interval": None,
        "device": device,
        "precision": _precision(arguments["precision"], device),
        "deterministic": arguments["deterministic_mode"],
        # Random transforms draw from the global generators, as under Composer.
        "seed_samples": False,
        # Composer continues after a bad loss; its callback NaNMonitor stops a run.
        "on_bad_loss": "ignore",
        **_saving(arguments),
    }
    if arguments["seed"] is not None:
        settings["seed"] = arguments["seed"]
    if (size := _microbatch_size(arguments["device_train_microbatch_size"])) is not None:
        settings["microbatch_size"] = size
    if arguments["compile_config"] is not None:
        settings["compile"] = arguments["compile_config"] or True
    if arguments["max_duration"] is not None:
        duration = time_of("max_duration", arguments["max_duration"])
        ratio = arguments["scale_schedule_ratio"]
        settings["max_duration"] = duration if ratio == 1.0 else scaled(duration, ratio)
    return settings


def time_of(name: str, value: int | str | ComposerTime) -> Time:
    """Converts a time of Composer, possibly a number of epochs or a text, to eventloop's.

    Raises:
        SettingError: its unit doesn't exist in eventloop.
    """
    try:
        return to_ours(ensure_time(value, "ep"))
    except ValueError as error:
        raise SettingError(
            f"{name}: {error}", fix="write it in epochs or batches: '10ep', '100ba'"
        ) from None


def scaled(time: Time, ratio: float) -> Time:
    """Returns a duration scaled by Composer's `scale_schedule_ratio`.

    Raises:
        SettingError: the scaled duration is 0.
    """
    value = int(time.value * ratio)
    if value < 1:
        raise SettingError(
            f"scale_schedule_ratio={ratio} leaves nothing of {time}", fix="give a larger ratio"
        )
    return Time(value, time.unit)


def _microbatch_size(size: Any) -> Any:
    if isinstance(size, float):
        raise SettingError(
            f"device_train_microbatch_size={size} is a part of a sample, for sequence parallelism",
            fix="give a number of samples, or 'auto'",
        )
    return size


def _device(device: str | Device | None) -> str:
    name = device.name if isinstance(device, Device) else device
    if name is None:
        return "auto"
    if name not in _DEVICES:
        raise SettingError(f"device={name!r} isn't one of cpu, gpu", fix="give one of them")
    import torch

    current_device = torch.accelerator.current_accelerator(check_available=True)
    return current_device.type if name == "gpu" and current_device is not None else name


def _precision(precision_or_name: str | Precision | None, device: str) -> str:
    if precision_or_name is None:
        import torch

        is_gpu = device != "cpu" and torch.accelerator.is_available()
        return "fp16" if is_gpu else "fp32"
    precision = Precision(precision_or_name)
    if precision not in _PRECISIONS:
        raise SettingError(
            f"precision={precision.value!r} isn't one of fp32, amp_bf16, amp_fp16",
            fix="give precision='amp_bf16'",
        )
    return _PRECISIONS[precision]


def _saving(arguments: Mapping[str, Any]) -> dict[str, Any]:
    folder = arguments["save_folder"]
    load_path = arguments["load_path"]
    if folder is None and arguments["autoresume"]:
        raise SettingError(
            "autoresume=True has no folder to look in", fix="give save_folder='runs/mine'"
        )
    settings: dict[str, Any] = {}
    if folder is not None:
        if isinstance(arguments["save_interval"], Callable):  # type: ignore[arg-type]
            raise SettingError(
                "save_interval is a function, which eventloop doesn't ask",
                fix="give a time, '100ba', or a callback that calls "
                "trainer.eventloop.state.request_checkpoint()",
            )
        keep = arguments["save_num_checkpoints_to_keep"]
        if keep == 0:
            raise SettingError(
                "save_num_checkpoints_to_keep=0 keeps nothing to go on from",
                fix="give -1 for all, or 1; with run_dir='s3://...' they are kept only there",
            )
        settings["run_dir"] = folder
        settings["resume"] = "auto" if arguments["autoresume"] else "never"
        settings["checkpoint_interval"] = time_of("save_interval", arguments["save_interval"])
        settings["checkpoint_keep"] = None if keep < 0 else keep
    if load_path is not None and not arguments["load_weights_only"]:
        if str(load_path).endswith(".pt"):
            raise SettingError(
                f"load_path={str(load_path)!r} is a checkpoint of Composer's, which has no place in the "
                "data and no generators to go on from exactly",
                fix="give load_weights_only=True for its weights, or a checkpoint of eventloop",
            )
        settings["resume"] = str(load_path)
    return settings
