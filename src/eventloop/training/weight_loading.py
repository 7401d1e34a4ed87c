"""Weights as a model takes them that has code of its own for loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import (
    _NormBase,
)  # private: adds what old versions lacked (torch 2.13)

_PLAIN = (Tensor, nn.Parameter)
# Of torch's own: they copy entries to where they belong, and do nothing else with a tensor.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def fit_to_load(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Returns weights that `model.load_state_dict` can take.

    Tensors that are still to be read are read where a module overrides how it is loaded, or has a hook
    for it: it may keep them, assign them to `.data`, or make arrays of them, as it can with plain ones.
    """
    own = tuple(_loaded_by_own_code(model))
    read = {
        name: one.detach()  # a subclass may only wrap another tensor
        for name, one in weights.items()
        if isinstance(one, Tensor) and type(one) not in _PLAIN and name.startswith(own)
    }
    return {**weights, **read} if read else weights


def _loaded_by_own_code(model: nn.Module) -> Iterator[str]:
    """Yields the name prefixes of modules whose own code loads their weights."""
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        yield ""
    for name, module in model.named_modules(remove_duplicate=False):
        load = getattr(module._load_from_state_dict, "__func__", None)
        # No public name has the hooks (torch 2.13).
        if load not in _COPYING or module._load_state_dict_pre_hooks:
            yield f"{name}." if name else ""
