"""What the subcommands share: which checkpoints are meant, and what one tells of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.manifest import FILE
from eventloop.checkpoint.storage import FOLDER, best_among, checkpoint_at, checkpoints_at, unusable
from eventloop.checkpoint.store import look_at
from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.errors import CheckpointError, UsageError
from eventloop.files.run_folder import read_json
from eventloop.text import one_line
from eventloop.urls import Place, Url, place_of

if TYPE_CHECKING:
    from eventloop.checkpoint.remote_checkpoints import RemoteCheckpoints
    from eventloop.checkpoint.store import Found

BEST = CommandOption(
    "best", "", "of a run take the checkpoint of the best evaluation, not the newest"
)
JSON = CommandOption("json", "", "write JSON instead of text")
_MOST_SHOWN = 120  # characters of a name


def words(arguments: Arguments, command: Command) -> tuple[str, ...]:
    """Returns what stands alone on the command line, all of which is needed.

    Raises:
        UsageError: something is missing.
    """
    missing = command.argument.split()[len(arguments.words) :]
    if missing:
        raise UsageError(
            f"`eventloop {command.name}` needs {' and '.join(missing)}",
            fix=f"write it as `{command.usage}`",
        )
    return arguments.words


@contextmanager
def one_checkpoint(word: str, *, best: bool = False) -> Iterator[tuple[Path, Place]]:
    """Yields the checkpoint that is meant, and reports newer ones that can't be used on stderr.

    Args:
        word: a checkpoint or a run, or the URL of one.
        best: whether that of the best evaluation of the run is meant, not the newest.

    Yields:
        Its folder, or a copy of it while the `with` lasts; and what it is called.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, but none verifies.
    """
    place = _best(word) if best else place_of(word)
    if isinstance(place, Path):
        path, refused = checkpoint_at(place)
        _tell((one.path, one.reason) for one in refused)
        yield path, path
        return
    with _store_of(place) as (store, is_one):
        while True:
            url, passed_over = (place, []) if is_one else store.latest()
            if url is None:
                raise unusable(place, passed_over) if passed_over else _none(place)
            try:
                copy = store.download(url)
                break
            except CheckpointError:
                if store.has(url.name):
                    raise
                if is_one:  # otherwise a run under way has removed it, and has others
                    raise _none(place) from None
        _tell(passed_over)
        yield copy, url


def _best(word: str) -> Place:
    """Returns the checkpoint of the best evaluation of a run."""
    place = place_of(word)
    looks: Iterable[Found[Any]] = (
        uploaded_at(place, digests=False)
        if isinstance(place, Url)
        else (look_at(one, digests=False) for one in checkpoints_at(place))
    )
    if (found := best_among(looks)) is None:
        raise UsageError(
            f"--best: no checkpoint of {word!r} is said to be of the best evaluation",
            fix="train with `--checkpoint-best test/accuracy`, or leave --best out",
        )
    path: Place = found.path
    return path


def _tell(refused: Iterable[tuple[Place, str]]) -> None:
    for place, reason in refused:
        sys.stderr.write(f"{place.name} isn't used: {one_line(reason)}\n")


def uploaded_at(url: Url, *, digests: bool) -> list[Found[Url]]:
    """Returns the checkpoints that a URL stands for, the newest first.

    Args:
        url: of a run, of its `checkpoints`, or of a checkpoint, which stands for itself.
        digests: whether they are downloaded and verified; otherwise only their manifests are.

    Raises:
        UsageError: there is none, or it can't be the URL of any.
        CheckpointError: the storage fails.
    """
    with _store_of(url) as (store, is_one):
        found = [one for one in store.found(digests=digests) if not is_one or one.path == url]
    if not found:
        raise _none(url)
    return found


@contextmanager
def _store_of(url: Url) -> Iterator[tuple[RemoteCheckpoints, bool]]:
    """Yields the checkpoints under a URL, and whether it is that of a single one."""
    from eventloop.checkpoint.remote_storage import (
        checkpoints_at_url,  # local runs need nothing of it
    )
    from eventloop.checkpoint.verifying import batch_in

    if url.problem:
        raise UsageError(url.problem, fix="give the URL of a run: s3://bucket/run")
    is_one = batch_in(url.name) is not None
    inside = url if url.name == FOLDER else url / FOLDER
    with TemporaryDirectory(prefix="eventloop-") as copies:
        yield checkpoints_at_url(url.parent if is_one else inside, Path(copies)), is_one


def _none(url: Url) -> UsageError:
    return UsageError(
        f"there are no checkpoints at {url}", fix="give the URL of a run that has saved"
    )


def tested_at(looks: Sequence[Found[Any]]) -> tuple[str, dict[str, int | float]]:
    """Returns the checkpoint whose weights the test sets of a run had, by its name, and what they gave."""
    told = [_mapping(one.facts.get("manifest")) for one in looks]
    if looks and isinstance(looks[0].path, Path) and looks[0].path.parent.name == FOLDER:
        told.insert(0, read_json(looks[0].path.absolute().parents[1], FILE))
    found: Mapping[Any, Any] = next(
        (one["tested"] for one in told if _mapping(one.get("tested"))), {}
    )
    batch, name = _number(found.get("batch")), found.get("checkpoint")
    named = (one.path.name for one in looks if one.batch == batch)
    name = name if isinstance(name, str) else next(named, f"batch {batch}")
    return name, dict(_metrics(found))


def content(
    found: Found[Any], *, verified: bool | None, tested: tuple[str, Mapping[str, int | float]]
) -> dict[str, Any]:
    """Returns what is known of a checkpoint, as JSON can hold it; `verified`: None, not read."""
    reason, (name, of_tests) = found.facts.get("stop_reason"), tested
    saved_at = saved(found.path)
    moment = _mapping(found.facts.get("moment"))
    return {
        "checkpoint": str(found.path),
        "batch": found.batch,
        "epoch": _number(moment.get("epoch")),
        "saved": saved_at.isoformat(timespec="seconds") if saved_at else None,
        "bytes": found.num_bytes,
        "verified": verified,
        "finite": finite if isinstance(finite := found.facts.get("finite"), bool) else None,
        "reason": found.reason,
        # Older checkpoints have what the test sets gave with the weights of another.
        "metrics": {key: one for key, one in _metrics(found.facts) if key not in of_tests},
        "tested": of_tests if found.path.name == name else {},
        "stop_reason": reason if isinstance(reason, str) else None,
        "status": status if isinstance(status := found.facts.get("status"), str) else None,
        "plugins": list(_plugins(found.facts)),
    }


def saved(path: Place) -> datetime | None:
    """Returns when a checkpoint was saved: its manifest is written last. None if unknown."""
    if not isinstance(path, Path):
        return None  # few stores tell
    with suppress(OSError, ValueError, OverflowError):
        return datetime.fromtimestamp((path / FILE).lstat().st_mtime).astimezone()
    return None


def size_text(num_bytes: int) -> str:
    """Returns a size in words: "512 bytes", "3.4 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.95 or unit == "TB":
            break
    return f"{size:,.1f} {unit}"


def shown(value: object) -> str:
    """Returns a number or text for a cell of a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _metrics(facts: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for name, value in _mapping(facts.get("metrics")).items():
        number = _number(value)
        if isinstance(name, str) and number is not None:
            yield name, number


def _plugins(facts: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    plugins = _mapping(facts.get("manifest")).get("plugins")
    for one in plugins if isinstance(plugins, list) else ():
        told = {key: _mapping(one).get(key) for key in ("name", "version", "role")}
        if isinstance(told["name"], str):
            yield {key: value if isinstance(value, str) else "" for key, value in told.items()}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int | float | None:
    """Returns a number; None for anything else, and for ints that Python may refuse to write."""
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**63):
        return value
    return None
