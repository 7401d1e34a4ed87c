"""What is imported when, and what is said where a library is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from lora_cases import trainer_of

from eventloop import EventloopError
from eventloop_llm.chats.rows import read_rows
from eventloop_llm.extras import EXTRA_OF, optional_module
from eventloop_llm.hf_checkpoints import HfCheckpoints
from eventloop_llm.lora import Lora

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))[
    "project"
]
LIBRARIES = {"transformers", "tokenizers", "peft", "datasets", "pyarrow", "jinja2", "trl"}


def imported_by(code: str) -> set[str]:
    """Returns the libraries that a new process imports."""
    code += f"\nprint(*{LIBRARIES!r} & set(sys.modules))"
    command = [sys.executable, "-c", f"import sys\n{code}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


def test_a_plugin_that_is_off_imports_no_library():
    """They take a second or more, of each command where the package is installed."""
    plugins = [
        target
        for group in ("algorithms", "callbacks")
        for target in PROJECT["entry-points"][f"eventloop.{group}"].values()
    ]
    modules = ", ".join(target.partition(":")[0] for target in plugins)

    assert len(plugins) == 3
    assert imported_by(f"import eventloop, {modules}") == set()
    assert imported_by("import jinja2") == {"jinja2"}


def test_a_command_that_lists_plugins_imports_no_library():
    """All installed packages are in its list."""
    assert {one.name for one in entry_points(group="eventloop.algorithms")} >= {"grpo", "lora"}

    code = "from eventloop.cli import main; assert main(['plugins']) == 0"

    assert imported_by(code) == set()


@pytest.fixture
def missing(monkeypatch):
    """Makes libraries impossible to import."""

    def hide(*modules):
        for module in [*sys.modules]:
            if module.partition(".")[0] in modules:
                monkeypatch.delitem(sys.modules, module)
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


def test_data_that_a_library_would_read_name_its_extra(missing, tmp_path):
    """A file of JSON lines needs none."""
    missing("pyarrow", "datasets")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "folder").mkdir()

    assert read_rows(tmp_path / "rows.jsonl")[0] == [{"text": "a"}]
    for name, library in (("rows.parquet", "pyarrow"), ("folder", "datasets")):
        with pytest.raises(EventloopError, match=f"{name} needs {library}") as caught:
            read_rows(tmp_path / name)
        assert "pip install 'eventloop-llm[data]'" in str(caught.value)


def test_an_adapter_without_peft_names_its_extra(missing, tmp_path):
    """Before anything is trained."""
    missing("peft")

    with pytest.raises(EventloopError, match="lora needs peft, which isn't installed") as caught:
        with trainer_of(tmp_path, Lora(r=2, target_modules=["q_proj"])):
            pass

    assert "pip install 'eventloop-llm[lora]'" in str(caught.value)


def test_a_store_without_its_package_names_its_extra(missing, tmp_path):
    """Before the first checkpoint."""
    missing("eventloop_remote")
    folders = HfCheckpoints(store="memory://folders")

    with pytest.raises(EventloopError, match="needs eventloop-remote") as caught:
        with trainer_of(tmp_path, callbacks=[folders]) as trainer:
            trainer.fit()

    assert "pip install 'eventloop-llm[remote]'" in str(caught.value)


def test_a_library_that_is_there_but_broken_is_another_error(tmp_path, monkeypatch):
    """Installing it again wouldn't help."""
    (tmp_path / "peft.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        optional_module("peft", "lora")


def test_each_extra_is_in_the_project():
    """A message that names another would install nothing."""
    assert set(EXTRA_OF.values()) == PROJECT["optional-dependencies"].keys()
    for library, extra in EXTRA_OF.items():
        required = PROJECT["optional-dependencies"][extra]
        assert any(one.startswith(library.replace("_", "-")) for one in required)
