"""The plugin: outputs of all microbatches, the loss over them, and the gradient of each output."""

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
    joins them, and computes the task's loss of the whole batch, which gives the gradient of each
    output. The second computes each microbatch again, with the same random numbers, and passes these
    gradients backward. So the memory of one microbatch is enough, and the number of negatives is
    limited only by the memory for the outputs.

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
        microbatches = split(state.batch, self.microbatch_size)
        _require_same_number(state, len(microbatches))
        if not self._has_checked:  # once: it waits for the device
            self._check(state, microbatches)
        outputs = self._outputs_of(state, microbatches)
        tensors = [_tensors(microbatch_outputs) for microbatch_outputs in outputs]
        sizes = [num_samples(microbatch) for microbatch in microbatches]
        self._num_samples = sum(sizes)
        joined = [_joined(same_output, sizes) for same_output in zip(*tensors, strict=True)]
        state.outputs = _rebuilt(outputs[0], joined)
        loss = state.call("loss")
        state.outputs = None
        inputs = [tensor for tensor in joined if tensor.requires_grad]
        # Small gradients would be 0 in fp16: the loss is scaled, and the gradients scaled back below.
        scale = 1024.0 if state.precision.name == "fp16" else 1.0
        grads = iter(torch.autograd.grad(loss * scale, inputs, allow_unused=True))
        joined_grads = [next(grads) if tensor.requires_grad else None for tensor in joined]
        shares = (
            _shares(None if grad is None else grad / scale, same_output, sizes)
            for grad, same_output in zip(joined_grads, zip(*tensors, strict=True), strict=True)
        )
        self._grads = [[*microbatch_grads] for microbatch_grads in zip(*shares, strict=True)]
        self._loss = loss.detach()
        return microbatches

    @hookimpl(conditional=True, tryfirst=True)
    def weigh_microbatch(self, state: State) -> int | None:
        """Returns the number of samples, whatever the task weighs by: the loss is one of pairs."""
        return None if state.microbatch is None else num_samples(state.microbatch)

    @hookimpl(wrapper=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """Restores the generators, so that the second pass draws the numbers of the first."""
        if state.microbatch is not None and self._loss is not None:
            self._draws[state.microbatch_idx].put_back()
        return (yield)

    @hookimpl(conditional=True, tryfirst=True)
    def loss(self, state: State) -> Tensor | None:
        """Returns the loss of the batch, with the gradients of this microbatch's outputs."""
        if state.microbatch is None or self._loss is None:
            return None
        grads = self._grads[state.microbatch_idx]
        outputs = _tensors(state.outputs)
        terms = [
            (output * grad).sum()
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None
        ]
        # The loop weighs by the microbatch's share of the samples; these gradients are whole.
        share = self._num_samples / num_samples(state.microbatch)
        total = torch.stack([term.float() for term in terms]).sum() * share
        # The value is the batch's loss; only the gradients come from `total`, whose value cancels out.
        return self._loss.float() + total - total.detach()

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Lets the gradients go."""
        self._grads = []
        self._draws = []
        self._loss = None

    def _check(self, state: State, microbatches: Sequence[Any]) -> None:
        """Checks that outputs can be joined, with two microbatches and a smaller one."""
        if len(microbatches) == 1:
            return
        size = num_samples(microbatches[0])
        tried = [*microbatches[:2], *([split(microbatches[0], size - 1)[0]] if size > 1 else [])]
        batch = state.batch
        with evaluation_mode(state):  # without draws; it leaves the State without a batch
            outputs = self._outputs_of(state, tried)
        state.batch = batch
        tensors = [_tensors(microbatch_outputs) for microbatch_outputs in outputs]
        _require_joinable(outputs[0], tensors, [num_samples(microbatch) for microbatch in tried])
        self._has_checked = True

    def _outputs_of(self, state: State, microbatches: Sequence[Any]) -> list[Any]:
        """Computes each microbatch without gradients; leaves buffers as they were."""
        batch = state.batch
        outputs = []
        buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
        self._draws = []
        self._loss = None
        with torch.no_grad():
            for microbatch in microbatches:
                state.batch = microbatch
                self._draws.append(_Draws(state.device))
                outputs.append(state.call("forward"))
            for buffer, value in buffers:
                buffer.copy_(value)
        state.batch = batch
        return outputs


def _require_same_number(state: State, number: int) -> None:
    """Refuses a sharded model whose ranks have different numbers of microbatches: they would deadlock."""
    if state.even_batches or not any(
        sharded(param) is not None for param in state.model.parameters()
    ):
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
    leaves: list[Any] = []
    map_tensors(leaves.append, outputs)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise PluginError(
                f"gradcache can't join outputs that hold a {type(leaf).__name__}",
                fix="let forward return tensors, or tuples, lists or mappings of them",
            )
    return leaves


def _require_joinable(
    outputs: Any, tensors: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> None:
    """Checks that the outputs of microbatches can be joined into the outputs of the batch.

    Args:
        outputs: of the first microbatch.
        tensors: the tensors of each microbatch's outputs.
        sizes: samples of the microbatches.

    Raises:
        PluginError: they hold a loss, or a tensor that is neither a row for each sample nor the same
            for all microbatches.
    """
    own_loss = (
        outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    )
    if own_loss is not None:
        raise PluginError(
            "gradcache can't join the outputs: the model computes a loss of its own, of each microbatch",
            fix="let the model return embeddings, and give Task(loss=...), which sees those of all samples",
        )
    for idx, same_output in enumerate(zip(*tensors, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in same_output]
        if _have_samples(same_output, sizes):
            is_right = len({shape[1:] for shape in shapes}) == 1
        else:
            is_right = all(torch.equal(tensor, same_output[0]) for tensor in same_output)
        if not is_right:
            listed = ", ".join(map(str, dict.fromkeys(shapes)))
            raise PluginError(
                f"gradcache can't join output {idx + 1}: of microbatches of {max(sizes)} samples it has "
                f"the shapes {listed}, and isn't the same for all of them",
                fix="let the model return tensors with a row for each sample, and compute what compares "
                "samples in Task(loss=...)",
            )


def _joined(same_output: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Joins one output of all microbatches along its samples; without a sample dimension, takes the first."""
    output = same_output[0]
    if _have_samples(same_output, sizes):
        output = torch.cat([*same_output])
    if not output.is_floating_point():
        return output.detach()
    return output.detach().float().requires_grad_()


def _shares(
    grad: Tensor | None, same_output: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Returns each microbatch's share of a gradient; equal shares for an output without samples."""
    if grad is None:
        return [None] * len(sizes)
    if _have_samples(same_output, sizes):
        return [*torch.split(grad, [*sizes])]
    return [grad / len(sizes)] * len(sizes)


def _have_samples(same_output: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether an output has a row for each sample, in all microbatches."""
    return all(
        tensor.ndim > 0 and len(tensor) == size
        for tensor, size in zip(same_output, sizes, strict=True)
    )


def _rebuilt(outputs: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns outputs of the same form with other tensors."""
    remaining = iter(tensors)
    new_outputs = map_tensors(lambda _: next(remaining), outputs)
    if isinstance(outputs, Mapping) and type(outputs) is not dict:  # of transformers
        form: Any = copy.copy(outputs)
        for name, value in new_outputs.items():
            form[name] = value
        return form
    return new_outputs
