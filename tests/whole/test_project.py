"""What holds for the whole tree: every plugin package, and every module of the core."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import eventloop
from eventloop.plugin.records import EXTENSIONS, GROUPS

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(one.parent for one in (ROOT / "plugins").glob("*/pyproject.toml"))
SECTIONS = ["What it does", "Install", "Use", "Hooks", "Options", "Cost", "Evidence", "Source"]
SOURCE = ROOT / "src"
# What is named on the command line or imported, and takes part in no run by being installed.
IMPORTED = {
    "eventloop-finetune",
    "eventloop-lightning",
    "eventloop-testing",
    "eventloop-transformers",
}
# Released with the core: it makes trainers and checkpoints for tests.
DEEP = {"eventloop-testing"}

every_plugin = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
every_extension = pytest.mark.parametrize(
    "folder", [one for one in FOLDERS if one.name not in IMPORTED], ids=lambda folder: folder.name
)


def read_toml(path: Path) -> dict:
    return tomllib.loads(path.read_text())


# Plugin packages


def test_every_folder_of_plugins_is_a_package():
    """One without a pyproject.toml would be left out of every other test."""
    folders = [
        one for one in (ROOT / "plugins").iterdir() if one.is_dir() and one.name[0] not in "._"
    ]

    assert sorted(folders) == FOLDERS


@every_extension
def test_folder_distribution_package_and_entry_point_agree(folder):
    """Who knows one name knows all of them."""
    project = read_toml(folder / "pyproject.toml")["project"]
    package, short = folder.name.replace("-", "_"), folder.name.removeprefix("eventloop-")

    assert project["name"] == folder.name
    for group, points in project["entry-points"].items():
        is_named_otherwise = EXTENSIONS.get(group) in ("storage", "option")
        assert group in GROUPS | EXTENSIONS
        for name, value in points.items():
            # In a package of several plugins each is called like its module.
            is_of_module = value.startswith(f"{package}.{name.replace('-', '_')}:")
            assert points.keys() == {short} or is_of_module or is_named_otherwise
        assert {re.split("[:.]", value)[0] for value in points.values()} == {package}
    assert [one.parent.name for one in (folder / "src").glob("*/__init__.py")] == [package]


@every_plugin
def test_a_plugin_requires_the_core_by_its_distribution(folder):
    """An unrelated `eventloop` stands on PyPI."""
    project = read_toml(folder / "pyproject.toml")["project"]
    required = [re.split(r"[^\w-]", one)[0] for one in project["dependencies"]]

    assert "torch-eventloop" in required
    assert "eventloop" not in required


PUBLIC = r"eventloop(\.(commands|devices|schedules|storage|toolbox))?|eventloop_\w+(\.\w+)*"


def deep_imports(source: str) -> list[str]:
    """Returns what code imports of eventloop that isn't public, for type checkers, too."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = [one.module for one in found if (one.module or "").startswith("eventloop")]
    return [name for name in names if not re.fullmatch(PUBLIC, name)]


@every_plugin
def test_a_plugin_imports_what_is_public(folder):
    """import-linter leaves out what type checkers alone read, which a move would break as well."""
    sources = sorted((folder / "src").rglob("*.py"))
    is_deep = any(deep_imports(path.read_text()) for path in sources)

    assert is_deep == (folder.name in DEEP)


def test_an_import_of_what_is_private_would_be_found():
    """Control."""
    source = "if TYPE_CHECKING:\n    from eventloop.checkpoint import checkpoint_files\nfrom eventloop import Task"

    assert deep_imports(source) == ["eventloop.checkpoint"]


@every_plugin
def test_a_plugin_is_typed_and_tested(folder):
    """Its `py.typed` is part of the wheel, its tests are part of the project's."""
    package = folder.name.replace("-", "_")
    tools = read_toml(folder / "pyproject.toml")["tool"]["setuptools"]

    assert (folder / "src" / package / "py.typed").is_file()
    assert tools["package-data"][package][0] == "py.typed"
    assert list((folder / "tests").glob("test_*.py"))


@every_plugin
def test_a_readme_has_the_sections_of_all_readmes(folder):
    """A reader finds cost and evidence of every method in the same place."""
    assert sections_of((folder / "README.md").read_text()) == SECTIONS


@every_plugin
def test_the_list_of_plugins_has_a_row_for_each(folder):
    """A package that isn't listed isn't found."""
    rows = (ROOT / "plugins" / "README.md").read_text()

    assert f"| [{folder.name}]({folder.name}) |" in rows


def test_the_standard_installation_names_packages_and_what_they_need():
    """From a clone, pip looks for a package of this repository in an index unless it is named."""
    lines = (ROOT / "plugins" / "standard.txt").read_text().splitlines()[1:]
    folders = [ROOT / line for line in lines]
    needed = {
        re.split(r"[^\w-]", one)[0]
        for folder in folders
        for one in read_toml(folder / "pyproject.toml")["project"]["dependencies"]
    }

    assert {one for one in needed if one.startswith("eventloop-")} <= {one.name for one in folders}


def sections_of(text: str) -> list[str]:
    """Returns the headings of the second level, but for what looks like one in a code block."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^## (.+?) *$", prose, flags=re.MULTILINE)


def test_sections_are_not_read_from_code():
    """A comment in a shell snippet is not a heading."""
    assert sections_of("# A\n## One\n```\n## no\n```\n### deeper\n## Two \n") == ["One", "Two"]


@every_extension
def test_an_extension_imports_public_modules_alone(folder):
    """What lies deeper moves without notice."""
    groups = read_toml(folder / "pyproject.toml")["project"]["entry-points"]
    imported = {
        node.module
        for path in (folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "eventloop"
    }

    is_public = all(re.fullmatch(PUBLIC, str(one)) for one in imported)
    assert groups.keys() <= GROUPS.keys() or folder.name in DEEP or is_public


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_mypy_checks_every_plugin(folder):
    """Strictly typed means all of it; of a package without `__init__.py` it wouldn't know the name."""
    mypy = read_toml(ROOT / "pyproject.toml")["tool"]["mypy"]

    assert mypy["files"] == ["src", "plugins/*/src"]
    assert (folder / "src" / folder.name.replace("-", "_") / "__init__.py").is_file()


# Imports


def run_time_imports(source: str) -> Iterator[str]:
    """Yields the modules that a file imports when it runs, not those that type checkers read.

    Of `from a.b import c` both `a.b` and `a.b.c`, which may be a module, too.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCE.rglob("*.py")}
IMPORTS = {name: set(run_time_imports(path.read_text())) for name, path in MODULES.items()}
LEAVES = {
    f"eventloop.{name}"
    for name in ("events", "actions", "hook_markers", "clock", "forms", "safe_text", "errors")
}


def importers_of(prefix: str) -> set[str]:
    """Returns the modules that import a module or anything inside it, but for those inside it."""
    return {
        name
        for name, imported in IMPORTS.items()
        if any(f"{one}.".startswith(f"{prefix}.") for one in imported)
        and not f"{name}.".startswith(f"{prefix}.")
    }


def test_imports_are_read_wherever_they_stand():
    """An import inside a function runs, too; what only types need doesn't."""
    source = (
        "import a.b\n"
        "from c import d\n"
        "if TYPE_CHECKING:\n    import no\n"
        "else:\n    import e\n"
        "def f():\n    from g.h import i\n"
    )

    assert set(run_time_imports(source)) == {"a.b", "c", "c.d", "e", "g.h", "g.h.i"}


def test_the_source_is_what_runs():
    """The rules below are read from files; they must be those that were tested."""
    assert "eventloop.trainer" in MODULES
    assert IMPORTS["eventloop.trainer"] >= {"eventloop.run.open", "torch"}
    assert Path(eventloop.__file__).read_text() == MODULES["eventloop"].read_text()


def test_imports_go_round_in_no_circle():
    """A module can be read, tested and replaced knowing only those below it."""
    graph = {name: imported & MODULES.keys() - {name} for name, imported in IMPORTS.items()}

    TopologicalSorter(graph).prepare()

    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"eventloop.errors": {"eventloop.cli.fit"}}).prepare()


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("eventloop.cli", {"eventloop.__main__", "eventloop.commands"}),
        (
            "eventloop.trainer",
            {"eventloop.cli", "eventloop.dry_run", "eventloop_testing"},
        ),
        ("eventloop.loop", {"eventloop.run"}),
    ],
)
def test_imports_point_one_way(module, allowed):
    """From cli to trainer to loop; what is called doesn't know who calls."""
    importers = importers_of(module)

    assert importers
    assert {one for one in importers if not one.startswith(tuple(allowed))} == set()


def test_the_leaves_import_nothing_but_each_other():
    """Hooks, time and errors are words that everything else is made of."""
    found = {
        (name, one)
        for name in LEAVES
        for one in IMPORTS[name]
        if one.startswith(("eventloop", "torch")) and not one.startswith(tuple(LEAVES))
    }

    assert found == set()


def test_the_leaves_come_without_torch(run_python):
    """Not even through what they import: `eventloop plugins` would wait for it."""
    done = run_python(f"import sys, {', '.join(sorted(LEAVES))}; print('torch' in sys.modules)")

    assert (done.stdout, done.stderr) == ("False\n", "")


_EVERY_MODULE = """
import importlib, pkgutil, sys
import eventloop
for module in pkgutil.walk_packages(eventloop.__path__, "eventloop."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*{"torch._dynamo", "torch._inductor", "transformers", "matplotlib"} & set(sys.modules))
"""


def test_no_module_imports_the_compiler_of_torch(run_python):
    """It takes longer to import than all of the core; the first optimizer that is made imports it, too."""
    done = run_python(_EVERY_MODULE)

    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_core_imports_no_plugin():
    """What the core can do, a plugin can; what a plugin does, the core needn't know."""
    packages = {one.name.replace("-", "_") for one in FOLDERS}

    assert {name: importers_of(name) for name in packages} == {name: set() for name in packages}


# Tests


def untested(source: Path, tests: Path) -> list[str]:
    """Returns the modules without a test file of their name; those of less than 15 lines need none."""
    missing = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        # The test of the longest name that fits: `test_order_rules.py` tests `order_rules`, not `order`.
        modules = [one.stem.strip("_") for one in path.parent.glob("*.py")]
        files = [f"{one.stem}_" for one in (tests / place.parent).glob("test_*.py")]
        subjects = {
            max((one for one in modules if file.startswith(f"test_{one}_")), key=len, default="")
            for file in files
        }
        if path.stem.strip("_") not in subjects and len(path.read_text().splitlines()) >= 15:
            missing.append(place.as_posix())
    return missing


def test_every_module_has_a_test_file_of_its_name():
    """Who changes a module finds its tests, and sees which of its claims nothing holds yet."""
    assert untested(SOURCE / "eventloop", ROOT / "tests") == []


def test_a_module_without_tests_would_be_found(tmp_path):
    """Control."""
    source, tests = tmp_path / "src", tmp_path / "tests"
    for name in ("plugin/order", "plugin/configured_order", "plugin/__init__", "loop"):
        path = source / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * (14 if name == "loop" else 15))
    (tests / "plugin").mkdir(parents=True)
    (tests / "plugin" / "test_configured_order_of_a_site.py").touch()

    assert untested(source, tests) == ["plugin/__init__.py", "plugin/order.py"]


# Words and names


@pytest.fixture
def lint():
    return runpy.run_path(str(ROOT / "tools" / "lint.py"))["main"]


@pytest.mark.nightly
def test_the_tree_is_free_of_what_lint_finds(lint, capsys):
    """Plain English, and a name that stands for one subject."""
    assert (lint([]), capsys.readouterr().out) == (0, "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('def mean():\n    """Gives the mean."""\n', '"""Gives'),
        ('raise KeyError(f"nobody has {name}")\n', "nobody"),
        ("# Somebody must.\n", "Somebody"),
        ('"""One.\n\nTells that it ends.\n"""\n', "Tells that"),
        ('text = "it is no number"\n', "is no n"),
    ],
)
def test_lint_finds_a_phrase(source, phrase, lint, tmp_path, capsys):
    """In docstrings, messages and comments."""
    path = tmp_path / "a.py"
    path.write_text(source)

    assert lint([str(path)]) == 1
    assert f"{phrase!r}; write: " in capsys.readouterr().out


def test_lint_reads_markdown(lint, tmp_path, capsys):
    """Documents are read more than docstrings."""
    (tmp_path / "a.md").write_text("# One\n\nWhoever reads this.\n")

    assert lint([str(tmp_path)]) == 1
    assert "a.md:3: 'Whoever'" in capsys.readouterr().out


def test_lint_reads_no_code(lint, tmp_path):
    """A variable may have any name."""
    (tmp_path / "a.py").write_text("nobody = 1  # counted\n")

    assert lint([str(tmp_path)]) == 0


def test_lint_finds_two_files_of_one_name(lint, tmp_path, capsys):
    """Only packages share one."""
    for name in ("a/order.py", "b/order.py", "a/__init__.py", "b/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert lint([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("\n") == 1


def private_reads(source: str) -> list[str]:
    """Returns what code reads or writes of a State that starts with an underscore."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [
        one.attr
        for one in found
        if one.attr.startswith("_")
        and not one.attr.startswith("__")
        and getattr(one.value, "id", getattr(one.value, "attr", "")) == "state"
    ]


def test_what_is_private_of_the_state_has_no_reader_outside():
    """Another file that builds on it would keep it from changing."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    others = [path for path in files if path.name != "state.py"]

    assert [path for path in others if private_reads(path.read_text())] == []


def test_a_reader_of_what_is_private_would_be_found():
    """Control."""
    assert private_reads("state._again = self.state._plugins['ema']") == ["_again", "_plugins"]


# A release


def test_a_release_refuses_what_is_still_to_be_filled_in(tmp_path):
    """The page of a package would tell its readers to clone nothing; templates of a new plugin are no such page."""
    placeholders = runpy.run_path(str(ROOT / "tools/release.py"))["placeholders"]
    (tmp_path / "docs/how-to").mkdir(parents=True)
    (tmp_path / "plugins/eventloop-a/src").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "# A\n\n$ git clone @REPOSITORY@\nwho@example.org @hookimpl\n"
    )
    (tmp_path / "docs/how-to/a.md").write_text("fine\n")
    (tmp_path / "plugins/eventloop-a/README.md").write_text("see @REPOSITORY@\n")
    (tmp_path / "plugins/eventloop-a/src/template.py").write_text("@NAME@\n")

    assert placeholders(tmp_path) == [
        "README.md:3: @REPOSITORY@",
        "plugins/eventloop-a/README.md:1: @REPOSITORY@",
    ]


def test_only_the_site_waits_for_the_address_of_the_repository():
    """A reader couldn't run a command with a placeholder; the release fills in the site's link."""
    placeholders = runpy.run_path(str(ROOT / "tools/release.py"))["placeholders"]

    assert {line.partition(":")[0] for line in placeholders(ROOT)} <= {"mkdocs.yml"}
