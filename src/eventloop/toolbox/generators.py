"""The random generators of Python, NumPy and torch: found, seeded, and watched for use."""

from __future__ import annotations

from eventloop.rng import host_generators, is_generator, reseed

__all__ = ["host_generators", "is_generator", "reseed"]
