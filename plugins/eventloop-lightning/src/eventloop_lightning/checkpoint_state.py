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
# What the logger connector knows in mid-epoch (lightning 2.6.6).
_NUMBERS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")


class Keeping:
    """Takes Lightning's trainer apart for a checkpoint, and puts it together again.

    Args:
        trainer: Lightning's.
        leave_out: keys of a checkpoint that only Lightning's files have, such as objects that
            `on_save_checkpoint` adds.

    Attributes:
        is_loading: whether weights and optimizers wait for what the callbacks say.
        in_file: what a file of Lightning's has, whose hooks aren't called for it again; else None.
        files: what Lightning's loggers and callbacks have written.
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
        """Returns Lightning's checkpoint without weights and optimizers, plus what it lacks.

        It lacks what is under way: sums of `self.log`, accumulated gradients, what is frozen.
        """
        trainer = self._trainer
        module = self._trainer.lightning_module
        dumped = self._dumped()
        left_out = {*ELSEWHERE, *self._leave_out}
        saved = {key: one for key, one in dumped.items() if key not in left_out}
        if self.in_file is None:  # a file of Lightning's is pickled
            self._require_plain(saved)
        if "state_dict" in dumped and not _is_of(module, dumped["state_dict"]):
            saved["state_dict"] = dumped["state_dict"]  # a hook has put other weights there
        connector = trainer._logger_connector
        saved["numbers"] = {name: dict(getattr(connector, name)) for name in _NUMBERS}
        saved["place"] = {name: getattr(connector, name) for name in _PLACE}
        saved["results"] = trainer.fit_loop.epoch_loop._results.state_dict()
        params = module.named_parameters()
        saved["frozen"] = [name for name, one in params if not one.requires_grad]
        saved["in_eval_mode"] = [name for name, one in module.named_modules() if not one.training]
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
            CheckpointError: a hook has put an object there.
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
            CheckpointError: there is one; not at the first checkpoint, which may be hours away.
        """
        for one in [*self._trainer.callbacks, self._trainer.datamodule]:
            if one is not None:
                flatten({"state_dict": one.state_dict()}, type(one).__qualname__)

    def _dumped(self) -> dict[str, Any]:
        """Returns a checkpoint of Lightning's; `on_save_checkpoint` is called once for each file."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        precision = trainer.precision_plugin
        if self.in_file is None:
            dumped: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
            return dumped
        now = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": connector._get_loops_state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        }
        for one in (precision, trainer.datamodule):
            if one is not None and (found := one.state_dict()):
                now[type(one).__qualname__] = found
        return {**self.in_file, **now}

    def _gradients(self) -> dict[str, Tensor]:
        """Returns gradients to which the next batch adds its own."""
        trainer = self._trainer
        module = self._trainer.lightning_module
        if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
            return {}
        params = module.named_parameters()
        return {name: one.grad for name, one in params if one.grad is not None}

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keeps what `take` returned until everything is built."""
        self._loaded = dict(state)

    def keep_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Keeps the weights until the module's `on_load_checkpoint` has been called."""
        self._weights = weights

    def keep_optimizers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps the optimizers' states until callbacks have made the groups that they had."""
        self._optimizers = list(states.values())

    def shown(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Returns the positions of those that share no parameter with an earlier one.

        In manual optimization a module may move a parameter by two; eventloop's loop, which makes none
        of these steps, wants each to have parameters of its own. The others' states are kept here.
        """
        held: set[int] = set()
        shown: set[int] = set()
        for idx, one in enumerate(optimizers):
            params = {id(param) for group in one.param_groups for param in group["params"]}
            if not params & held:
                shown.add(idx)
                held |= params
        self._hidden = [idx for idx in range(len(optimizers)) if idx not in shown]
        return shown

    def _all_optimizers(self) -> list[Mapping[str, Any]]:
        states = list(self._optimizers)
        for idx, one in self._loaded["hidden_optimizers"].items():
            states.insert(int(idx), one)
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
        """Takes back what was written after the checkpoint, now that the run's lock is taken."""
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
            loop.on_iteration_done()  # it goes on where it was: nothing is begun again
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
        for name, one in module.named_modules():
            one.training = name not in in_eval
        self._optimizers = []

    def put_epoch(self) -> None:
        """Restores what a callback set up at the start of the resumed epoch."""
        trainer = self._trainer
        module = self._trainer.lightning_module
        averaging = [one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging)]
        for one in averaging:
            one.on_train_epoch_start(trainer, module)
        if averaging and self._weights:
            # It may have moved the average into the module, and begun its batch norms anew.
            module.load_state_dict(self._weights)
        self._weights = {}


def _is_of(module: LightningModule, weights: Mapping[str, Any]) -> bool:
    """Returns whether these are the module's own weights, in their own memory."""
    own = module.state_dict()
    return own.keys() == weights.keys() and all(
        isinstance(one, Tensor) and one.data_ptr() == own[name].data_ptr()
        for name, one in weights.items()
    )


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for one in vars(loop).values():
        if isinstance(one, _Loop):
            yield from _loops(one)
