"""Masks passwords, keys and tokens wherever options leave the process.

Headers, manifests, checkpoints, locks, reports and trackers all get options from here. Secrets are
recognised by the option's name, such as `api_key`, `password` or `hf_token`, because most values don't
show it. Passwords in URLs, and tokens of services with a known prefix (`ghp_...`), are masked under any
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eventloop.naming import fold
from eventloop.urls import hidden

MASK = "***"
_SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential",
    "credentials", "creds", "apikey", "authtoken", "accesstoken", "accesskey", "secretkey",
    "privatekey", "passcode", "jwt", "bearer", "authorization",
}  # fmt: skip
_KEYS = {
    "access", "account", "api", "auth", "encryption", "license", "master", "private",
    "secret", "session", "signing", "ssh", "storage",
}  # fmt: skip
# Services whose personal access tokens are named like `github_pat`. A name `pat` may mean patience.
_SERVICES_WITH_PAT = {"azure", "databricks", "devops", "gh", "git", "github", "gitlab", "snowflake"}
# Words in the names of tokens of a text, such as `pad_token`. These settings change the training, so
# they must be shown.
_TEXT_TOKENS = {
    "action", "answer", "assistant", "audio", "begin", "beginning", "blank", "bos", "boundary",
    "class", "cls", "decoder", "domain", "draft", "encoder", "end", "entity", "eod", "eos",
    "eot", "first", "global", "goal", "image", "input", "label", "lang", "language", "last",
    "latent", "mask", "mem", "memory", "modality", "new", "newline", "next", "null", "output",
    "pad", "padding", "per", "placeholder", "pos", "position", "prompt", "query", "register",
    "reward", "sep", "separator", "sot", "source", "space", "speaker", "special", "src", "start",
    "state", "stop", "style", "system", "target", "task", "text", "tgt", "think", "time", "tool",
    "trigger", "unk", "unknown", "user", "video", "vision", "word",
}  # fmt: skip
# A name that ends in one of these words isn't a secret, but a path to it, for example.
_NO_SECRETS = {
    "dir", "env", "file", "folder", "id", "length", "name", "path", "type", "url", "var",
    "variable",
}  # fmt: skip
_SPECIAL_TOKEN = re.compile(r"<[^>]*>|\[[^\]]*\]|.{0,2}", re.DOTALL)

# A key and its value in a mapping that is written as JSON or YAML.
_PAIR = re.compile(
    r"""(?P<key>(?<=[{,\s])(?P<quote>["']?)(?P<name>[A-Za-z_][\w.-]*)(?P=quote)\s*:\s*)"""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|\[[^\[\]]*\]|[^\s,{}\[\]]+)"""
)
# A variable of an environment, `HF_TOKEN=...`, or a part of a connection string.
_ASSIGNMENT = re.compile(r"(?<![\w.?&-])(?P<name>[A-Za-z_][\w-]*)=(?P<value>[^\s;,&\"'{}\[\]]+)")
# Tokens of GitHub, GitLab, Hugging Face, OpenAI and compatible services, and Slack.
_SERVICE_TOKEN = re.compile(
    r"(?<![\w-])(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z]{30,}"
    r"|sk-(?=[\w-]*\d)[\w-]{20,}|xox[abeprs]-[\w-]{10,})"
)
# The value of an authorization header, under any name.
_BEARER = re.compile(r"(?P<scheme>\b(?:Bearer|Basic) )[\w.~+/=-]{6,}")


def is_secret(name: str) -> bool:
    """Returns whether the name of an option shows that its value is a secret."""
    words = _words(name)
    if not words or words[-1] in _NO_SECRETS:
        return False
    if len(words) > 1 and words[-1] in ("key", "keys") and words[-2] in _KEYS:
        return True
    if len(words) > 1 and words[-1] == "pat" and words[-2] in _SERVICES_WITH_PAT:
        return True
    return not _SECRET_WORDS.isdisjoint(words) or _is_token(words)


def shown(name: str, value: Any) -> Any:
    """Returns an option's value with secrets masked, so that it may be shown, saved and sent.

    None, booleans and floating-point numbers are never masked. The values of a mapping are judged by
    their keys.

    Args:
        name: the name of the option.
        value: of any type; nests of lists, tuples and mappings are searched.
    """
    if isinstance(value, Mapping):
        if is_secret(name):
            return {key: shown(name, entry) for key, entry in value.items()}
        return {key: shown(str(key), entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(shown(name, entry) for entry in value)
    if value is None or isinstance(value, (bool, float)) or value == "":
        return value
    if is_secret(name) and not _is_special_token(name, value):
        return MASK
    if type(value) is str:
        return shown_text(value)
    return value


def shown_text(text: str) -> str:
    """Returns a text with secrets in URLs, headers, variables and mappings masked.

    Tokens of services are masked anywhere in the text.
    """
    if text.lstrip().startswith(("{", "[")):
        text = _PAIR.sub(_shown_pair, text)
    text = _ASSIGNMENT.sub(_shown_assignment, text)
    text = _SERVICE_TOKEN.sub(MASK, text)
    return hidden(_BEARER.sub(rf"\g<scheme>{MASK}", text))


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with secrets masked, so that they may be shown, saved and sent."""
    return {name: shown(name, value) for name, value in options.items()}


def shown_words(words: Sequence[str]) -> list[str]:
    """Returns a command line with secrets masked: `--task.api-key ***`, `--task.token=***`."""
    result: list[str] = []
    is_value = False
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag.rpartition(".")[2] if flag.startswith("--") else ""
        if is_value and not word.startswith("--"):
            result.append(MASK)
        elif equals and is_secret(name):
            result.append(f"{flag}={shown(name, value)}")
        else:
            prefix = f"{flag}{equals}" if flag.startswith("--") else ""
            result.append(f"{prefix}{shown_text(word.removeprefix(prefix))}")
        is_value = not equals and is_secret(name)
    return result


def _shown_pair(pair: re.Match[str]) -> str:
    """Returns a key and value of a mapping in a text with the value masked: `"password": "***"`."""
    value = pair["value"]
    if value.startswith("[") and re.search("[\"',]", value):  # a list, not the token `[SEP]`
        value = value[1:]
    masked = shown(pair["name"], value.strip("\"'"))
    return pair[0] if masked == value.strip("\"'") else f"{pair['key']}{json.dumps(masked)}"


def _shown_assignment(assignment: re.Match[str]) -> str:
    return f"{assignment['name']}={shown(assignment['name'], assignment['value'])}"


def _words(name: str) -> list[str]:
    """Returns the words of a name: `apiKey` and `api-key` are both "api" and "key"."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    return [word for word in fold(separated).split("_") if word]


def _is_token(words: Sequence[str]) -> bool:
    if words[-1] == "token":
        return _TEXT_TOKENS.isdisjoint(words)
    return words[-1] == "tokens" and not {"access", "api", "auth"}.isdisjoint(words)


def _is_special_token(name: str, value: object) -> bool:
    """Returns whether a value is a special token of a tokenizer, such as `<image>` or `[SEP]`."""
    is_token = _words(name)[-1] in ("token", "tokens")
    return is_token and isinstance(value, str) and bool(_SPECIAL_TOKEN.fullmatch(value))
