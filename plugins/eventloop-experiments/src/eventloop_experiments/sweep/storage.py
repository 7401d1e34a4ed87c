"""Optuna's objects by name: storages, samplers and pruners."""

from __future__ import annotations

import inspect
import sqlite3
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import sqlalchemy.event
import yaml  # type: ignore[import-untyped]
from optuna.storages import RDBStorage

from eventloop import EventloopError
from eventloop.commands import UsageError, closest, flag, fold, one_line

# Passes the URL to trials and workers; it may contain a password, so it isn't written to a file.
STORAGE_VARIABLE = "OPTUNA_STORAGE"
_WAIT_S = 120  # for other workers to end their writes to SQLite


def sqlite_url(folder: Path) -> str:
    """Returns the URL of a sweep's own database."""
    return f"sqlite:///{folder.absolute() / 'study.db'}"


def open_storage(url: str, *, is_new: bool = True) -> RDBStorage:
    """Opens a database, and creates its tables if they are missing.

    Args:
        is_new: whether to create tables and check Optuna's version of them; trials skip both.

    Raises:
        EventloopError: the database can't be reached, or its driver isn't installed.
    """
    options = {"connect_args": {"timeout": _WAIT_S}} if url.startswith("sqlite") else {}
    try:
        storage = RDBStorage(
            url,
            engine_kwargs=options,
            skip_compatibility_check=not is_new,
            skip_table_creation=not is_new,
        )
    except Exception as error:
        raise EventloopError(
            f"the study's storage can't be opened: {one_line(str(error))}",
            fix="give a URL of SQLAlchemy, such as `--storage postgresql://user@host/database`, and "
            "install its driver; or leave --storage out",
        ) from error
    if options:
        sqlalchemy.event.listen(storage.engine, "connect", _truncate_journal)
        storage.engine.dispose()  # connections opened before the listener
    return storage


def _truncate_journal(connection: sqlite3.Connection, _record: object) -> None:
    """Makes SQLite truncate its journal: deleting the file is the most expensive part of a commit."""
    connection.execute("PRAGMA journal_mode = TRUNCATE")


def make_sampler(text: str | None) -> optuna.samplers.BaseSampler:
    """Makes a sampler: `tpe`, `random`, `tpe:multivariate=true,n_startup_trials=5`."""
    sampler: optuna.samplers.BaseSampler = _made("sampler", text or "tpe", optuna.samplers)
    return sampler


def make_pruner(text: str | None) -> optuna.pruners.BasePruner:
    """Makes a pruner: `median`, `hyperband`, `none`, `median:n_warmup_steps=2`."""
    name = "nop" if text == "none" else text or "median"
    pruner: optuna.pruners.BasePruner = _made("pruner", name, optuna.pruners)
    return pruner


def _made(kind: str, text: str, module: ModuleType) -> Any:
    """Builds the class `NameKind` of a module, with the arguments written after the name.

    Raises:
        UsageError: no class has this name, or it doesn't accept these arguments.
    """
    name, _, options = text.partition(":")
    suffix = kind.title()
    classes = {
        fold(class_name.removesuffix(suffix)).lower(): member
        for class_name, member in vars(module).items()
        if class_name.endswith(suffix)
        and inspect.isclass(member)
        and not inspect.isabstract(member)
    }
    if name.lower() not in classes:
        raise UsageError(
            f"{flag(kind)}: Optuna has no {kind} {name!r}{closest(name.lower(), classes)}",
            fix=f"one of {', '.join(sorted(classes))}",
        )
    pairs = [option.partition("=") for option in options.split(",") if option]
    try:
        return classes[name.lower()](**{key: yaml.safe_load(value) for key, _, value in pairs})
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(
            f"{flag(kind)} {text}: {one_line(str(error))}",
            fix=f"write its arguments as `{flag(kind)} {name}:NAME=VALUE`",
        ) from error
