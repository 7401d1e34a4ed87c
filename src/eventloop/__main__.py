"""`python -m eventloop` is `eventloop`: the working directory isn't where modules come from."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import eventloop


def leave_out_working_directory() -> None:
    """Removes the working directory, which `python -m` puts first, from `sys.path`.

    The command `eventloop` has no such entry. With it a file `torch.py` or a `*.dist-info` in a folder
    from elsewhere would run. A source tree that eventloop itself was imported from stays.
    """
    with suppress(OSError):  # the folder was deleted
        folder = Path.cwd()
        is_source = Path(eventloop.__file__).parents[1] == folder
        if not sys.flags.safe_path and sys.path[:1] == [str(folder)] and not is_source:
            del sys.path[0]


if __name__ == "__main__":
    leave_out_working_directory()
    from eventloop.cli import main  # looks for modules, and so for plugins

    sys.exit(main())
