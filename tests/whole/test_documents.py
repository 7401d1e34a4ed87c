"""Every example of the documents is executed: Python, commands and configuration.

A fenced block in one of the languages below is run, those of a page one after the other in a folder
of its own, which has `examples/` and the first example as `task.py`. What a reader needn't see comes
before in a comment, `<!-- python` or `<!-- console`, up to `-->`. The few blocks that can't be run
are marked, with the reason: `<!-- not run: needs a store in the cloud -->` on the line before.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from eventloop.cli import main
from eventloop.config.configuration import Configuration
from eventloop.config.plugin_rules import KEYS
from eventloop.config.settings import SETTING_NAMES
from eventloop.plugin.records import EXTENSIONS, GROUPS
from eventloop_testing import check_plugin, tiny_task

ROOT = Path(__file__).parents[2]
# What is made of docstrings or says what came of a decision has no examples.
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md")
    for path in ROOT.glob(pattern)
    if path.parent.name not in ("reference", "decisions") and path.name != "CHANGELOG.md"
)
LANGUAGES = ("python", "console", "bash", "toml", "yaml")
# Pages of which the blocks take long, for a night; what they say is tested elsewhere, too.
SLOW = {
    "docs/how-to/everyday-modes.md",
    "docs/how-to/see-what-plugins-do.md",
    "docs/how-to/train-on-several-devices.md",
    "docs/how-to/train-on-several-gpus.md",
    "plugins/eventloop-mlflow/README.md",
}
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>.+?) -->\n(?P=indent))?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- (?P<hidden>\w+)\n(?P<before>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
# A run of an example is short, and alike wherever it is.
SHORT = {"EVENTLOOP_DEVICE": "cpu", "EVENTLOOP_MAX_DURATION": "4ba"}


@dataclass(frozen=True)
class Block:
    """An example: its language, text and line, and why it isn't run, if so."""

    language: str
    text: str
    line: int
    reason: str = ""


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        language = found["language"] or found["hidden"]
        if language in LANGUAGES:
            example = found["text"] if found["before"] is None else found["before"]
            yield Block(language, textwrap.dedent(example), line, found["reason"] or "")


def pages() -> list[object]:
    marked = [
        pytest.param(one, marks=[pytest.mark.nightly] if one in SLOW else []) for one in PAGES
    ]
    return [one for one in marked if any(blocks(one.values[0]))]


class Session:
    """Runs the blocks of a page.

    Args:
        page: named in messages.
        capsys: of pytest; what commands print is compared.
    """

    def __init__(self, page: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.page = page
        self.module = ModuleType("page")
        self.names = vars(self.module)
        self.names["task"] = tiny_task()
        self._capsys = capsys

    def run(self, block: Block) -> None:
        """Runs a block; what is named `# file.py` on its first line becomes that file."""
        if named := re.match(r"# ([\w/.-]+\.(?:py|toml|yaml))\n", block.text):
            Path(named[1]).write_text(block.text)
        getattr(self, f"_{block.language}")(block)

    def _python(self, block: Block) -> None:
        code = "\n" * (block.line - 1) + block.text
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing to train")  # it is as short as another was
            exec(compile(code, str(ROOT / self.page), "exec"), self.names)

    def _console(self, block: Block) -> None:
        text = block.text.replace("\\\n", " ")
        for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, output = example.partition("\n")
            self._command(line, output)

    def _bash(self, block: Block) -> None:
        for line in block.text.replace("\\\n", " ").splitlines():
            self._command(line, "")

    def _toml(self, block: Block) -> None:
        content = tomllib.loads(block.text)
        if "project" in content:
            project = content["project"]
            _install(project["name"], project["version"], project.get("entry-points", {}))
        if "tool" in content:
            Path("pyproject.toml").write_text(block.text)
            configuration = Configuration.read(environ={})
            set_there = content["tool"]["eventloop"].keys()
            assert set_there <= {*KEYS, *SETTING_NAMES, "plugins", "task", "watch"}
            found = vars(configuration.settings())
            assert all(str(found[one]) for one in set_there & found.keys())
            Path("pyproject.toml").unlink()

    def _yaml(self, block: Block) -> None:
        Path("run.yaml").write_text(block.text)
        Configuration.read(config_file=Path("run.yaml")).settings()

    def _command(self, line: str, output: str) -> None:
        """Runs a line of the shell, or checks what it names where it isn't ours to run."""
        for part in line.partition(" #")[0].split("&&"):
            words = shlex.split(part)
            match words:
                case []:
                    pass
                case ["eventloop", *argv]:
                    self._eventloop(argv, output)
                case ["python", "-m", "pip", "install", *argv]:
                    self._installs(argv)
                case ["python", "-m", "pytest", *argv]:
                    assert all((ROOT / one).exists() for one in argv if one.startswith("tests"))
                case ["torchrun", *argv]:  # tests/distributed starts it
                    assert "eventloop" in argv or Path(argv[-1]).exists()
                case ["python", script, *argv] if script.startswith("benchmarks/"):
                    known = (ROOT / script).read_text()
                    assert all(
                        f'"{one}"' in known
                        for one in argv
                        if re.match(r"--\w", one) and one != "--compile"
                    )
                case _:
                    raise AssertionError(f"{self.page}: no way is known to run {part!r}; mark it")

    def _eventloop(self, argv: list[str], output: str) -> None:
        target = None
        if ">" in argv:
            argv, target = argv[: argv.index(">")], argv[argv.index(">") + 1]
        self._capsys.readouterr()  # earlier blocks have printed, too
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run of four batches warns of what it isn't
            status = main(argv)
        found = self._capsys.readouterr()
        if target:
            Path(target).write_text(found.out)
        failure = re.match(r"(\w+Error: .*)", output)
        if failure:
            assert status == 2
            assert failure[1] in found.err
        else:
            assert status == 0 or "diff" in argv, f"{self.page}: {argv}: {found.out}{found.err}"

    def _installs(self, argv: list[str]) -> None:
        assert [*argv, ""][0] != ""
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in argv:
            path, _, extra = word.partition("[")
            if path.startswith((".", "plugins/", "constraints")):
                assert (ROOT / path).exists(), f"{self.page}: {word} isn't there"
            if path == ".":
                assert not extra or extra.rstrip("]") in extras["optional-dependencies"]


def _install(name: str, version: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Writes what pip would write beside the package, which is in this folder."""
    folder = Path(f"{name.replace('-', '_')}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert entry_points.keys() <= {*GROUPS, *EXTENSIONS}
    lines = [
        line
        for group, names in entry_points.items()
        for line in (f"[{group}]", *(f"{one} = {value}" for one, value in names.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()


@pytest.fixture
def documented(clean, monkeypatch):
    """An empty folder as a reader of the documents has it, with runs that are short."""
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copy("examples/digits.py", "digits.py")
    shutil.copy("examples/digits.py", "task.py")
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    for folder in (*ROOT.glob("plugins/*/src"), Path.cwd()):
        monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield clean
    for name in sys.modules.keys() - known:
        if str(clean) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_run(page, documented, capsys, monkeypatch, request):
    """What is copied from a page works; tests that it shows pass."""
    session = Session(page, capsys)
    monkeypatch.setitem(sys.modules, "page", session.module)
    if page.startswith("plugins/"):  # of a plugin alone, whatever else is installed
        monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")

    for block in blocks(page):
        if not block.reason:
            session.run(block)

    for name, function in list(session.names.items()):
        if name.startswith("test_") and inspect.isfunction(function):
            fixtures = inspect.signature(function).parameters
            function(**{one: request.getfixturevalue(one) for one in fixtures})


@pytest.mark.nightly
def test_the_quick_start_prints_the_number_that_it_promises(documented, capsys, monkeypatch):
    """A reader compares the first number that comes out with the page's."""
    monkeypatch.delenv("EVENTLOOP_MAX_DURATION")
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    page = "docs/quick-start.md"
    promised = re.search(r"accuracy on the test set, ([\d.]+)", (ROOT / page).read_text())[1]

    Session(page, capsys).run(next(one for one in blocks(page) if not one.reason))

    printed = capsys.readouterr().out.split()[-1]
    assert abs(float(printed) - float(promised)) < 0.015


# The plugins of the documents that are checked with every change, the others at night; and those that
# another test has, since they need more than a tiny task.
QUICK = ("GradientNoise",)
TESTED_ELSEWHERE = {
    "Adversarial": "test_examples.py, on two ranks",
    "Warmed": "its page trains with it",
    "Imitates": "its page trains with it",
    "Pieces": "its page trains with it",
    "Samples": "its page trains with it, and evaluates",
    "L1": "test_docs.py: it extends another plugin",
    "NoWeight": "test_docs.py: it extends another plugin",
    "Swap": "test_docs.py: it requires another plugin",
    "SavesElsewhere": "test_docs.py: its checkpoints aren't found by themselves",
    "OnlyImages": "test_docs.py: it refuses other tasks",
}


def plugins_of(page: str) -> Iterator[str]:
    """Yields the classes on a page that implement hooks."""
    for block in blocks(page):
        for found in re.finditer(
            r"^class (\w+)[^\n]*:\n((?:    .*\n|\n)*)", block.text, re.MULTILINE
        ):
            if block.language == "python" and "@hookimpl" in found[2] and not block.reason:
                yield found[1]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        pytest.param(page, name, marks=[] if name in QUICK else [pytest.mark.nightly])
        for page in PAGES
        for name in dict.fromkeys(plugins_of(page))
        if name not in TESTED_ELSEWHERE and page.startswith(("docs/", "README"))
    ],
)
def test_a_plugin_of_the_documents_is_what_every_plugin_must_be(
    page, name, documented, capsys, monkeypatch
):
    """Whoever writes one begins with a copy."""
    session = Session(page, capsys)
    monkeypatch.setitem(sys.modules, "page", session.module)
    for block in blocks(page):
        if block.language == "python" and not block.reason:
            session.run(block)
            if re.search(rf"^class {name}\b", block.text, re.MULTILINE):
                break

    own = block.text[re.search(rf"^class {name}\b", block.text, re.MULTILINE).start() :]
    own = own.partition("\nclass ")[0]
    role = "callback" if "state: StateView" in own and "state: State)" not in own else "algorithm"
    check_plugin(session.names[name], role=role)


def test_few_examples_are_not_run_and_each_says_why():
    """A mark is for what needs a machine, a store or a night, not for what is broken."""
    left_out = [(page, block) for page in PAGES for block in blocks(page) if block.reason]

    assert all(len(block.reason) > 10 for _, block in left_out)
    assert len(left_out) <= 25
