"""Configuration files of a stranger: an error in a second that names the file, or plain values."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eventloop.config.config_files import MAX_YAML_BYTES, pyproject_layer, yaml_layer
from eventloop.errors import SettingError

MAX_CPU_S = 3.0  # of a slow machine; a second on most
MAX_MORE_BYTES = 100 * 2**20


def _bomb(levels: int, entries: int = 9) -> str:
    lines = ["a0: &a0 [x]"]
    for idx in range(1, levels):
        lines.append(f"a{idx}: &a{idx} [{', '.join([f'*a{idx - 1}'] * entries)}]")
    return "\n".join(lines)


def _chain(levels: int) -> str:
    return "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, levels))


# Text by kind, and what the error says beside the file; "" where nothing is wrong.
YAML = {
    "alias bomb": (_bomb(20), "line 7, column 5: with its aliases written out"),
    "alias of a long text": (
        f"a: &a {'x' * 50_000}\nb: [{'*a,' * 1000}]",
        "line 2, column 4: with its aliases written out",
    ),
    "merge bomb": (
        "a: &m0 {x: 1}\n"
        + "\n".join(f"b{i}: &m{i}\n  <<: [{', '.join([f'*m{i - 1}'] * 9)}]" for i in range(1, 20)),
        "with its aliases written out",
    ),
    "alias of itself": ("task: &a [*a]", "line 1, column 11: an alias contains itself"),
    "alias of itself in a mapping": ("task: &a\n  lr: *a", "line 2, column 7: an alias contains"),
    "alias of the whole": ("&a [*a]", "line 1, column 5: an alias contains itself"),
    "chain of aliases": (_chain(2_000), "more than 50 levels deep"),
    "key twice": ("seed: 1\nlr: 1\nseed: 2\n", "line 3, column 1: 'seed' is given twice"),
    "key twice inside": ("task: {lr: 1, lr: 2}", "line 1, column 15: 'lr' is given twice"),
    "key twice, folded": ("max-duration: 1ep\nmax_duration: 2ep", "is given twice"),
    "levels of lists": ("a: " + "[" * 20_000 + "]" * 20_000, "more than 50 levels deep"),
    "levels of mappings": ("a: " + "{a: " * 9_000, "more than 50 levels deep"),
    "levels of dashes": ("- " * 30_000, "more than 50 levels deep"),
    "levels of keys": ("? " * 30_000, "more than 50 levels deep"),
    "long number": (f"seed: {'9' * 50_000}", "line 1, column 7: a number of 50,000 characters"),
    "long number of base 60": ("seed: 1" + ":1" * 30_000, "a number of 60,001 characters"),
    "many entries": (f"[{'1,' * (MAX_YAML_BYTES // 2 - 2)}]", "should hold names with values"),
    "many empty lists": (f"[{'[],' * (MAX_YAML_BYTES // 3 - 2)}]", "should hold names with values"),
    "many anchors": ("".join(f"- &a{i} x\n" for i in range(4_000)), "should hold names"),
    "a python object": ("a: !!python/object/apply:os.system [x]", "line 1, column 4: could not"),
    "a day that isn't": ("a: 2001-99-99", "month must be in 1..12"),
    "a zero byte": ("a: \0", "special characters are not allowed"),
    "a tab": ("task:\n\tlr: 1\n", "line 2, column 1: while scanning for the next token"),
    "a list as a key": ("? [a]\n: 1", "line 1, column 3: a key is neither text nor a number"),
    "two documents": ("a: 1\n---\nb: 2", "line 2, column 1: expected a single document"),
    "an open bracket": ("a: [1", "line 1, column 6"),
    "100 MB": (lambda: "seed: " + "1" * 100_000_000, f"has more than {MAX_YAML_BYTES:,} bytes"),
    "100 MB of lines": (lambda: "a: 1\n" * 20_000_000, f"has more than {MAX_YAML_BYTES:,} bytes"),
    "a carriage return before each end of a line": ("max_duration: 1ep\r\nseed: 1\r\n", ""),
    "a mark of the order of bytes": ("\ufeffmax_duration: 1ep\nseed: 1\n", ""),
    "aliases as they are meant": (
        "max_duration: 1ep\nseed: 1\ntask: &t {a: 1}\nplugins: {x: {<<: *t, a: 2}}",
        "",
    ),
}


@pytest.mark.parametrize("kind", YAML)
def test_a_hostile_yaml_file_is_an_error_in_a_second(kind, tmp_path):
    """Time of the processor and memory are bounded, and the message names the file and the line."""
    text, said = YAML[kind]
    path = tmp_path / "run.yaml"
    _write(path, text)

    if said:
        what = _refused_soon(lambda: yaml_layer(path))
        assert said in what
        assert str(path) in what
        assert len(what) < 2_000
    else:
        values = yaml_layer(path).values
        assert (values["max_duration"].value, values["seed"].value) == ("1ep", 1)


TOML = {
    "levels of lists": ("a = " + "[" * 20_000, "can't be read as TOML"),
    "levels of tables": ("a = " + "{a = " * 20_000, "can't be read as TOML"),
    "long number": (f"a = {'9' * 50_000}", "can't be read as TOML"),
    "key twice": ("a = 1\na = 2", "can't be read as TOML"),
    "100 MB": (lambda: "#" * 100_000_000, "has more than 4,194,304 bytes"),
}


@pytest.mark.parametrize("kind", TOML)
def test_a_hostile_toml_file_is_an_error_in_a_second(kind, tmp_path):
    """`pyproject.toml` is found by itself, in whatever folder a run is started."""
    text, said = TOML[kind]
    path = tmp_path / "pyproject.toml"
    _write(path, text)

    what = _refused_soon(lambda: pyproject_layer(path, "pyproject.toml"))

    assert said in what
    assert str(path) in what


def _write(path: Path, text: str | Callable[[], str]) -> None:
    path.write_text(text() if callable(text) else text, encoding="utf-8", newline="")


def _refused_soon(read: Callable[[], object]) -> str:
    """Returns the message of the error that reading raises in bounded time and memory."""
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start_s = time.process_time()
    with pytest.raises(SettingError) as caught:
        read()
    assert time.process_time() - start_s < MAX_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < MAX_MORE_BYTES
    return str(caught.value)
