"""The plugin: outputs of all microbatches, the loss over them, and its gradients one by one."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError, State, hookimpl
from eventloop.devices import kind_of
from eventloop.toolbox import (
    Microbatches,
    describe,
    evaluation_mode,
    map_tensors,
    num_samples,
    sharded,
    split,
)


class GradCache:
    """Computes a loss over all pairs of a batch in microbatches: the gradient is exact.

    Each batch makes two passes. The first computes the outputs of all microbatches without gradients,
    joins them, and has the task's loss of the whole batch computed: it gives the gradient of each
    output. The second computes each microbatch again, with the same random draws, and sends its
    outputs' gradients back. So the memory for a microbatch is enough, and a batch can have as many
    negatives as its outputs have room for.

    Args:
        microbatch_size: samples that the model computes at once.

    Raises:
        ValueError: the size isn't an int of 1 or more.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    arXiv:2101.06983.
    """

    loss_splits = False

    def __init__(self, *, microbatch_size: int) -> None:
        if type(microbatch_size) is not int or microbatch_size < 1:
            raise ValueError(f"microbatch_size={microbatch_size!r} is not an int of 1 or more")
        self.microbatch_size = microbatch_size
        self._loss: Tensor | None = None
        self._num_samples = 0
        self._has_checked = False
        self._draws: list[_Draws] = []
        self._grads: list[list[Tensor | None]] = []

    @hookimpl
    def header_note(self) -> str:
        """Returns over how many samples the loss is, and how many pass through the model at once."""
        return f"the loss is that of the whole batch, in microbatches of {self.microbatch_size}"

    @hookimpl
    def split_batch(self, state: State) -> Sequence[Any]:
        """Returns the microbatches, once the gradients of their outputs are known."""
        if state.settings.microbatch_size is not None:
            raise PluginError(
                f"microbatch_size is {state.settings.microbatch_size}, and gradcache has its own",
                fix="unset microbatch_size",
            )
        if isinstance(state.batch, Microbatches):
            raise PluginError(
                f"gradcache needs the targets of a batch in one piece, not {describe(state.batch)}",
                fix="leave `collated` out: gradcache splits the batch",
            )
        parts = split(state.batch, self.microbatch_size)
        _require_same_number(state, len(parts))
        if not self._has_checked:  # once: it waits for the device
            self._check(state, parts)
        outputs = self._outputs_of(state, parts)
        found = [_tensors(one) for one in outputs]
        sizes = [num_samples(part) for part in parts]
        self._num_samples = sum(sizes)
        joined = [_joined(one, sizes) for one in zip(*found, strict=True)]
        state.outputs = _rebuilt(outputs[0], joined)
        loss = state.call("loss")
        state.outputs = None
        wanted = [one for one in joined if one.requires_grad]
        # Small gradients would be 0 in fp16.
        scale = 1024.0 if state.precision.name == "fp16" else 1.0
        grads = iter(torch.autograd.grad(loss * scale, wanted, allow_unused=True))
        each = [next(grads) if one.requires_grad else None for one in joined]
        shares = (
            _shares(None if grad is None else grad / scale, several, sizes)
            for grad, several in zip(each, zip(*found, strict=True), strict=True)
        )
        self._grads = [[*one] for one in zip(*shares, strict=True)]
        self._loss = loss.detach()
        return parts

    @hookimpl(conditional=True, tryfirst=True)
    def weigh_microbatch(self, state: State) -> int | None:
        """Returns the number of samples, whatever the task weighs by: the loss is one of pairs."""
        return None if state.microbatch is None else num_samples(state.microbatch)

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """Has the second pass draw what the first drew."""
        if state.microbatch is not None and self._loss is not None:
            self._draws[state.microbatch_idx].put_back()
        return (yield)

    @hookimpl(conditional=True, tryfirst=True)
    def loss(self, state: State) -> Tensor | None:
        """Returns the loss of the batch, whose gradient is that of the microbatch's outputs."""
        if state.microbatch is None or self._loss is None:
            return None
        grads = self._grads[state.microbatch_idx]
        outputs = _tensors(state.outputs)
        terms = [
            (one * grad).sum() for one, grad in zip(outputs, grads, strict=True) if grad is not None
        ]
        # The loop weighs by the microbatch's share of the samples; these gradients are whole.
        share = self._num_samples / num_samples(state.microbatch)
        total = torch.stack([one.float() for one in terms]).sum() * share
        return self._loss.float() + total - total.detach()

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Lets the gradients go."""
        self._grads = []
        self._draws = []
        self._loss = None

    def _check(self, state: State, parts: Sequence[Any]) -> None:
        """Computes two microbatches, and one that is smaller, to see whether outputs can be joined."""
        if len(parts) == 1:
            return
        size = num_samples(parts[0])
        tried = [*parts[:2], *([split(parts[0], size - 1)[0]] if size > 1 else [])]
        batch = state.batch
        with evaluation_mode(state):  # without draws; it leaves the State without a batch
            outputs = self._outputs_of(state, tried)
        state.batch = batch
        found = [_tensors(one) for one in outputs]
        _require_joinable(outputs[0], found, [num_samples(one) for one in tried])
        self._has_checked = True

    def _outputs_of(self, state: State, parts: Sequence[Any]) -> list[Any]:
        """Computes each microbatch without gradients; leaves buffers as they were."""
        batch = state.batch
        outputs = []
        buffers = [(one, one.clone()) for one in state.model.buffers()]
        self._draws = []
        self._loss = None
        with torch.no_grad():
            for part in parts:
                state.batch = part
                self._draws.append(_Draws(state.device))
                outputs.append(state.call("forward"))
            for buffer, value in buffers:
                buffer.copy_(value)
        state.batch = batch
        return outputs


def _require_same_number(state: State, number: int) -> None:
    """Refuses a sharded model whose ranks have other numbers of microbatches: they would wait for good."""
    if state.even_batches or not any(sharded(one) is not None for one in state.model.parameters()):
        return
    numbers = state.all_gather(number)
    if len({*numbers}) > 1:
        raise PluginError(
            f"the ranks have {', '.join(map(str, numbers))} microbatches, but every pass over a "
            "sharded model takes all ranks",
            fix="give all ranks batches of one size",
        )


class _Draws:
    """The state of torch's generators before a pass."""

    def __init__(self, device: torch.device) -> None:
        self._kind = kind_of(device)
        self._host = torch.get_rng_state()
        self._own = self._kind.get_rng_state()

    def put_back(self) -> None:
        torch.set_rng_state(self._host)
        if self._own is not None:
            self._kind.set_rng_state(self._own)


def _tensors(outputs: Any) -> list[Tensor]:
    """Returns the tensors of outputs, in order.

    Raises:
        PluginError: they hold something else that is on a device.
    """
    found: list[Any] = []
    map_tensors(found.append, outputs)
    for one in found:
        if not isinstance(one, Tensor):
            raise PluginError(
                f"gradcache can't join outputs that hold a {type(one).__name__}",
                fix="let forward return tensors, or tuples, lists or mappings of them",
            )
    return found


def _require_joinable(
    outputs: Any, found: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> None:
    """Checks that the outputs of microbatches can be joined to those of the batch.

    Args:
        outputs: of the first microbatch.
        found: the tensors of each microbatch's outputs.
        sizes: samples of the microbatches.

    Raises:
        PluginError: they hold a loss, or a tensor that is neither a row for each sample nor the same
            for all microbatches.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if own is not None:
        raise PluginError(
            "gradcache can't join the outputs: the model computes a loss of its own, of each microbatch",
            fix="let the model return embeddings, and give Task(loss=...), which sees those of all samples",
        )
    for idx, several in enumerate(zip(*found, strict=True)):
        shapes = [tuple(one.shape) for one in several]
        if _have_samples(several, sizes):
            is_right = len({shape[1:] for shape in shapes}) == 1
        else:
            is_right = all(torch.equal(one, several[0]) for one in several)
        if not is_right:
            listed = ", ".join(map(str, dict.fromkeys(shapes)))
            raise PluginError(
                f"gradcache can't join output {idx + 1}: of microbatches of {max(sizes)} samples it has "
                f"the shapes {listed}, and isn't the same for all of them",
                fix="let the model return tensors with a row for each sample, and compute what compares "
                "samples in Task(loss=...)",
            )


def _joined(several: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Joins an output of all microbatches along its samples; one without samples is that of the first."""
    first = several[0]
    if _have_samples(several, sizes):
        first = torch.cat([*several])
    if not first.is_floating_point():
        return first.detach()
    return first.detach().float().requires_grad_()


def _shares(
    grad: Tensor | None, several: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Returns each microbatch's share of a gradient; of an output without samples one of equal ones."""
    if grad is None:
        return [None] * len(sizes)
    if _have_samples(several, sizes):
        return [*torch.split(grad, [*sizes])]
    return [grad / len(sizes)] * len(sizes)


def _have_samples(several: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether an output has a row for each sample, in all microbatches."""
    return all(one.ndim > 0 and len(one) == size for one, size in zip(several, sizes, strict=True))


def _rebuilt(outputs: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns outputs of the same form with other tensors."""
    left = iter(tensors)
    made = map_tensors(lambda _: next(left), outputs)
    if isinstance(outputs, Mapping) and type(outputs) is not dict:  # of transformers
        form: Any = copy.copy(outputs)
        for name, one in made.items():
            form[name] = one
        return form
    return made
