"""How the ranks are arranged: which train on samples of their own, and which share them."""

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
        sizes: of each dimension by its name, the outermost first; ranks 0 and 1 differ in the innermost.
        data: the names of the dimensions over which samples are split.
        parts: of the others those along which ranks hold different modules, as the stages of a pipeline
            do; along the rest they hold the same, or shards of it (DTensor).
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
        """Over how many ranks samples are split."""
        return prod(self.sizes[name] for name in self.data)

    def sharing(self, name: str, size: int, *, holds_parts: bool = False) -> Layout:
        """Returns a layout in which ranks that follow each other share their samples.

        Args:
            name: of the new dimension, the innermost.
            size: how many share; they are taken out of the innermost dimension of `data`.
            holds_parts: whether each of them holds different modules.

        Raises:
            SettingError: the ranks there can't be divided so.
        """
        last = self.data[-1]
        if size < 1 or self.sizes[last] % size:
            num = self.sizes[last]
            raise SettingError(
                f"the dimension {last!r} has {num} ranks, which can't be divided by {size}, for {name!r}",
                fix=f"give {name} a size that divides {num}, or start another number of ranks",
            )
        sizes = {**self.sizes, last: self.sizes[last] // size, name: size}
        parts = (*self.parts, name) if holds_parts else self.parts
        return replace(self, sizes=sizes, parts=parts)

    def position(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank along each dimension."""
        found = dict(self.sizes)
        for name in reversed(self.sizes):
            rank, found[name] = divmod(rank, self.sizes[name])
        return found

    def data_rank(self, rank: int) -> int:
        """Returns the number of a rank's samples, of `data_world_size`."""
        at = self.position(rank)
        number = 0
        for name in self.data:
            number = number * self.sizes[name] + at[name]
        return number

    def part(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Returns which of the `parts` a rank holds."""
        return tuple(one for one in self.position(rank).items() if one[0] in self.parts)

    def peers(self) -> list[list[int]]:
        """Returns the ranks whose gradients are averaged: in each list, they differ in data alone."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(range(self.world_size), key=self.data_rank):
            at = (idx for name, idx in self.position(rank).items() if name not in self.data)
            found.setdefault((*at,), []).append(rank)
        return list(found.values())

    def twin(self, other: Layout, rank: int) -> int | None:
        """Returns the rank that had the samples of a rank of another layout; None if none had."""
        if self == other:
            return rank
        number = other.data_rank(rank)
        return next((one for one in range(self.world_size) if self.data_rank(one) == number), None)

    def label(self, rank: int) -> str:
        """Returns a rank's number, with its position if there are several dimensions."""
        at = ", ".join(f"{name} {idx}" for name, idx in self.position(rank).items())
        return f"{rank} ({at})" if len(self.sizes) > 1 else str(rank)
