"""The plugin: which parameters are clipped, instead of the core's clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop import PluginError, State, hookimpl
from eventloop_agc.clipping import clip_units_


class Agc:
    """Clips the gradient of each unit relative to the size of its weights.

    A unit is a row of a matrix, a filter of a convolution, or a whole vector. Large learning rates
    and batches stay stable without batch normalization.

    Args:
        clip: the longest gradient, as a share of the norm of its unit's weights, more than 0. The
            paper uses 0.01 for batches of 4,096, and up to 0.16 for smaller ones.
        eps: the norm that a unit has at least, more than 0, so that weights of 0 can move.
        exclude: patterns of the names of parameters that aren't clipped, `head.*`; not set: the
            last linear layer, as in the paper; `[]` clips everything.

    Raises:
        TypeError: `clip` or `eps` is not a number, `exclude` no list.
        ValueError: `clip` or `eps` is not positive.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4.
    """

    def __init__(
        self, *, clip: float = 0.01, eps: float = 1e-3, exclude: list[str] | None = None
    ) -> None:
        for name, value in (("clip", clip), ("eps", eps)):
            if not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not a number")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} isn't a positive number")
        if isinstance(exclude, str):
            raise TypeError(f"exclude={exclude!r} is not a list; write [{exclude!r}]")
        self.clip = clip
        self.eps = eps
        self.exclude = exclude
        self._excluded: frozenset[Tensor] = frozenset()

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: the run clips already, or gradients are sparse; None if it can."""
        for name in ("clip_norm", "clip_value"):
            if (value := getattr(state.settings, name)) is not None:
                return f"{name}={value} clips the gradients already: leave one of them out"
        for name, module in state.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                return f"the gradients of {name!r} are sparse, of which torch knows no norm"
        return None

    @hookimpl
    def after_load(self, state: State) -> None:
        """Finds the parameters that aren't clipped."""
        try:
            self._excluded = frozenset(excluded(state.model, self.exclude))
        except ValueError as error:
            raise PluginError(
                f"agc.exclude: {error}",
                fix="""give patterns of these names: `--agc.exclude '["head.*"]'`""",
            ) from None

    @hookimpl
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> dict[str, Tensor]:
        """Clips the gradients of these optimizers; returns the fraction of clipped units."""
        params = [
            param
            for optimizer in optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and param not in self._excluded
        ]
        if not params:
            return {}
        return {"clipped_units": clip_units_(params, self.clip, self.eps)}


def excluded(model: nn.Module, patterns: list[str] | None) -> list[nn.Parameter]:
    """Returns the parameters that aren't clipped: those the patterns name, or the last linear layer's.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    if patterns is None:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return [param for layer in linear[-1:] for param in layer.parameters()]
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            known = ", ".join(name for name, _ in named)
            raise ValueError(f"{pattern!r} is the name of no parameter; there are {known}")
    return [
        param for name, param in named if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
