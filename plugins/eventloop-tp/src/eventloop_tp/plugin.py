"""The plugin: divides the layers over ranks, and does the parts of training that this changes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import SettingError, State, TaskError, hookimpl
from eventloop.toolbox import Layout, as_option, as_set, counted, map_tensors, sharded, switch_off
from eventloop_tp.plans import (
    COLWISE,
    DROPOUT,
    GATHERED,
    ROWWISE,
    Placed,
    missing,
    plan_of,
    resolved,
)

# Their steps flatten DTensors, or write values of other placements into them (torch 2.13).
_CANT_STEP = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop)


class Tp:
    """Divides the matrices of each layer over ranks that follow each other and share their samples.

    The trained weights equal those of one process. With eventloop-fsdp each rank's part is sharded
    over the ranks with other samples.

    Args:
        size: over how many ranks each layer is divided; it has to divide the number of ranks, the
            divided dimensions, and the number of attention heads. 1: no layer is divided.
        plan: patterns of the names of modules, `blocks.*.mlp.up`, each with its style: colwise, rowwise,
            colwise_gather_output, sequence, replicated, replicated_summed, dropout. Not set: the
            model's own, its attribute `tp_plan`, which models of transformers have.
        sequence: whether the modules between the divided layers, norms and dropout, are divided along the
            sequence, dimension 1 of a batch; the plan has to name every module with parameters.
        loss_parallel: whether the outputs of the last layer stay divided for the loss, which is
            `torch.nn.functional.cross_entropy`.

    Raises:
        TypeError: `size` is not a number of ranks, or the plan not a mapping.
        ValueError: it is out of range.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; sequence: Korthikanti et al. 2022, arXiv:2205.05198.
    """

    def __init__(
        self,
        *,
        size: int = 1,
        plan: dict[str, str] | None = None,
        sequence: bool = False,
        loss_parallel: bool = False,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size={size!r} is not a number of ranks")
        if size < 1:
            raise ValueError(f"size={size!r} isn't a number of ranks; 2 is two of them")
        if plan is not None and not isinstance(plan, dict):
            raise TypeError(f"plan={plan!r} is not a mapping of names to styles")
        self.size = size
        self.plan = plan
        self.sequence = sequence
        self.loss_parallel = loss_parallel
        self._note = ""
        self._is_dividing = False

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: there is no other rank to divide layers over; None if it can."""
        if state.world_size == 1:
            return "one process alone has no rank to share layers with; `--nproc 2` starts two"
        if self.size == 1:
            return "tp.size is 1; " + as_option("tp", size=2) + " divides each layer over two ranks"
        return None

    @hookimpl(wrapper=True)
    def build_mesh(self, state: State) -> Generator[None, Layout, Layout]:
        """Has ranks that follow each other share their samples."""
        layout = yield
        return layout if self.unsuitable(state) else layout.sharing("tp", self.size)

    @hookimpl(wrapper=True)
    def wrap_model(self, state: State) -> Generator[None, nn.Module, nn.Module]:
        """Divides the model, in place; names and calls stay."""
        if self.unsuitable(state):
            return (yield)
        from eventloop_tp.styles import divide  # it takes a second to import

        self._require_usable(state)
        own_plan = plan_of(state.model)
        plan = own_plan if self.plan is None else self.plan
        if not plan:
            raise SettingError(
                f"plan is not set, and {type(state.model).__name__} has no tp_plan of its own",
                fix="say how layers are divided, "
                + as_option("tp", plan={"blocks.*.up": COLWISE, "blocks.*.down": ROWWISE}),
            )
        placed = resolved(state.model, plan, self.size, is_own=self.plan is None)
        placed += self._dropouts(state.model, placed)
        if self.sequence and (left_out := missing(state.model, placed)):
            raise SettingError(
                f"sequence: the plan leaves out {', '.join(left_out[:5])}, {counted(len(left_out), 'module')} "
                "with parameters",
                fix="give norms the style sequence, embeddings and the last layer theirs, and "
                "what computes on whole sequences `replicated`",
            )
        assert state.mesh is not None
        keeps = self._last(placed) if self.loss_parallel else None
        divide(state.model, placed, state.mesh["tp"], sequence=self.sequence, keeps=keeps)
        self._is_dividing = True
        self._note = self._about(placed)
        return (yield)

    @hookimpl
    def header_note(self) -> str:
        """Returns which layers are divided."""
        return self._note

    @hookimpl(wrapper=True)
    def build_optimizers(
        self, state: State
    ) -> Generator[None, dict[str, Optimizer], dict[str, Optimizer]]:
        """Refuses optimizers that can't step shards."""
        optimizers = yield
        for name, optimizer in optimizers.items():
            if self._is_dividing and isinstance(optimizer, _CANT_STEP):
                raise SettingError(
                    f"the optimizer {name!r} is {type(optimizer).__name__}, which can't step the "
                    "shards of tp",
                    fix="take another, AdamW say, or train without: " + switch_off("tp"),
                )
        return optimizers

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """Lets a model that computes its own loss do so over divided logits."""
        with self._divided_loss():
            return (yield)

    @hookimpl(wrapper=True)
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Computes the loss over divided logits."""
        try:
            with self._divided_loss():
                loss = yield
        except (RuntimeError, NotImplementedError) as error:
            if not (self.loss_parallel and "DTensor" in str(error)):
                raise
            raise TaskError(
                "loss_parallel: the loss does something with divided logits that torch can't",
                fix="give cross_entropy as it is, without label smoothing or weights, or leave "
                "tp.loss_parallel out",
            ) from error
        sharded_loss = sharded(loss)
        return loss if sharded_loss is None else sharded_loss.full_tensor()

    @hookimpl(wrapper=True)
    def backward(self, state: State) -> Generator[None, bool, bool]:
        """Sums, after the last microbatch of a batch, the partial gradients of parameters that all ranks hold."""
        with self._divided_loss():
            is_done = yield
        if self._is_dividing and state.microbatch_idx == state.num_microbatches - 1:
            from eventloop_tp.styles import add_up_gradients

            add_up_gradients([*state.model.parameters()])
        return is_done

    @hookimpl(wrapper=True)
    def eval_forward(self, state: State) -> Generator[None, Any, Any]:
        """Gathers the outputs, which stay divided for the loss."""
        return _whole((yield)) if self.loss_parallel else (yield)

    @hookimpl(wrapper=True)
    def predict_forward(self, state: State) -> Generator[None, Any, Any]:
        """Gathers the outputs, which stay divided for the loss."""
        return _whole((yield)) if self.loss_parallel else (yield)

    def _divided_loss(self) -> AbstractContextManager[Any]:
        if not (self.loss_parallel and self._is_dividing):
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: AbstractContextManager[Any] = loss_parallel()
        return context

    def _require_usable(self, state: State) -> None:
        if state.settings.microbatch_size == "auto":
            raise SettingError(
                "microbatch_size='auto' isn't possible with tp: a rank that runs out of memory would "
                "leave those that share its layers waiting",
                fix="give a number, " + as_set(microbatch_size=16) + ", or " + switch_off("tp"),
            )
        if state.settings.sync_batch_norm:
            raise SettingError(
                "sync_batch_norm isn't possible with tp: it takes plain tensors, and tp makes others of "
                "what isn't divided",
                fix="leave sync_batch_norm out, or " + switch_off("tp"),
            )
        if state.settings.compile:
            raise SettingError(
                "compile isn't possible with tp: its layers change what they are while they compute",
                fix="leave compile out, or " + switch_off("tp"),
            )
        if self.sequence and any(
            cls.__module__.startswith("transformers.") for cls in type(state.model).__mro__
        ):
            raise SettingError(
                f"sequence isn't possible with {type(state.model).__name__}: models of transformers take "
                "the length of a sequence from what is divided then",
                fix="leave tp.sequence out",
            )
        if any(param.is_meta for param in state.model.parameters()):
            raise SettingError(
                "fsdp.meta isn't possible with tp, which divides weights that are there",
                fix="leave fsdp.meta out, or " + switch_off("tp"),
            )

    def _dropouts(self, model: nn.Module, placed: list[Placed]) -> list[Placed]:
        """Returns the dropouts between divided layers: with `sequence` all of them are."""
        planned = {id(entry.module) for entry in placed}
        kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
        return [
            Placed(name, module, DROPOUT)
            for name, module in model.named_modules()
            if self.sequence and isinstance(module, kinds) and id(module) not in planned
        ]

    def _last(self, placed: list[Placed]) -> str:
        last = [
            entry.name
            for entry in placed
            if entry.style == GATHERED and isinstance(entry.module, nn.Linear)
        ]
        if not last:
            raise SettingError(
                "loss_parallel: the plan has no layer that is colwise_gather_output",
                fix="give the last layer this style, or leave loss_parallel out",
            )
        return last[-1]

    def _about(self, placed: list[Placed]) -> str:
        divided = [entry for entry in placed if entry.style in (COLWISE, GATHERED, ROWWISE)]
        with_own_draws = [entry for entry in placed if entry.style == DROPOUT]
        text = f"{counted(len(divided), 'layer')} divided over {self.size} ranks"
        text += ", sequences too" if self.sequence else ""
        if with_own_draws:
            return f"{text}; {counted(len(with_own_draws), 'module')} draw other random numbers on each"
        return f"{text}; all draw the same random numbers"


def _whole(outputs: Any) -> Any:
    def of(tensor: Tensor) -> Tensor:
        divided = sharded(tensor)
        return tensor if divided is None else divided.full_tensor()

    if not isinstance(outputs, dict):
        return map_tensors(of, outputs)
    # in place: an output of transformers is a mapping whose class would be lost
    for name, value in outputs.items():
        outputs[name] = map_tensors(of, value)
    return outputs
