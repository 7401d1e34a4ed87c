"""Checks rules of this project that no other linter knows; `tox -e lint` runs it.

    python tools/lint.py [PATH ...]         default: the sources and what documents them

- Words: docstrings, comments, messages and Markdown avoid phrases that a native speaker wouldn't
  write.
- Names: no two files of a source folder share a name; `__init__.py` may. No two modules of `src`
  define the same public name; the `run` and `COMMAND` of each command, and the `GROUP` of those with subcommands, may.
- Identifiers: those of sources avoid words that don't say what a thing is.
- References: a name between backticks in a docstring or comment of `src` exists.
- Tests: a test file is named after the module of `src` that it tests, in the folder of that module.
- Devices: outside of `eventloop.devices`, no code names a type of accelerator or compares one.

Prints a line for each finding, with what to write instead; the exit status is 1 if there are any.
"""

from __future__ import annotations

import ast
import builtins
import collections
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Searched for in strings and comments, each with what to write instead.
_WORDS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"^[rf]*\"\"\"Gives (?!up\b|way\b)", "Returns ..., Yields ..., or what the thing is"),
        (r"\bTells whether\b", "Returns whether ..., or Whether ..."),
        (r"\bTells (that|of)\b", "Called when ..., Called after ..."),
        (
            r"\b([Nn]obody|[Ww]hoever|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
            "the thing: no plugin, the caller, the rank",
        ),
        (r"\b[Mm]end(s|ed|ing)?\b", "fix"),
        (
            r"(?<!here )(?<!hich )\b(is|are) no (?!longer\b|more\b|better than\b|other\b|way\b|need\b)[a-zA-Z]",
            "is not a ..., isn't ...",
        ),
        (r"\bwhich wait\b", "collective: every rank must call it"),
        (r"\bis a yes\b", "also enables it"),
        (r"\b(it|that|they|which) shall\b", "should, must, or the plain verb"),
    )
)
_KINDS = ("*.py", "*.md")
# In identifiers: what could be said of any value, or what only this project would say.
_BANNED = frozenset(
    [
        "anew",
        "anybody",
        "beside",
        "brought",
        "doubts",
        "everybody",
        "glance",
        "kept",
        "mend",
        "nobody",
        "somebody",
        "sooner",
        "standing",
        "survey",
        "surveyed",
        "told",
        "turn",
        "turns",
        "whoever",
    ]
)
# What users and authors of plugins write.
_PUBLIC = {"KeptGenerators", "kept_generators", "takes_turns"}
# Written between backticks in `src` without being a name of ours.
_NAMES_OF_OTHERS = {"EMA", "EVENTLOOP_MAX_DURATION", "EVENTLOOP_MIXUP__ALPHA", "EVENTLOOP_TASK__LR",
                    "Eventloop_EMA", "IO_REPARSE_TAG_MOUNT_POINT", "_alpha", "build_", "pyi", "rank3"}  # fmt: skip
_DEVICE = re.compile(r"\b(\w*cuda\w*|torch\.(?:xpu|mps|mtia)\b|\w+\.type [!=]= [\"'](?!meta|xla))")
# Other packages' own facts, by file.
_DEVICES_OF_OTHERS = {"importing.py": "for which CUDA torchvision's wheel is", "refused.py": "Lightning's names"}  # fmt: skip
_WORD = re.compile(r"\w+")
_NO_CODE = re.compile(
    r'^\s*[rR]?"{3}[\s\S]*?"{3}|(?:^|\s)#\s.*', re.MULTILINE
)  # docstrings, comments
_REFERENCE = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
# Folders and files of `tests` that test no module of `src`, each with the reason.
TESTS_OF_NO_MODULE = {
    "attacks": "tables of attacks on what docs/explanation/promises.md says, on whole runs",
    "benchmarks": "tests of the folder benchmarks",
    "gpu": "what a GPU does, which a machine without one skips at once",
    "tools": "tests of the folder tools",
    "whole": "whole runs and the whole tree: examples, documents, wheels, kills of processes",
}


def words(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, the phrase and what to write instead, for each finding."""
    for start, text in _prose(path):
        for idx, line in enumerate(text.split("\n")):
            for pattern, instead in _WORDS:
                for found in pattern.finditer(line):
                    yield start + idx, found[0].strip(), instead


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TOKENS:
            yield token.start[0], token.string


def names(folder: Path) -> Iterator[str]:
    """Yields a line for each name that two files of a source folder share."""
    by_name = collections.defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            by_name[path.name].append(path.relative_to(folder).as_posix())
    for name, paths in by_name.items():
        if len(paths) > 1:
            yield f"{folder}: {', '.join(paths)} share the name {name}; rename all but one"


def definitions(folder: Path) -> Iterator[str]:
    """Yields a line for each public function, class or value that two modules of a folder define."""
    modules = collections.defaultdict(set)
    for path in sorted(folder.rglob("*.py")):
        of_commands = {"run", "COMMAND", "GROUP"} if "cli" in path.parts else set()
        for name in sorted(_defined(ast.parse(path.read_bytes())) - of_commands):
            if not name.startswith("_"):
                modules[name].add(path.relative_to(folder).as_posix())
    for name, paths in modules.items():
        if len(paths) > 1:
            yield f"{folder}: {', '.join(sorted(paths))} define {name}; rename all but one"


def _defined(module: ast.Module) -> set[str]:
    """Returns the names of a module's functions, classes and values, but for type variables."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            is_variable = "TypeVar" in ast.unparse(node) or "ParamSpec" in ast.unparse(node)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for one in targets if isinstance(one, ast.Name) and not is_variable}
    return names


def identifiers(folder: Path) -> Iterator[str]:
    """Yields a line for each name with a banned word that the code of a folder defines."""
    for path in sorted(folder.rglob("*.py")):
        found: dict[str, int] = {}
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                    found.setdefault(name, node.lineno)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.setdefault(name, node.lineno)
        for name, line in found.items():
            parts = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower().split("_")
            if (banned := _BANNED.intersection(parts)) and name not in _PUBLIC:
                yield f"{path}:{line}: {name}; write: what it is, without {', '.join(sorted(banned))!r}"


def references(folder: Path, others: Iterable[Path]) -> Iterator[str]:
    """Yields a line for each name between backticks that neither code nor texts of code have.

    Args:
        folder: whose docstrings and comments are searched.
        others: folders whose code may have the name, too.
    """
    known = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, *_NAMES_OF_OTHERS}
    for path in (path for one in (folder, *others) for path in one.rglob("*.py")):
        known |= {path.stem, *path.parts, *_WORD.findall(_NO_CODE.sub("", path.read_text("utf-8")))}
    found = (
        (path, line, name)
        for path in sorted(folder.rglob("*.py"))
        for start, text in _documentation(path)
        for line, written in enumerate(text.split("\n"), start)
        for name in _REFERENCE.findall(written)
    )
    for path, line, name in found:
        if not known.issuperset(part for part in name.split(".") if not part.isdecimal()):
            yield f"{path}:{line}: `{name}` doesn't exist; write: the name that it has now"


def _documentation(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of each docstring and comment."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        is_docstring = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
        )
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def devices(folder: Path) -> Iterator[str]:
    """Yields a line for each type of accelerator that the code of a folder names.

    Docstrings and comments may, and the folder `devices`.
    """
    for path in sorted(folder.rglob("*.py")):
        if "devices" in path.parts or path.name in _DEVICES_OF_OTHERS:
            continue
        if not _DEVICE.search(path.read_text("utf-8")):  # to write code out again takes a while
            continue
        for line in ast.unparse(_without_docstrings(path)).split("\n"):
            for found in _DEVICE.finditer(line):
                yield f"{path}: {found[0]!r} in {line.strip()!r}; write: kind_of(device) of eventloop.devices"


def _without_docstrings(path: Path) -> ast.Module:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() if ast.get_docstring(node):
                node.body[0] = ast.Pass()
    return tree


def mirrored(tests: Path, source: Path, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each test file named after no module, and for each exception without a use."""
    unused = set(reasons)
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        exceptions = {name.parts[0], name.as_posix()} & reasons.keys()
        unused -= exceptions
        folder = source / name.parent
        stems = [one.stem.strip("_") for one in folder.glob("*")] if folder.is_dir() else []
        modules = ["init", *stems] if stems else []
        subject = path.stem.removeprefix("test_")
        if not exceptions and not any(f"{subject}_".startswith(f"{one}_") for one in modules):
            yield (
                f"{name.as_posix()} is named after no module of {folder}; "
                "write: test_MODULE.py or test_MODULE_SUBJECT.py, in the module's folder"
            )
    yield from (f"{one} is an exception that no test file needs" for one in sorted(unused))


def main(arguments: list[str]) -> int:
    """Prints the findings; returns the exit status."""
    paths = [Path(one) for one in arguments] or [
        ROOT / "src",
        *ROOT.glob("plugins/*/src"),
        ROOT / "docs",
        *ROOT.glob("*.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
    folders = [one for one in paths if one.is_dir()]
    files = [one for one in paths if not one.is_dir()]
    files += [file for folder in folders for kind in _KINDS for file in folder.rglob(kind)]
    found = [
        f"{file}:{line}: {phrase!r}; write: {instead}"
        for file in sorted(files)
        for line, phrase, instead in words(file)
    ]
    found += [line for folder in folders for line in names(folder)]
    if not arguments:
        found += definitions(ROOT / "src")
        found += references(ROOT / "src", [ROOT / "tests", *ROOT.glob("plugins/*/src")])
        found += mirrored(ROOT / "tests", ROOT / "src" / "eventloop", TESTS_OF_NO_MODULE)
        found += [
            line
            for one in (ROOT / "src", *sorted(ROOT.glob("plugins/*/src")))
            for line in (*identifiers(one), *devices(one))
        ]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
