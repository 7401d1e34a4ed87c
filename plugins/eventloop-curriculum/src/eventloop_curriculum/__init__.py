"""Curriculum for eventloop: another data loader, batch size or sequence length over a run."""

from eventloop_curriculum.loaders import Shortened, remade, shortened
from eventloop_curriculum.plugin import Curriculum
from eventloop_curriculum.steps import Steps

__all__ = ["Curriculum", "Shortened", "Steps", "remade", "shortened"]
