"""Records in a store to which other processes may write, sealed with the token of the run.

A record without a valid seal is treated as missing. Without a token, as under torchrun, any process
could compute the seal; the readers check the types of a record in either case.
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
_MAX_TRIES = 100


def new_token() -> str:
    """Returns a new secret for a run, to be passed only to its ranks."""
    return os.urandom(32).hex()


def token_of_run() -> str:
    """Returns this run's token, EVENTLOOP_STORE_TOKEN; "" if it isn't set."""
    return os.environ.get(TOKEN_VARIABLE, "")


class SealedRecords:
    """JSON values in a store, each sealed for its key, so that a value can't be copied to another key.

    Args:
        token: a secret of all ranks; "" if they have none.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._secret = blake2b(token.encode()).digest()

    def write(self, key: str, value: Any) -> None:
        """Writes a value, replacing an existing value."""
        self._store.set(key, self._sealed(key, value))

    def write_first(self, key: str, value: Any) -> Any:
        """Writes a value unless the key has a valid value; returns the key's value."""
        sealed = self._sealed(key, value)
        stored = self._store.compare_set(key, "", sealed)
        for _ in range(_MAX_TRIES):
            if (opened := self._opened(key, stored)) is not None:
                return opened
            # The existing value isn't sealed by a rank of this run, and is replaced. Another process may
            # write again in between, hence the loop.
            stored = self._store.compare_set(key, stored, sealed)  # type: ignore[arg-type]
        return value

    def read(self, key: str) -> Any:
        """Returns the value of a key; None if the key is missing or its value has no valid seal."""
        if not self._store.check([key]):  # `get` would wait for a missing key
            return None
        return self._opened(key, self._store.get(key))

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
