"""The rules that `tools/lint.py` checks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "lint.py"))


@pytest.fixture
def mirrored(tmp_path):
    """Makes sources and tests of empty files; returns what the lint finds in the tests."""

    def mirrored(*tests, reasons):
        for path in (
            *("source/loop.py", "source/training/logged_numbers.py", "source/cli/plugins/show.py"),
            *(f"tests/{one}" for one in tests),
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        return [*LINT["mirrored"](tmp_path / "tests", tmp_path / "source", reasons)]

    return mirrored


@pytest.mark.parametrize(
    "path",
    [
        *("test_loop.py", "test_loop_step.py", "test_init.py", "conftest.py"),
        *("training/test_logged_numbers.py", "training/test_logged_numbers_logged.py"),
        *("cli/test_plugins.py", "cli/plugins/test_show.py"),
    ],
)
def test_a_test_file_is_named_after_its_module(path, mirrored):
    """Or after its package; then a subject may follow."""
    assert mirrored(path, reasons={}) == []


@pytest.mark.parametrize(
    "path",
    [
        "test_numbers.py",
        "test_looping.py",
        "training/test_loop.py",
        "core/test_numbers.py",
        "ranks/test_loop.py",
    ],
)
def test_a_test_file_named_after_no_module_is_found(path, mirrored):
    """The tests of a module are where its path says, or one runs all of them to trust one file."""
    (found,) = mirrored(path, reasons={})

    assert f"{path} is named after no module" in found


def test_exceptions_have_a_reason_and_are_there(mirrored):
    """A folder or a file; an exception that nothing needs is one that was forgotten."""
    assert mirrored("whole/test_a.py", "test_b.py", reasons={"whole": "a", "test_b.py": "b"}) == []

    (found,) = mirrored("whole/test_a.py", "test_b.py", reasons={"whole": "a", "test_b.py": "b",
                        "test_loop.py": "c"})  # fmt: skip
    assert "test_loop.py is an exception that no test file needs" in found


@pytest.fixture
def source(tmp_path):
    """Writes modules by name; returns their folder."""

    def source(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        return tmp_path

    return source


def test_a_public_name_is_defined_once(source):
    """Or a reader has to look which of them an import brings."""
    own = "def _own(): ...\nT = TypeVar('T')\n"
    folder = source(
        a=f"class Draft: ...\nMOST = 3\n{own}", b=f"def Draft(): ...\nMOST: int = 4\n{own}"
    )

    assert [*LINT["definitions"](folder)] == [
        f"{folder}: a.py, b.py define {name}; rename all but one" for name in ("Draft", "MOST")
    ]


@pytest.mark.parametrize("name", ["gone", "here.gone", "gone()"])
def test_a_name_between_backticks_exists(name, source):
    """A rename leaves the docstrings behind that name what was."""
    folder = source(a=f'def here():\n    """Calls `{name}`."""\n    # as `here`\n')

    (found,) = LINT["references"](folder, [])
    assert found.startswith(f"{folder / 'a.py'}:2: ")


def test_what_is_no_name_of_code_is_left_alone(source):
    """Names in texts of the program, of builtins, of modules and of other folders do exist."""
    folder = source(a='"""`sum`, `a`, `flag`, `json.b`, `--gone`, `x = gone`."""\nf = "flag"', b="")

    assert [*LINT["references"](folder, [])] == []


def test_an_identifier_says_what_a_thing_is(source):
    """Parameters, attributes, functions and constants; public names stay, and so does a word in another."""
    folder = source(
        a="class KeptGenerators:\n    def f(self, told=1):\n        self._kept_best, keeps = told, 2\n"
        "NOTHING_KEPT = _MEND = ENDED = 3\n"
    )

    assert [line.partition(";")[0] for line in LINT["identifiers"](folder)] == [
        f"{folder / 'a.py'}:4: NOTHING_KEPT",
        f"{folder / 'a.py'}:4: _MEND",
        f"{folder / 'a.py'}:2: told",
        f"{folder / 'a.py'}:3: _kept_best",
    ]


def test_only_one_folder_names_types_of_devices(source):
    """Texts for people may; code asks what a device can do."""
    folder = source(
        a='"""On cuda."""\nif x.device.type == "cpu" or y.is_cuda:  # cuda\n    torch.mps.empty_cache()\n',
        importing="torch.version.cuda",
    )
    (folder / "devices").mkdir()
    (folder / "devices" / "b.py").write_text("torch.cuda")

    assert [line.partition(" in ")[0] for line in LINT["devices"](folder)] == [
        f"{folder / 'a.py'}: {found!r}" for found in ("device.type == '", "is_cuda", "torch.mps")
    ]
