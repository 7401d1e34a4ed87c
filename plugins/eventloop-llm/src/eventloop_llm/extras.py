"""Libraries that some parts of this package need, imported when they are used: the extras of pyproject.toml."""

from __future__ import annotations

import importlib
from typing import Any

from eventloop import EventloopError

EXTRA_OF = {"datasets": "data", "eventloop_remote": "remote", "peft": "lora", "pyarrow": "data"}


def optional_module(name: str, subject: str) -> Any:
    """Imports a module of a library that may be missing.

    Args:
        name: of the module, "pyarrow.parquet".
        subject: the file or option that needs it, for the message.

    Raises:
        EventloopError: the library isn't installed.
    """
    library = name.partition(".")[0]
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        # A broken installation of the library itself is another error.
        if error.name != library:
            raise
        raise EventloopError(
            f"{subject} needs {library.replace('_', '-')}, which isn't installed",
            fix=f"install it, `pip install 'eventloop-llm[{EXTRA_OF[library]}]'`",
        ) from error
    return importlib.import_module(name)
