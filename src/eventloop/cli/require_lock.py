"""Before a fit: the comparison with `eventloop.lock`, where one stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.plugin.dry_assemble import survey
from eventloop.plugin.lock import check_lock, lock_path

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration


def require_lock(configuration: Configuration) -> None:
    """Refuses what differs from the lock; does nothing where there is none.

    What is compared is what `eventloop plugins lock` writes: the installed plugins as they would
    take part whatever the task is.

    Raises:
        PluginError: something differs, shown as a diff.
    """
    path = lock_path(Path.cwd())
    if path.is_file():
        assembly = survey(configuration).assembly
        check_lock(path, assembly.plugins, assembly.implementations)
