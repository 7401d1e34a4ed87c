"""Records in a store that anyone who reaches its port can write to: sealed with the run's token.

A record without a valid seal reads as if it weren't there. Without a token, as under torchrun, the
seal proves nothing; the form of a record is checked in either case.
"""

from __future__ import annotations

import hmac
import json
import os
from hashlib import blake2b
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__

from eventloop.config.value_sources import TOKEN_VARIABLE

_SEAL_CHARS = 32
_MOST_TRIES = 100


def new_token() -> str:
    """Returns a token for a run, which only its ranks are told."""
    return os.urandom(32).hex()


def token_of_run() -> str:
    """Returns this run's token: EVENTLOOP_STORE_TOKEN; "" without one."""
    return os.environ.get(TOKEN_VARIABLE, "")


class SealedRecords:
    """JSON values in a store, each sealed for its key.

    Args:
        token: a secret of all ranks; "" if they have none.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._secret = blake2b(token.encode()).digest()

    def write(self, key: str, value: Any) -> None:
        """Writes a value, in place of any other."""
        self._store.set(key, self._sealed(key, value))

    def write_first(self, key: str, value: Any) -> Any:
        """Writes a value unless the key has one; returns the value that the key has."""
        sealed = self._sealed(key, value)
        stored = self._store.compare_set(key, "", sealed)
        for _ in range(_MOST_TRIES):
            if (opened := self._opened(key, stored)) is not None:
                return opened
            # What is there isn't of this run: a rank's record takes its place.
            stored = self._store.compare_set(key, stored, sealed)  # type: ignore[arg-type]
        return value

    def read(self, key: str) -> Any:
        """Returns the value of a key; None without one, or without a valid seal."""
        # `get` would wait for a key that isn't there.
        return self._opened(key, self._store.get(key)) if self._store.check([key]) else None

    def _sealed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return self._seal(key, text.encode()) + text

    def _opened(self, key: str, stored: bytes) -> Any:
        seal = stored[:_SEAL_CHARS]
        data = stored[_SEAL_CHARS:]
        if not hmac.compare_digest(seal, self._seal(key, data).encode()):
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return None

    def _seal(self, key: str, data: bytes) -> str:
        sealed = key.encode() + b"\0" + data
        return blake2b(sealed, key=self._secret, digest_size=_SEAL_CHARS // 2).hexdigest()
