"""Writes the pages of `docs/reference/` from the docstrings, so that they can't disagree.

python docs/build_reference.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import eventloop
import eventloop_testing
from eventloop import actions, devices, events, storage, toolbox
from eventloop.config.settings import setting_options
from eventloop.hook_markers import Hook

HERE = Path(__file__).parent / "reference"
_KEYWORDS = ("Fires", "State", "May", "Must not", "Asked", "Answer", "Args")
MADE = "<!-- made by docs/build_reference.py; edit the docstrings instead -->"


def pages() -> dict[str, str]:
    """Returns the text of each page by its file name."""
    return {
        "events.md": _page(
            "Events, questions and collections",
            events,
            _hook_sections(events.EVENTS_AND_QUESTIONS, events.Events),
        ),
        "actions.md": _page("Actions", actions, _hook_sections(actions.ACTIONS, actions.Actions)),
        "settings.md": _settings_page(),
        "toolbox.md": _toolbox_page(),
    }


def _page(title: str, module: object, sections: Iterator[str]) -> str:
    doc = inspect.getdoc(module) or ""
    intro = doc.partition("\n\n")[2]
    return "\n".join([f"# {title}", "", MADE, "", intro, "", *sections]).rstrip() + "\n"


def _hook_sections(hooks: Mapping[str, Hook], namespace: type) -> Iterator[str]:
    for name, hook in hooks.items():
        signature = inspect.signature(getattr(namespace, name))
        arguments = ", ".join(
            str(one).replace("'", "")
            for one in list(signature.parameters.values())[1:]
        )  # fmt: skip
        result = str(signature.return_annotation)
        facts = [hook.kind, f"per {hook.per}" if hook.per != "any" else "at any time"]
        if hook.closes:
            facts.append(f"closes `{hook.closes}`")
        if hook.since:
            facts.append(f"since {hook.since}")
        yield f"## {name}\n\n```python\ndef {name}({arguments}) -> {result}\n```\n"
        yield f"*{', '.join(facts)}*\n"
        yield _contract(hook.doc)


def _contract(doc: str) -> str:
    """Makes a list of the lines of a contract, each of which starts with its keyword."""
    lines: list[str] = []
    for line in doc.splitlines():
        keyword, colon, rest = line.partition(":")
        text = line.strip()
        if colon and keyword in _KEYWORDS:
            lines.append(f"- **{keyword}:**{rest}")
        elif colon and keyword.strip().isidentifier() and line.startswith("    "):
            lines.append(f"  - `{keyword.strip()}`:{rest}")
        else:
            lines.append(f"  {text}" if text and lines and lines[-1].strip()[:1] == "-" else text)
    return "\n".join(lines) + "\n"


def _settings_page() -> str:
    rows = [
        "# Settings",
        "",
        MADE,
        "",
        "How a task is trained. Each is a keyword of `Trainer`, a flag of `eventloop fit`, a",
        "variable `EVENTLOOP_NAME`, an entry of `--config` files and of `[tool.eventloop]` in",
        "`pyproject.toml`, and may be brought by the task. Where several say something, the first of",
        "this list wins: flag or keyword, environment, `--config`, `pyproject.toml`, task, default.",
        "",
        "| setting | type | default | |",
        "| --- | --- | --- | --- |",
    ]
    for option in setting_options().values():
        kind = option.type_name.replace("|", "\\|")
        rows.append(f"| `{option.name}` | {kind} | `{option.default}` | {option.doc} |")
    return "\n".join(rows) + "\n"


def _toolbox_page() -> str:
    rows = [
        "# What plugins import",
        "",
        MADE,
        "",
        "These modules are public: a plugin that imports nothing else goes on working when the core is",
        "rearranged. import-linter holds the packages of `plugins/` to them. Their docstrings have the",
        "arguments. A package that adds a command imports `eventloop.commands`, too, which",
        "[its own page](../how-to/add-a-command.md) lists.",
        "",
    ]
    for module in (eventloop, devices, toolbox, storage, eventloop_testing):
        rows += [f"## `{module.__name__}`", "", _first_line(module), ""]
        subjects = _toolbox_subjects() if module is toolbox else {"": module.__all__}
        for subject, names in subjects.items():
            rows += [subject, ""] * bool(subject) + ["| | |", "| --- | --- |"]
            rows += [f"| `{name}` | {_line_of(module, name)} |" for name in names] + [""]
    return "\n".join(rows).rstrip() + "\n"


def _toolbox_subjects() -> dict[str, list[str]]:
    """Returns the names of the toolbox by the comment above them in its stub file."""
    stub = Path(toolbox.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    parts = re.split(r"^# (.+)\n(?=from)", stub, flags=re.MULTILINE)[1:]
    names = [sorted(re.findall(r"\bas (\w+)", part)) for part in parts[1::2]]
    return dict(zip(parts[::2], names, strict=True))


def _line_of(module: ModuleType, name: str) -> str:
    """Returns what an export is: its docstring's first line, or a constant's in the module's."""
    constant = re.search(rf"^    {name}: (.*)", module.__doc__ or "", re.MULTILINE)
    return constant[1] if constant else _first_line(getattr(module, name))


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("|", "\\|")


def main() -> None:
    """Writes every page."""
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
