"""The plugin: replaces the task's optimizer by two."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from eventloop import PluginError, State, StepOutcome, hookimpl
from eventloop.toolbox import counted, sharded
from eventloop_muon.matrices import Weights, split
from eventloop_muon.whole import whole_matrices


class Muon:
    """Trains hidden matrices by Muon and all other weights by AdamW, whatever the task's optimizer.

    They are named "muon" and "adamw"; the task's schedule moves both rates in proportion.

    Args:
        lr: learning rate, more than 0. Muon's updates are scaled to the size of AdamW's, so both share
            this rate, and a good value for AdamW is a good start.
        adamw_lr: learning rate of AdamW's weights; not set: as `lr`.
        momentum: of Muon, in [0, 1).
        betas: of AdamW, each in [0, 1).
        weight_decay: of all weights but biases and gains.
        hidden: patterns of the names of the matrices that Muon takes, `blocks.*`; not set: all but
            embeddings and the first and the last layer.
        not_hidden: patterns of the names of matrices that AdamW takes all the same.

    Raises:
        TypeError: patterns are a text, not a list of such.
        ValueError: a number is out of range.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the scale of its updates:
    Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        hidden: list[str] | None = None,
        not_hidden: list[str] | None = None,
    ) -> None:
        for name, rate in (("lr", lr), ("adamw_lr", lr if adamw_lr is None else adamw_lr)):
            if not (rate > 0 and math.isfinite(rate)):
                raise ValueError(
                    f"{name}={rate!r} isn't a positive number; 1e-3 is torch's default"
                )
        for name, share in (("momentum", momentum), ("betas", betas[0]), ("betas", betas[1])):
            if not 0 <= share < 1:
                raise ValueError(f"{name}: {share!r} isn't in [0, 1)")
        if not (weight_decay >= 0 and math.isfinite(weight_decay)):
            raise ValueError(f"weight_decay={weight_decay!r} isn't 0 or more")
        for name, patterns in (("hidden", hidden), ("not_hidden", not_hidden)):
            if isinstance(patterns, str):
                raise TypeError(f"{name}={patterns!r} is not a list; write [{patterns!r}]")
        self.lr = lr
        self.adamw_lr = lr if adamw_lr is None else adamw_lr
        self.momentum = momentum
        self.betas = betas
        self.weight_decay = weight_decay
        self.hidden = hidden
        self.not_hidden = not_hidden or []
        self._note = ""
        self._is_asking = False
        self._of_task = list[str]()
        self._has_shards = False

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no matrices, or steps by other optimizers; None if it can."""
        owner = state.owner("train_batch")
        if owner != "core" and state.owner("optimizer_step") == owner:
            return (
                f"train_batch and optimizer_step are {owner}'s, which steps optimizers of its own; "
                "make torch.optim.Muon among them, in configure_optimizers() under Lightning, of "
                "the matrices, and AdamW of all else"
            )
        if len(self._of_task) > 1:
            return (
                f"train_batch is {owner}'s, which may ask for the task's optimizers by name, "
                f"{_named(self._of_task)}; make torch.optim.Muon among them, of the matrices, and "
                "AdamW of all else"
            )
        if not any(param.requires_grad for param in self._weights(state).hidden):
            if self.hidden is not None or self.not_hidden:
                return f"of hidden={self.hidden}, not_hidden={self.not_hidden} no matrix is trained"
            return "no matrix between the first and the last layer is trained"
        return None

    @hookimpl(wrapper=True, specname="build_optimizers")
    def ask_for_names(
        self, state: State
    ) -> Generator[None, dict[str, Optimizer], dict[str, Optimizer]]:
        """Sees which optimizers the task has, where an update may ask for them by name."""
        if state.owner("train_batch") == "core":
            return (yield)
        self._is_asking = True
        optimizers = yield
        self._is_asking = False
        self._of_task = list(optimizers)
        again: dict[str, Optimizer] = state.again()
        return again

    @hookimpl
    def header_note(self) -> str:
        """Returns which optimizer trains which weights."""
        return self._note

    @hookimpl(conditional=True)
    def build_optimizers(self, state: State) -> dict[str, Optimizer] | None:
        """Returns Muon and AdamW; nothing where the plugin is about to take no part."""
        if self._is_asking or self.unsuitable(state):
            return None
        hidden, wide, narrow = self._weights(state)
        self._note = f"Muon for {_counted(hidden)}, AdamW for {_counted(wide + narrow)}, "
        self._note += "instead of the task's optimizer"
        muon = optim.Muon(
            hidden,
            self.lr,
            self.weight_decay,
            self.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((wide, self.weight_decay), (narrow, 0.0))
            if params
        ]
        if not groups:
            return {"muon": muon}
        # Fused, it reads no step counter from the device, and needs no wait under fp16.
        return {"muon": muon, "adamw": optim.AdamW(groups, self.adamw_lr, self.betas, fused=True)}

    @hookimpl(wrapper=True)
    def optimizer_step(
        self,
        state: State,
        optimizers: Mapping[str, Optimizer],
        closure: Callable[[], Tensor],
    ) -> Generator[None, bool | StepOutcome, bool | StepOutcome]:
        """Computes the updates of sharded matrices from the whole matrices."""
        if not self._has_shards:
            return (yield)
        with whole_matrices():
            return (yield)

    @hookimpl
    def after_load(self, state: State) -> None:
        """Refuses schedules for only one of the two optimizers."""
        self._has_shards = any(sharded(param) is not None for param in state.model.parameters())
        scheduled = {name for pairs in state.schedulers.values() for name, _ in pairs}
        if scheduled and scheduled != set(state.optimizers):
            raise PluginError(
                f"the task has schedulers for {_named(scheduled)}, but muon's optimizers are "
                f"{_named(state.optimizers)}",
                fix="give one for all, Task(scheduler=schedules.cosine()), or one for each name",
            )

    def _weights(self, state: State) -> Weights:
        try:
            return split(state.model, self.hidden, self.not_hidden)
        except ValueError as error:
            raise PluginError(
                f"muon.hidden or muon.not_hidden: {error}",
                fix="""give patterns of these names: `--muon.hidden '["blocks.*"]'`""",
            ) from None


def _counted(params: Sequence[nn.Parameter]) -> str:
    numbers = sum(param.numel() for param in params)
    return f"{counted(len(params), 'weight')} ({counted(numbers, 'number')})"


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
