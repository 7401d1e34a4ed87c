"""The manifest: what a run is made of, so that it can be told, compared and made again."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import eventloop
from eventloop.plugin.assembly import Assembly
from eventloop.plugin.lock import order_digest
from eventloop.settings import Settings
from eventloop.urls import hidden

FILE = "manifest.json"


def manifest_of(assembly: Assembly, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Describes a run: plugins, their order, settings, versions, command line, commit.

    Returns:
        Values that JSON can hold.
    """
    commit, is_dirty = _git_commit(Path.cwd())
    return {
        "plugins": [
            {
                "name": one.name,
                "role": one.role,
                "distribution": one.distribution,
                "version": one.version,
                "source": one.source,
                "options": {name: plain(value) for name, value in one.options.items()},
            }
            for one in assembly.plugins
            if one.role in ("algorithm", "callback")
        ],
        "off": [
            {"name": one.found.name, "version": one.found.version, "reason": one.reason}
            for one in assembly.off
        ],
        "owners": {one.action: one.owner.name for one in assembly.decisions()},
        "order": order_digest(assembly.implementations),
        "settings": {name: plain(value) for name, value in vars(settings).items()},
        "device": str(device),
        "versions": {
            "eventloop": eventloop.__version__,
            "torch": str(torch.__version__),
            "torchmetrics": version("torchmetrics"),
            "python": platform.python_version(),
        },
        "command_line": [hidden(one) for one in sys.argv],
        "git": {"commit": commit, "dirty": is_dirty},
    }


def write_manifest(manifest: dict[str, Any], run_dir: Path) -> Path:
    """Writes a manifest into the folder of its run, which is made if it isn't there.

    Raises:
        OSError: it can't be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return path


def plain(value: Any) -> Any:
    """Gives a value as JSON can hold it; what it can't, as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value)


@functools.cache
def _git_commit(folder: Path) -> tuple[str | None, bool | None]:
    """Gives the commit that is checked out, and whether anything differs from it; None without."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit.strip(), bool(_git(folder, "status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=5
    )
    return result.stdout
