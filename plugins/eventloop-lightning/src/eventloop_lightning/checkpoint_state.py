"""State of Lightning's trainer in checkpoints, saved and restored in Lightning's order."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from eventloop import CheckpointError
from eventloop.toolbox import flatten
from eventloop_lightning.logger_files import OwnFiles
from eventloop_lightning.self_log_results import counts_of, put_counts

# Parts of a checkpoint of Lightning's that ours has elsewhere, or that come with the task.
ELSEWHERE = (
    "state_dict",
    "optimizer_states",
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams_name",
    "hparams_type",
)
# State of the logger connector in the middle of an epoch (lightning 2.6.6).
_NUMBERS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")


class Keeping:
    """Saves the state of Lightning's trainer for a checkpoint, and restores it.

    Args:
        trainer: Lightning's trainer.
        leave_out: keys of a checkpoint that only Lightning's files have, such as objects that
            `on_save_checkpoint` adds.

    Attributes:
        is_loading: whether weights and optimizers wait until the callbacks' states are loaded.
        in_file: content of a file of Lightning's that is being completed, whose hooks aren't called
            again; else None.
        files: files written by Lightning's loggers and callbacks.
    """

    def __init__(self, trainer: Any, leave_out: Collection[str] = ()) -> None:
        self._trainer = trainer
        self._leave_out = frozenset(leave_out)
        self._loaded: dict[str, Any] = {}
        self._weights: Mapping[str, Tensor] = {}
        self._optimizers: list[Mapping[str, Any]] = []
        self._hidden: list[int] = []
        self.is_loading = False
        self.in_file: Mapping[str, Any] | None = None
        self.files = OwnFiles(trainer)

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return bool(self._loaded)

    def take(self) -> dict[str, Any]:
        """Returns Lightning's checkpoint without weights and optimizers, plus the state that it lacks.

        It lacks the state in the middle of a batch or epoch: sums of `self.log`, accumulated gradients,
        frozen parameters.
        """
        trainer = self._trainer
        module = self._trainer.lightning_module
        dumped = self._dumped()
        left_out = {*ELSEWHERE, *self._leave_out}
        saved = {key: value for key, value in dumped.items() if key not in left_out}
        if self.in_file is None:  # Lightning's own files are pickled
            self._require_plain(saved)
        if "state_dict" in dumped and not _is_of(module, dumped["state_dict"]):
            saved["state_dict"] = dumped["state_dict"]  # a hook replaced the weights
        connector = trainer._logger_connector
        saved["numbers"] = {name: dict(getattr(connector, name)) for name in _NUMBERS}
        saved["place"] = {name: getattr(connector, name) for name in _PLACE}
        saved["results"] = trainer.fit_loop.epoch_loop._results.state_dict()
        params = module.named_parameters()
        saved["frozen"] = [name for name, param in params if not param.requires_grad]
        saved["in_eval_mode"] = [
            name for name, submodule in module.named_modules() if not submodule.training
        ]
        saved["gradients"] = self._gradients()
        saved["counts"] = counts_of(module)
        hidden = {str(idx): trainer.optimizers[idx].state_dict() for idx in self._hidden}
        saved["hidden_optimizers"] = hidden
        saved["first"] = list(trainer.fit_loop.first)
        saved["files"] = self.files.state_dict()
        return saved

    def _require_plain(self, saved: Mapping[str, Any]) -> None:
        """Refuses entries that the run's checkpoints can't hold, with how to leave them out.

        Raises:
            CheckpointError: a hook added such an object.
        """
        for key, value in saved.items():
            try:
                flatten({key: value}, "checkpoint")
            except CheckpointError as error:
                keys = sorted({*self._leave_out, key})
                raise CheckpointError(
                    error.what,
                    by=f"on_save_checkpoint of {type(self._trainer.lightning_module).__name__}, "
                    "or of a callback",
                    fix=f"leave it out of the run's checkpoints, `Trainer(leave_out={keys!r})` or, for the "
                    f"command, {json.dumps(keys)} as the task's option leave-out: Lightning's files have "
                    "it all the same, and on_load_checkpoint doesn't find it in a run that is resumed",
                ) from error

    def require_savable(self) -> None:
        """Refuses states of callbacks and data module that the run's checkpoints couldn't hold.

        Raises:
            CheckpointError: a state can't be saved; raised now, as the first checkpoint may be hours away.
        """
        for owner in [*self._trainer.callbacks, self._trainer.datamodule]:
            if owner is not None:
                flatten({"state_dict": owner.state_dict()}, type(owner).__qualname__)

    def _dumped(self) -> dict[str, Any]:
        """Returns a checkpoint of Lightning's; `on_save_checkpoint` is called once for each file."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        precision = trainer.precision_plugin
        if self.in_file is None:
            dumped: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
            return dumped
        current = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": connector._get_loops_state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [
                config.scheduler.state_dict() for config in trainer.lr_scheduler_configs
            ],
        }
        for owner in (precision, trainer.datamodule):
            if owner is not None and (owner_state := owner.state_dict()):
                current[type(owner).__qualname__] = owner_state
        return {**self.in_file, **current}

    def _gradients(self) -> dict[str, Tensor]:
        """Returns accumulated gradients, to which the next batch adds."""
        trainer = self._trainer
        module = self._trainer.lightning_module
        if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
            return {}
        params = module.named_parameters()
        return {name: param.grad for name, param in params if param.grad is not None}

    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores a state from `take` until everything is built."""
        self._loaded = dict(state)

    def keep_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Keeps the weights until the module's `on_load_checkpoint` has been called."""
        self._weights = weights

    def keep_optimizers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps the optimizers' states until callbacks have recreated their parameter groups."""
        self._optimizers = list(states.values())

    def shown(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Returns the positions of optimizers that share no parameter with an earlier optimizer.

        With manual optimization a module may update a parameter by two optimizers. eventloop's loop, which
        makes none of these steps, requires disjoint parameters, so the other optimizers are saved here.
        """
        covered_params: set[int] = set()
        shown: set[int] = set()
        for idx, optimizer in enumerate(optimizers):
            params = {id(param) for group in optimizer.param_groups for param in group["params"]}
            if not params & covered_params:
                shown.add(idx)
                covered_params |= params
        self._hidden = [idx for idx in range(len(optimizers)) if idx not in shown]
        return shown

    def _all_optimizers(self) -> list[Mapping[str, Any]]:
        states = list(self._optimizers)
        for idx, optimizer_state in self._loaded["hidden_optimizers"].items():
            states.insert(int(idx), optimizer_state)
        return states

    def put_modules(self) -> None:
        """Restores module, data module and callbacks through Lightning's checkpoint connector."""
        self.is_loading = False
        if not self._loaded:
            return
        connector = self._trainer._checkpoint_connector
        ours = {"state_dict": dict(self._weights), "optimizer_states": self._all_optimizers()}
        connector._loaded_checkpoint = {**ours, **self._loaded}
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()

    def put_files(self) -> None:
        """Discards rows and files written after the checkpoint; the run's lock is held by now."""
        self.files.begin(self._loaded.get("files", {}))

    def put_training(self) -> None:
        """Restores loops, optimizers and schedulers, after `on_fit_start`."""
        if not self._loaded:
            return
        trainer = self._trainer
        module = self._trainer.lightning_module
        trainer._checkpoint_connector.restore_training_state()
        trainer._checkpoint_connector._loaded_checkpoint = {}
        for loop in _loops(trainer.fit_loop):
            loop.on_iteration_done()  # marks it as under way, so that it doesn't start again
        connector = trainer._logger_connector
        for name, values in self._loaded["numbers"].items():
            setattr(connector, name, dict(values))
        for name, value in self._loaded["place"].items():
            setattr(connector, name, value)
        trainer.fit_loop.epoch_loop._results.load_state_dict(self._loaded["results"], module)
        put_counts(module, self._loaded["counts"])
        frozen = set(self._loaded["frozen"])
        in_eval = set(self._loaded["in_eval_mode"])
        gradients = self._loaded["gradients"]
        for name, param in module.named_parameters():
            param.requires_grad_(name not in frozen)
            param.grad = gradients[name].to(param.device) if name in gradients else None
        for name, submodule in module.named_modules():
            submodule.training = name not in in_eval
        self._optimizers = []

    def put_epoch(self) -> None:
        """Restores the setup that weight averaging makes at the start of an epoch, for a resumed epoch."""
        trainer = self._trainer
        module = self._trainer.lightning_module
        averaging = [
            callback
            for callback in trainer.callbacks
            if isinstance(callback, StochasticWeightAveraging)
        ]
        for callback in averaging:
            callback.on_train_epoch_start(trainer, module)
        if averaging and self._weights:
            # The callback may have loaded the average into the module, and reset its batch norms.
            module.load_state_dict(self._weights)
        self._weights = {}


def _is_of(module: LightningModule, weights: Mapping[str, Any]) -> bool:
    """Whether these are the module's own weights, in the same memory."""
    module_weights = module.state_dict()
    if module_weights.keys() != weights.keys():
        return False
    return all(
        isinstance(tensor, Tensor) and tensor.data_ptr() == module_weights[name].data_ptr()
        for name, tensor in weights.items()
    )


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _loops(value)
