"""Label smoothing of a loss that other code computes: every cross-entropy in it is smoothed.

Only the caller of `cross_entropy` knows where the classes are, which targets it ignores, how it
weighs classes and how it takes the mean; so the call itself gets `label_smoothing`, and torch does
the rest.

Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", arXiv:1512.00567, section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode


class SmoothedCrossEntropy(TorchFunctionMode):
    """Smooths the targets of every `torch.nn.functional.cross_entropy` called inside of it.

    `with SmoothedCrossEntropy(0.1): loss = criterion(logits, targets)` is, wherever `criterion`
    calls it, `cross_entropy(..., label_smoothing=0.1)`: a target becomes (1 - epsilon) of itself and
    epsilon spread evenly over all classes. Class indices and probabilities; `nn.CrossEntropyLoss`
    calls it, too. May be entered again and again.

    Args:
        epsilon: the share that is spread, in [0, 1].

    Attributes:
        num_calls: how many calls were smoothed.

    Raises:
        ValueError: `epsilon` is outside [0, 1].
        SmoothedAlreadyError: on a call that has a smoothing of its own.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        if not 0 <= epsilon <= 1:  # torch takes what is below, and NaN, for no smoothing at all
            raise ValueError(f"epsilon={epsilon!r} isn't in [0, 1]; the paper takes 0.1")
        self.epsilon = epsilon
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls what was called; cross-entropy, which passes all by keyword, with smoothing."""
        given = dict(kwargs or {})
        if func is cross_entropy:
            if given.get("label_smoothing"):
                raise SmoothedAlreadyError(
                    f"the loss smooths labels by {given['label_smoothing']} itself, and shall by "
                    f"{self.epsilon}"
                )
            given["label_smoothing"] = self.epsilon
            self.num_calls += 1
        return func(*args, **given)


class SmoothedAlreadyError(ValueError):
    """A cross-entropy that is to be smoothed has a smoothing of its own."""
