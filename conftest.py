"""The project's tests use the fixtures that it offers to others, installed or not."""

from __future__ import annotations

pytest_plugins = ["eventloop.testing.plugin"]
