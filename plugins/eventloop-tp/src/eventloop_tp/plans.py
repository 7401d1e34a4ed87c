"""Which module is divided how: patterns of names become styles of modules; free of hooks.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from eventloop import SettingError
from eventloop.toolbox import closest

COLWISE = "colwise"
ROWWISE = "rowwise"
GATHERED = "colwise_gather_output"
SEQUENCE = "sequence"
REPLICATED = "replicated"
SUMMED = "replicated_summed"
DROPOUT = "dropout"
STYLES = (COLWISE, GATHERED, ROWWISE, SEQUENCE, REPLICATED, SUMMED, DROPOUT)
# Names in transformers' plans for the same styles.
_ALSO = {
    "colwise_rep": GATHERED,
    "embedding_rowwise": ROWWISE,
    "embedding_colwise": COLWISE,
    "sequence_parallel": SEQUENCE,
    "replicate": REPLICATED,
    "replicated_with_grad_allreduce": SUMMED,
}
# How models call their numbers of heads, and their configurations.
_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
)


class Placed(NamedTuple):
    """A module and its style."""

    name: str
    module: nn.Module
    style: str

    def dim_of(self, param: str) -> int | None:
        """Returns the dimension along which a parameter of the module is sharded; None for none."""
        is_embedding = isinstance(self.module, nn.Embedding)
        if self.style in (COLWISE, GATHERED):
            return 1 if is_embedding else 0
        if self.style == ROWWISE and param == "weight":
            return 0 if is_embedding else 1
        return None


def plan_of(model: nn.Module) -> dict[str, str]:
    """Returns the model's own plan, its attribute `tp_plan` as in transformers; {} if it has none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def resolved(
    model: nn.Module, plan: Mapping[str, str], size: int, *, is_own: bool = False
) -> list[Placed]:
    """Returns the modules that a plan names, each with its style; what it leaves out isn't among them.

    Args:
        plan: patterns of names of modules, `blocks.*.mlp.up`, to one of `STYLES`; of several that fit
            the last one counts.
        size: over how many ranks modules are divided.
        is_own: whether the plan is the model's, which may name modules that it doesn't have.

    Raises:
        SettingError: a pattern fits no module, a style isn't known or not for such a module, or what
            is to be divided can't be divided by `size`.
    """
    modules = {name: one for name, one in model.named_modules() if name}
    styles: dict[str, str] = {}
    for pattern, said in plan.items():
        style = _ALSO.get(said, said)
        if style not in STYLES:
            raise SettingError(
                f"plan: {pattern!r} is {said!r}, which is not a style of tp{closest(said, STYLES)}",
                fix=f"give one of {', '.join(STYLES)}",
            )
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names and not is_own:
            raise SettingError(
                f"plan: the model has no module {pattern!r}{closest(pattern, modules)}",
                fix="give patterns of names of its modules, `blocks.*.mlp.up`",
            )
        styles |= dict.fromkeys(names, style)
    placed = [Placed(name, modules[name], style) for name, style in styles.items()]
    for entry in placed:
        _require_divisible(entry, size)
    _require_heads(model, placed, size)
    _require_tied_alike(model, placed)
    return placed


def missing(model: nn.Module, placed: list[Placed]) -> list[str]:
    """Returns the names of the modules that have parameters themselves, but aren't in the plan."""
    planned = {id(entry.module) for entry in placed if entry.style != DROPOUT}
    return [
        name or "the model itself"
        for name, module in model.named_modules()
        if id(module) not in planned and next(module.parameters(recurse=False), None) is not None
    ]


def _require_divisible(entry: Placed, size: int) -> None:
    if entry.style in (COLWISE, GATHERED, ROWWISE) and not isinstance(
        entry.module, nn.Linear | nn.Embedding
    ):
        raise SettingError(
            f"plan: {entry.name!r} is {entry.style}, but of class {type(entry.module).__name__}; only "
            "nn.Linear and nn.Embedding can be divided",
            fix="name the linear layers in it, or leave it out",
        )
    for param, tensor in entry.module.named_parameters(recurse=False):
        dim = entry.dim_of(param)
        if dim is not None and tensor.shape[dim] % size:
            raise SettingError(
                f"size={size}: {entry.name}.{param} is {tuple(tensor.shape)}, and {tensor.shape[dim]} "
                f"can't be divided by {size}",
                fix="take a size that divides it, or leave the module out of the plan",
            )


def _require_heads(model: nn.Module, placed: list[Placed], size: int) -> None:
    divided = {entry.name.rpartition(".")[0] for entry in placed if entry.style == COLWISE}
    for name, module in model.named_modules():
        if name not in divided or not name:
            continue
        config = getattr(module, "config", None)
        for heads in _HEADS:
            # A configuration's number of heads describes attention modules, not other modules.
            num = getattr(module, heads, None)
            if num is None and "att" in type(module).__name__.lower():
                num = getattr(config, heads, None)
            if isinstance(num, int) and num % size:
                raise SettingError(
                    f"size={size}: {name} has {heads} = {num}, which can't be divided by {size}",
                    fix=f"take a size that divides {num}, or leave {name}.* out of the plan",
                )


def _require_tied_alike(model: nn.Module, placed: list[Placed]) -> None:
    entries = {id(entry.module): entry for entry in placed}
    first_uses: dict[int, tuple[str, int | None]] = {}
    for name, module, param, tensor in owners(model):
        entry = entries.get(id(module), Placed(name, module, REPLICATED))
        use = f"{name}.{param}".lstrip("."), entry.dim_of(param)
        first_use, dim = first_uses.setdefault(id(tensor), use)
        if dim != use[1]:
            raise SettingError(
                f"plan: {first_use} and {use[0]} are one parameter, but the plan divides them differently",
                fix="an embedding that is rowwise goes with a linear layer that is colwise; or leave "
                "both out",
            )


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yields the module's name, the module, the parameter's name and the parameter; tied ones repeatedly."""
    for name, module in model.named_modules():
        for param, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            yield name, module, param, tensor
