"""Files that a plugin writes, and Python files that it imports; works without torch."""

from __future__ import annotations

from eventloop.files.disk import replace_file
from eventloop.files.run_folder import RunFolder, append_whole, why_no_file
from eventloop.plugin.load import module_of_file, spec_of_file

__all__ = [
    "RunFolder",
    "append_whole",
    "module_of_file",
    "replace_file",
    "spec_of_file",
    "why_no_file",
]
