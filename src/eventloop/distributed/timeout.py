"""How long the ranks wait for each other."""

from __future__ import annotations

import math
import os

from eventloop.config.layers import TIMEOUT_VARIABLE
from eventloop.errors import SettingError


def timeout_s() -> float:
    """Gives how long ranks wait for each other in a collective: 1,800 s, or the variable's.

    Raises:
        SettingError: EVENTLOOP_TIMEOUT_S isn't a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or "1800"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(
            f"{TIMEOUT_VARIABLE}={text!r} isn't a number of seconds",
            fix=f"unset it, or write `{TIMEOUT_VARIABLE}=600`",
        )
    return seconds
