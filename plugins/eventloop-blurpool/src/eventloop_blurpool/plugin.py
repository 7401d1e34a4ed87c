"""The plugin: which layers blur, and the header's note on them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from eventloop import State, StateView, hookimpl
from eventloop.toolbox import counted, first_of
from eventloop_blurpool.blurring import SIZES, anti_aliased

_MOST_NAMED = 4


class Blurpool:
    """Blurs before pixels are left out: in convolutions with a stride, and in max pools.

    The layers are replaced when the model has been built. Names and shapes of parameters, state
    dicts and exported files stay as they are without it.

    Args:
        filter_size: how wide the blur is, 2 to 7 pixels; wider: less depends on where a thing
            stands in the image, and more detail is lost.
        min_channels: convolutions of fewer input channels are left alone, as those of the image.
        convs: whether convolutions with a stride are replaced.
        max_pools: whether max pools are.

    Attributes:
        replaced: the names of the layers that were replaced.

    Raises:
        TypeError: an option is of another type.
        ValueError: `filter_size` or `min_channels` is out of range, or nothing is to be replaced.

    Source: Zhang 2019, arXiv:1904.11486.
    """

    def __init__(
        self,
        *,
        filter_size: int = 3,
        min_channels: int = 16,
        convs: bool = True,
        max_pools: bool = True,
    ) -> None:
        for name, number in {"filter_size": filter_size, "min_channels": min_channels}.items():
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name}={number!r} is not a whole number")
        if filter_size not in SIZES:
            raise ValueError(f"filter_size={filter_size} is outside 2 to 7; the paper takes 2 to 5")
        if min_channels < 1:
            raise ValueError(f"min_channels={min_channels} is less than 1, which replaces them all")
        if not (convs or max_pools):
            raise ValueError("convs=False and max_pools=False leave nothing to replace")
        self.filter_size = filter_size
        self.min_channels = min_channels
        self.convs = convs
        self.max_pools = max_pools
        self.replaced: tuple[str, ...] = ()
        self._note = ""

    @hookimpl
    def unsuitable(self, state: StateView) -> str | None:
        """Returns why the plugin can't be used: no layer was replaced; None if it can."""
        if self.replaced:
            return None
        wanted = ["max pool"] if self.max_pools else []
        if self.convs:
            wanted.append(f"2-D convolution of {self.min_channels} input channels or more")
        return f"the model has no {' and no '.join(wanted)} with a stride that it could replace"

    @hookimpl
    def init(self, state: State) -> None:
        """Replaces the layers, before anything holds a reference to a parameter."""
        state.model, replaced = anti_aliased(
            state.model,
            filter_size=self.filter_size,
            min_channels=self.min_channels,
            convs=self.convs,
            max_pools=self.max_pools,
        )
        # The names alone: the parameters of the old layers may be replaced later.
        self.replaced = tuple(replaced)
        self._note = _listed(replaced) if replaced else ""

    @hookimpl
    def header_note(self) -> str:
        """Returns how many layers of which kind blur, and which."""
        return self._note


def _listed(replaced: Mapping[str, nn.Module]) -> str:
    """Returns how many layers of each kind blur, and their names, as text."""
    num_convs = sum(isinstance(one, nn.Conv2d) for one in replaced.values())
    counts = {"convolution": num_convs, "max pool": len(replaced) - num_convs}
    kinds = [counted(num, kind) for kind, num in counts.items() if num]
    names = [name or "the model itself" for name in replaced]
    listed = first_of(names, _MOST_NAMED)
    verb = "blurs" if len(names) == 1 else "blur"
    return f"{' and '.join(kinds)} {verb} before leaving pixels out ({listed})"
