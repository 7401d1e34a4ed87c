"""URLs of folders in stores, whose passwords are never shown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import unquote

# A scheme of one letter is a drive of Windows.
_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# The text between the user's name and the last @; a number before a slash is a port.
_PASSWORD = re.compile(r"(://[^/:@\s]*:)(?!\d*(?:/|$))([^\s]*)@")
# In http(s), a user without a password is a token: https://TOKEN@host.
_USER = re.compile(r"(https?://)[^/:@\s]+@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;](?:[\w-]*[_-])?"
    r"(?:key|token|secret|signature|sig|password|passwd|pwd|credential|credentials|apikey)=)[^&;#\s]+",
    re.IGNORECASE,
)


@dataclass(frozen=True, repr=False)
class Url:
    """The URL of a folder: `s3://bucket/run`. As text it has no password.

    Args:
        full: as a person wrote it, password included; slashes at the end are left out.

    Raises:
        ValueError: it has no scheme, such as `s3://`.
    """

    full: str

    def __post_init__(self) -> None:
        if not isinstance(self.full, str) or not (match := _URL.match(self.full)):
            raise ValueError("it is not a URL, such as s3://bucket/run")
        scheme = match[0].lower()
        object.__setattr__(self, "full", scheme + self.full[len(scheme) :].rstrip("/"))

    @property
    def protocol(self) -> str:
        """The kind of store: "s3"."""
        return self.full.partition("://")[0]

    @property
    def path(self) -> str:
        """The text after `://`: "bucket/run"."""
        return self.full.partition("://")[2]

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder that contains it; the outermost folder is its own parent."""
        parent_path = self.path.rpartition("/")[0]
        return Url(f"{self.protocol}://{parent_path}") if parent_path else self

    @property
    def problem(self) -> str:
        """The reason why it can't be the URL of a folder, or ""."""
        if "::" in self.full:
            return f"{self} has '::' in it; chains of stores can't be written to"
        if not self.path.strip("/"):
            return f"{self} names no folder; write {self.protocol}://FOLDER/RUN, say"
        if self.protocol in ("file", "local") and not self.path.startswith("/"):
            return f"{self} isn't absolute; write {self.protocol}:///{self.path}"
        if odd := sorted({char for char in self.path if char in "*?[" or not char.isprintable()}):
            return f"{self} has {odd[0]!r} in it, which stores understand as something else"
        if not {"", ".", ".."}.isdisjoint(self.path.lstrip("/").split("/")):
            return f"{self} has '..', '.' or '//' in it, which stores take for names; leave it out"
        return ""

    def hide(self, text: str) -> str:
        """Returns a text about it without its password."""
        secret = self._password
        for form in (secret, unquote(secret)) if secret else ():
            text = text.replace(form, "***")
        return hidden(text)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.full}/{name}")

    def __str__(self) -> str:
        return hidden(self.full)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def _password(self) -> str:
        return match[2] if (match := _PASSWORD.search(self.full)) else ""


Place = Path | Url


def place_of(text: str) -> Place:
    """Returns the URL that a person wrote, or else the path; `~` is the home directory."""
    # Path.expanduser raises for `~user` where there is no such user.
    return Url(text) if _URL.match(text) else Path(os.path.expanduser(text))  # noqa: PTH111


def is_url_as_path(path: PurePath) -> bool:
    """Returns whether a path was made of a URL, which loses a slash: `s3:/bucket/run`."""
    return bool(_URL.match(path.as_posix().replace(":/", "://", 1)))


def hidden(text: str) -> str:
    """Returns a text in which URLs have no password, token or key."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _USER.sub(r"\1***@", _PASSWORD.sub(r"\1***@", text)))
