"""The plugin: when the teacher computes, and what of it the loss sees."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventloop import EventloopError, PluginError, State, hookimpl
from eventloop.toolbox import as_option, predictions, switch_off
from eventloop_distill.softened import class_dim, counted_positions, soft_loss
from eventloop_distill.teacher import named_teacher, parts_of


class Distill:
    """Trains the model on the outputs of another one, the teacher, in addition to the targets.

    The loss becomes (1 - weight) times the task's and weight times the divergence from the
    teacher's outputs, both softened by the temperature. The teacher computes what the model
    computes, of the same inputs; it isn't trained and in no checkpoint.

    Args:
        teacher: module:function or ./file.py:function that gives the model; in Python the model
            itself. Sleeps until it is named.
        weights: of a teacher that is named: a safetensors file, a checkpoint, or a run's folder.
        temperature: how soft both outputs are compared, more than 0. The paper takes 2 to 20.
        weight: share of the teacher's part in the loss, in (0, 1].

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: one is out of its range, or `teacher` names no function.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """

    def __init__(
        self,
        *,
        teacher: str | nn.Module,
        weights: Path | None = None,
        temperature: float = 4.0,
        weight: float = 0.5,
    ) -> None:
        for name, value in (("temperature", temperature), ("weight", weight)):
            if not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not a number")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature={temperature!r} isn't a positive number")
        if not 0 < weight <= 1:
            raise ValueError(f"weight={weight!r} isn't in (0, 1]")
        if isinstance(teacher, str):
            parts_of(teacher)
        elif not isinstance(teacher, nn.Module):
            raise TypeError(f"teacher={teacher!r} is neither a name nor an nn.Module")
        elif weights is not None:
            raise ValueError(
                f"weights={str(weights)!r} are for a teacher that is named; load them into this one"
            )
        self.teacher = teacher
        self.weights = weights
        self.temperature = temperature
        self.weight = weight
        self._model: nn.Module | None = None
        self._outputs: Any = None

    @hookimpl
    def init(self, state: State) -> None:
        """Builds the teacher, without advancing any other random generator."""
        self._model = state.companion("distill", self._teacher)

    def _teacher(self) -> nn.Module:
        given = self.teacher
        return given if isinstance(given, nn.Module) else _built(given, self.weights)

    @hookimpl
    def after_load(self, state: State) -> None:
        """Refuses a training that asks for no loss."""
        owner = state.owner("train_batch")
        if owner != "core":
            raise PluginError(
                f"distill has no effect: train_batch is {owner}'s, which has losses of its own",
                fix="leave out that train_batch, or switch distill off with "
                + switch_off("distill"),
            )

    @hookimpl(wrapper=True)
    def train_batch(self, state: State) -> Generator[None, Any, Any]:
        """Lets the teacher's outputs go when the step is done."""
        try:
            return (yield)
        finally:
            self._outputs = None

    @hookimpl(wrapper=True, trylast=True)
    def forward(self, state: State) -> Generator[None, Any, Any]:
        """Runs the task's forward with the teacher in the model's place, then with the model."""
        if state.microbatch is not None:
            assert self._model is not None
            model = state.wrapped_model
            state.wrapped_model = self._model
            try:
                with torch.no_grad():
                    self._outputs = predictions(state.again())
            finally:
                state.wrapped_model = model
        return (yield)

    # Outside of those that ask for a loss twice, which would add the teacher's part to each.
    @hookimpl(wrapper=True, before=("cutmix", "label-smoothing", "mixup"))
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Adds the divergence from the teacher's outputs; not for who looks at a whole batch."""
        loss = yield
        if state.microbatch is None:
            return loss
        logits = predictions(state.outputs)
        teachers = self._outputs
        _check_alike(logits, teachers)
        dim = class_dim(logits, state.targets)
        if logits.shape[dim] < 2:
            raise PluginError(
                f"distill compares the classes of logits, but outputs of shape {tuple(logits.shape)} "
                "have one: its softmax is 1, whatever the output",
                fix="give two outputs for two classes, or switch distill off with "
                + switch_off("distill"),
            )
        soft = soft_loss(
            logits,
            teachers,
            self.temperature,
            dim=dim,
            counted=counted_positions(
                logits, state.targets, dim, are_next=logits.ndim == 3 and _are_next(state)
            ),
        )
        return (1 - self.weight) * loss + self.weight * soft


def _built(label: str, weights: Path | None) -> nn.Module:
    try:
        return named_teacher(label, weights)
    except EventloopError:
        raise
    except Exception as error:
        given = f", with the weights in {weights}" if weights is not None else ""
        raise PluginError(
            f"distill: the teacher {label} can't be built{given}: {type(error).__name__}: {error}",
            fix="fix it, name another with "
            + as_option("distill", teacher="./file.py:function")
            + ", or "
            "switch distill off with " + switch_off("distill"),
        ) from error


def _are_next(state: State) -> bool:
    """Whether the loss is one of transformers that compares each position with the next label."""
    model: Any = state.model
    is_theirs = hasattr(model, "loss_function") and hasattr(model, "config")
    if state.owner("loss") != "core" or not is_theirs or model.config.is_encoder_decoder:
        return False
    # What transformers calls such losses; the first is its default (5.23).
    kinds = (None, "ForCausalLM", "ForConditionalGeneration")
    return getattr(model, "loss_type", None) in kinds


def _check_alike(logits: Any, teachers: Any) -> None:
    """Refuses outputs that can't be compared."""
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in (logits, teachers)]
    if None in shapes or shapes[0] != shapes[1]:
        shown = [
            type(one).__name__ if shape is None else f"of shape {shape}"
            for one, shape in zip((logits, teachers), shapes, strict=True)
        ]
        raise PluginError(
            f"distill compares logits, but the model's outputs are {shown[0]}, the teacher's "
            f"{shown[1]}",
            fix="let both give a tensor of the same shape, or an object with such `logits`",
        )
