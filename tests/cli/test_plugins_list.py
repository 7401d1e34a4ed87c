"""`eventloop plugins`."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"
BROKEN = "1 / 0\nclass Plugin: pass"  # what only importing shows


def test_every_plugin_is_a_row(run, install):
    """Name, role, version, distribution, status and reason are what a person wants to know."""
    install("aa-test", BROKEN, version="0.3")
    install("bb-test", BROKEN, group="eventloop.callbacks")

    ran = run("plugins", "-p", "no:bb-test")
    rows = [line.split() for line in ran.out.splitlines()]

    assert rows[0] == ["name", "role", "version", "distribution", "status", "reason", "marks"]
    assert ["aa-test", "algorithm", "0.3", "eventloop-aa-test", "active"] in rows
    assert ["bb-test", "callback", "1.0", "eventloop-bb-test", "off", "-p", "no:bb-test"] in rows


def test_json_has_the_same_rows(run, install):
    """Scripts read it."""
    install("aa-test", BROKEN)

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json", "--no-plugins").out)}

    assert rows["aa-test"] == {
        "name": "aa-test",
        "role": "algorithm",
        "version": "1.0",
        "distribution": "eventloop-aa-test",
        "status": "off",
        "reason": "--no-plugins",
        "marks": [],
    }


def test_what_nobody_asked_for_is_marked(run, install):
    """It trains along, although it came in with something else."""
    install("aa-test", requested=False)

    ran = run("plugins")
    (row,) = [line for line in ran.out.splitlines() if line.startswith("aa-test")]

    assert row.endswith("dependency")


def test_a_requirement_that_nothing_meets_is_a_row(run, install, clean):
    """The list shows what `fit` would refuse."""
    install("aa-test")
    (clean / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["nosuch", "aa-test>2"]\n')

    ran = run("plugins", "--json")
    rows = {row["name"]: row for row in json.loads(ran.out)}

    assert ran.status == 0
    assert rows["nosuch"]["reason"].startswith("nosuch is required, but no plugin has this name")
    assert rows["aa-test"]["reason"] == "aa-test>2 is required, but 1.0 is installed"


def test_the_list_never_fails_because_of_a_plugin(run, install):
    """It is where one looks when something is wrong."""
    install("task")
    install("twin-test", distribution="one")
    install("twin-test", distribution="two")

    ran = run("plugins", "--json")
    status = {row["name"]: row["status"] for row in json.loads(ran.out)}

    assert ran.status == 0
    assert status["task"] == status["twin-test"] == "problem"


@pytest.mark.parametrize("argv", [["-p", "mixpu-tset"], ["--bogus", "1"], ["tiny.py"]])
def test_wrong_usage_is_refused(run, clean, argv):
    """A name that matches nothing, an option that isn't one, a TASK."""
    assert run("plugins", *argv).status == 2


def test_the_choice_is_read_from_the_project(run, install, clean):
    """The list must say what `fit` would do."""
    install("aa-test")
    (clean / "pyproject.toml").write_text("[tool.eventloop]\nautoload = false\n")

    assert "autoload=false, pyproject.toml" in run("plugins").out


def test_neither_torch_nor_a_plugin_nor_a_parser_is_imported(install, tmp_path):
    """Each costs more than the answer may take."""
    install("aa-test", BROKEN)
    code = (
        "import sys; from eventloop.cli import main; status = main(['plugins', 'list']); "
        "heavy = {'torch', 'jsonargparse', 'yaml', 'numpy', 'rich', 'eventloop_aa_test_module'}; "
        "sys.exit(status or ' '.join(heavy & set(sys.modules)) or None)"
    )
    source = str(Path(sys.modules["eventloop"].__file__).parents[1])
    paths = os.pathsep.join([str(tmp_path / "site"), source])

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "aa-test" in done.stdout


def test_a_module_is_a_row(run, install):
    """An entry point may name one."""
    install("aa-test", "from eventloop import hookimpl\n", target="")

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json").out)}

    assert rows["aa-test"]["status"] == "active"


@pytest.mark.parametrize("parameters", ["*, teacher: str, x: int = 1", "teacher"])
def test_a_dormant_plugin_is_off_in_the_list(run, install, parameters):
    """As far as its file tells; nothing is imported."""
    install("aa-test", f"1 / 0\nclass Plugin:\n    def __init__(self, {parameters}): pass\n")

    def seen(*argv):
        rows = json.loads(run("plugins", "--json", *argv).out)
        return next((row["status"], row["reason"]) for row in rows if row["name"] == "aa-test")

    assert seen() == ("off", "waiting for --aa-test.teacher")
    assert seen("-p", "aa-test") == ("problem", "needs --aa-test.teacher")


def test_a_plugin_that_one_of_several_options_wakes_is_off_in_the_list(run, install):
    """As a run says it, with nothing imported."""
    source = "class Plugin:\n    wakes_with = ('one', 'other')\n    def __init__(self, *, one=1, other=2): pass\n"
    install("aa-test", f"1 / 0\n{source}def __getattr__(name): raise AttributeError(name)\n")

    def seen(*argv):
        rows = json.loads(run("plugins", "--json", *argv).out)
        return next((row["status"], row["reason"]) for row in rows if row["name"] == "aa-test")

    assert seen() == ("off", "waiting for --aa-test.one or --aa-test.other")
    assert seen("-p", "aa-test")[0] == "active"


def test_the_list_shows_a_shadowed_distribution(run, install, tmp_path):
    """Which of two versions trains depends on a path."""
    install("aa-test")
    stale = tmp_path / "stale" / "eventloop_aa_test-0.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: eventloop-aa-test\nVersion: 0.9\n"
    )
    sys.path.append(str(stale.parent))

    rows = {row["name"]: row for row in json.loads(run("plugins", "--json").out)}

    assert "is installed in 2 versions" in rows["aa-test"]["reason"]


def other_plugin(site, name, module="other", code=None):
    """Installs a plugin with a module of any depth; returns the folder of its metadata."""
    path = site / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code or "class Plugin: pass\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[eventloop.callbacks]\n{name} = {module}:Plugin\n")
    return info


@pytest.fixture
def packages(install, site):
    """The folder of installed packages, with one healthy plugin in it."""
    install("aa-test")
    return site


def test_a_wheel_on_the_path_is_a_plugin_like_another(run, packages, tmp_path, monkeypatch):
    """Its files aren't there by themselves, and its code can be imported all the same."""
    other_plugin(tmp_path / "built", "zipped", "zipped_module", HEARS)
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path / "built")
    monkeypatch.setattr(sys, "path", [archive, *sys.path])

    rows = {one["name"]: one for one in json.loads(run("plugins", "list", "--json").out)}
    locked = run("plugins", "lock", "--no-plugins", "-p", "zipped")

    assert rows["zipped"]["status"] == "active"
    assert locked.status == 0, locked.err
    digest = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    assert f'"zipped_module.py" = "sha256:{digest}"' in Path("eventloop.lock").read_text()


def test_a_byte_order_mark_is_one_row(run, packages):
    """The reader of entry points takes the group for a name, and drops the plugin in silence."""
    info = other_plugin(packages, "marked")
    (info / "entry_points.txt").write_text(
        "[eventloop.callbacks]\nmarked = other:Plugin\n", encoding="utf-8-sig"
    )

    ran = run("plugins", "list")

    assert ran.status == 0
    assert "marked 1.0 has entry points that can't be read" in ran.out
    assert "byte order mark" in ran.out
    assert "aa-test" in ran.out


def test_a_module_that_changes_the_working_directory_changes_nothing(run, packages):
    """The lock, the run's folder and what other plugins open are where they were."""
    other_plugin(packages, "moves", "moves_module", f"import os\nos.chdir('/')\n{HEARS}")
    before = Path.cwd()

    ran = run("plugins", "lock", "--no-plugins", "-p", "moves")

    assert ran.status == 0, ran.err
    assert Path.cwd() == before
    assert (before / "eventloop.lock").is_file()


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
@pytest.mark.parametrize("command", [["plugins"], ["--help"], ["plugins", "hooks"]])
@pytest.mark.parametrize(("where", "status"), [(">&-", 0), (">/dev/full", 2)])
def test_a_stdout_that_takes_nothing(command, where, status, clean):
    """Closed, it is nobody's; full, it is an error in one line, and no trace."""
    line = shlex.join([sys.executable, "-m", "eventloop", *command])

    done = subprocess.run(["sh", "-c", f"{line} {where}"], capture_output=True, text=True)

    assert done.returncode == status, done.stderr
    if status:
        assert done.stderr.startswith("UsageError: what the command prints can't be written: No sp")
    assert "Traceback" not in done.stderr
