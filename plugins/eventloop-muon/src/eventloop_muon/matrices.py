"""Which weights of a model are hidden matrices, by their shapes, places and names.

    weights = split(model)
    optimizers = Muon(weights.hidden), AdamW(weights.wide + weights.narrow)

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": embeddings,
the output layer, and whatever isn't a matrix are better off with AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn


class Weights(NamedTuple):
    """The parameters of a model, each once, in its order.

    Args:
        hidden: matrices between the first and the last layer, of shape (out, in).
        wide: other weights of two dimensions and more: embeddings, ends, convolutions.
        narrow: biases, gains and scalars.
    """

    hidden: list[nn.Parameter]
    wide: list[nn.Parameter]
    narrow: list[nn.Parameter]


def split(
    model: nn.Module, hidden: Sequence[str] | None = None, not_hidden: Sequence[str] = ()
) -> Weights:
    """Separates the hidden matrices of a model from its other weights.

    A weight that is used in several places is hidden only if it is so in all of them.

    Args:
        hidden: patterns of the names of hidden matrices, `blocks.*`; None: all but embeddings and
            the first and the last weight with two dimensions or more.
        not_hidden: patterns of names that aren't hidden, whatever else says so.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in (*(hidden or ()), *not_hidden):
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            known = ", ".join(name for name, param in named if param.ndim > 1)
            raise ValueError(f"{pattern!r} is the name of no parameter; matrices are {known}")
    ends = [param for _, param in named if param.ndim > 1]
    not_between = {*ends[:1], *ends[-1:], *_embeddings(model)}
    others = {
        param
        for name, param in named
        if _matches(name, not_hidden)
        or (param in not_between if hidden is None else not _matches(name, hidden))
    }
    params = list(model.parameters())
    wide = [param for param in params if param.ndim > 1]
    inner = [param for param in wide if param.ndim == 2 and param not in others]
    taken = set(inner)
    return Weights(
        inner,
        [param for param in wide if param not in taken],
        [param for param in params if param.ndim < 2],
    )


def _embeddings(model: nn.Module) -> set[Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, kinds)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
