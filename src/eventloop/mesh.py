"""The arrangement of the ranks: which ranks train on different samples, and which share samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from eventloop.errors import SettingError


@dataclass(frozen=True)
class Layout:
    """The dimensions of the run's mesh of ranks.

    Ranks that differ in a dimension of `data` train on different samples. Ranks that differ only in
    other dimensions share their samples: each computes with a part of the model.

    Args:
        sizes: the size of each dimension by its name, the outermost dimension first; ranks 0 and 1 differ
            in the innermost dimension.
        data: the names of the dimensions over which samples are split.
        parts: the names of the dimensions along which ranks hold different modules, like the stages of a
            pipeline; along the remaining dimensions they hold the same modules, or shards (DTensor).
    """

    sizes: dict[str, int]
    data: tuple[str, ...] = ("data",)
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if {*self.data, *self.parts} - {*self.sizes} or {*map(type, self.sizes.values())} != {int}:
            raise ValueError(f"{self!r}: a size isn't a number, or a dimension has none")

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{self.world_size} ranks" + (f" ({sizes})" if len(self.sizes) > 1 else "")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def data_world_size(self) -> int:
        """The number of ranks over which samples are split."""
        return prod(self.sizes[name] for name in self.data)

    def sharing(self, name: str, size: int, *, holds_parts: bool = False) -> Layout:
        """Returns a layout in which neighbouring ranks share their samples.

        Args:
            name: name of the new dimension, which is the innermost.
            size: how many ranks share; the innermost dimension of `data` is divided by it.
            holds_parts: whether each of these ranks holds different modules.

        Raises:
            SettingError: `size` doesn't divide the dimension of `data`.
        """
        innermost = self.data[-1]
        if size < 1 or self.sizes[innermost] % size:
            num = self.sizes[innermost]
            raise SettingError(
                f"the dimension {innermost!r} has {num} ranks, which can't be divided by {size}, for {name!r}",
                fix=f"give {name} a size that divides {num}, or start another number of ranks",
            )
        sizes = {**self.sizes, innermost: self.sizes[innermost] // size, name: size}
        parts = (*self.parts, name) if holds_parts else self.parts
        return replace(self, sizes=sizes, parts=parts)

    def position(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank along each dimension."""
        position = dict(self.sizes)
        for name in reversed(self.sizes):
            rank, position[name] = divmod(rank, self.sizes[name])
        return position

    def data_rank(self, rank: int) -> int:
        """Returns the number of a rank's samples, of `data_world_size`."""
        position = self.position(rank)
        number = 0
        for name in self.data:
            number = number * self.sizes[name] + position[name]
        return number

    def part(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Returns the index of a rank along each dimension of `parts`."""
        position = self.position(rank)
        return tuple((name, idx) for name, idx in position.items() if name in self.parts)

    def peers(self) -> list[list[int]]:
        """Returns the ranks whose gradients are averaged, as lists of ranks that differ only in data."""
        peers: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(range(self.world_size), key=self.data_rank):
            position = self.position(rank)
            model_position = tuple(idx for name, idx in position.items() if name not in self.data)
            peers.setdefault(model_position, []).append(rank)
        return list(peers.values())

    def twin(self, layout: Layout, rank: int) -> int | None:
        """Returns the rank here that has the same samples as a rank of another layout, if any.

        Args:
            layout: the other layout.
            rank: a rank in it.
        """
        if self == layout:
            return rank
        number = layout.data_rank(rank)
        for candidate in range(self.world_size):
            if self.data_rank(candidate) == number:
                return candidate
        return None

    def label(self, rank: int) -> str:
        """Returns a rank's number, with its position if there are several dimensions."""
        position = ", ".join(f"{name} {idx}" for name, idx in self.position(rank).items())
        return f"{rank} ({position})" if len(self.sizes) > 1 else str(rank)
