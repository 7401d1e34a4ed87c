"""`eventloop plugins check`, and what the other subcommands do about broken plugins."""

from __future__ import annotations

import json
import sys

import pytest

from eventloop.config.configuration import Configuration
from eventloop.config.plugin_flags import Choice
from eventloop.plugin.assemble import assemble

pytestmark = pytest.mark.usefixtures("no_others")

HEAD = "from eventloop import hookimpl\n"
HOOK = "@hookimpl\n    def close(self): pass"
DEFECTS = {
    "an unknown hook": ("@hookimpl\n    def batch_edn(self, state): pass", "'batch_edn'"),
    "an unmarked function": ("def batch_end(self, state): pass", "isn't marked"),
    "a hidden method": (
        "def __init__(self): self.batch_end = 1\n    @hookimpl\n    def batch_end(self, state): 0",
        "hides the hook method",
    ),
    "a misspelt argument": ("@hookimpl\n    def batch_end(self, stat): 0", "no argument 'stat'"),
    "a keyword-only argument": ("@hookimpl\n    def batch_end(self, *, state): 0", "keyword-only"),
    "keywords": ("@hookimpl\n    def batch_end(self, **kw): 0", "passes nothing to **kw"),
    "a generator": ("@hookimpl\n    def batch_end(self, state): yield", "yields"),
    "a coroutine": ("@hookimpl\n    async def batch_end(self, state): 0", "async def"),
    "a wrapper without result": (
        "@hookimpl(wrapper=True)\n    def loss(self, state): yield",
        "never returns a result",
    ),
    "a misspelt edge": (
        "@hookimpl(before='bb-tset')\n    def batch_end(self, state): 0",
        "bb-tset",
    ),
    "a requirement": (f"requires = ('nosuch',)\n    {HOOK}", "requires nosuch"),
    "a conflict": (f"conflicts = ('bb-test',)\n    {HOOK}", "can't work together"),
    "no hook": ("pass", "implements no hook"),
    "a missing self": ("@hookimpl\n    def batch_end(state): 0", "`self` is missing"),
    "a property": ("@property\n    def batch_end(self): 0", "is a property, not a method"),
    "a marked property": (
        "@property\n    @hookimpl(specname='batch_end')\n    def x(self): 0",
        "x is a property",
    ),
    "an edge to itself": (
        "@hookimpl(before='AA_test')\n    def batch_end(self, state): 0",
        "before='AA_test' names the plugin itself",
    ),
    "two phases": (
        "@hookimpl(tryfirst=True, trylast=True)\n    def batch_end(self, state): 0",
        "has both tryfirst=True and trylast=True",
    ),
    "a phase without effect": (
        "@hookimpl\n    def batch_start(self, state): 0\n"
        "    @hookimpl(tryfirst=True)\n    def batch_end(self, state): 0",
        "tryfirst=True has no effect on batch_end",
    ),
    "a constructor that raises": ("def __init__(self): 1 / 0", "can't be built"),
}


@pytest.fixture
def two(install, clean):
    """Two plugins without a defect."""
    install("aa-test")
    install("bb-test")
    return clean


def as_json(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("code", "part"), DEFECTS.values(), ids=DEFECTS)
def test_check_finds_each_defect_that_a_run_refuses(
    run, install, clean, only, tmp_path, code, part
):
    """What pluggy accepts in silence, and what it refuses without a way out: in the same words."""
    install("aa-test", f"{HEAD}class Plugin:\n    {code}\n")
    install("bb-test")
    (tmp_path / "task.py").write_text("from eventloop_testing import tiny_task\ntask = tiny_task\n")

    ran = run("plugins", "check", "--json", *only)
    refused = run("fit", str(tmp_path / "task.py"), "--max-duration", "1ba", *only)
    content = json.loads(ran.out)

    assert ran.status == 1
    assert refused.status == 1
    for problem in content["problems"]:
        assert problem in refused.err
    assert part in "\n".join(content["problems"])
    status = {row["name"]: row["status"] for row in content["plugins"]}
    assert status["aa-test"] == "problem"


def test_a_problem_is_that_of_its_plugin_and_of_none_whose_name_is_in_it(
    run, install, clean, tmp_path, only
):
    """`aa-test (pair 1.0)` stands in the message about `my-aa-test (pair 1.0)`."""
    install("aa-test", f"{HEAD}class Plugin:\n    {HOOK}\n", distribution="pair")
    (tmp_path / "site" / "pair-1.0.dist-info" / "entry_points.txt").write_text(
        "[eventloop.algorithms]\naa-test = pair_module:Plugin\nmy-aa-test = pair_module:Misspelt\n"
    )
    with (tmp_path / "site" / "pair_module.py").open("a") as module:
        module.write("class Misspelt:\n    @hookimpl\n    def batch_edn(self, state): pass\n")

    ran = run("plugins", "check", "--json", *only[:2], "-p", "my-aa-test")

    content = json.loads(ran.out)
    status = {row["name"]: row["status"] for row in content["plugins"]}
    assert (status["aa-test"], status["my-aa-test"]) == ("active", "problem")


@pytest.mark.parametrize("name", ["a requirement", "a conflict", "a circle", "two owners"])
def test_a_problem_of_several_plugins_stands_in_the_row_of_each(install, clean, name):
    """Of two that can't go together neither is the healthy one."""
    body, other = {
        "a requirement": (DEFECTS["a requirement"][0], HOOK),
        "a conflict": (DEFECTS["a conflict"][0], HOOK),
        "a circle": [
            f"@hookimpl(after='{after}')\n    def batch_end(self, state): 0"
            for after in ("bb-test", "aa-test")
        ],
        "two owners": ["@hookimpl\n    def loss(self, state): return 0"] * 2,
    }[name]
    install("aa-test", f"{HEAD}class Plugin:\n    {body}\n")
    install("bb-test", f"{HEAD}class Plugin:\n    {other}\n")

    registry = assemble(Configuration.read({}, choice=Choice.parse(["aa-test", "bb-test"])))

    assert registry.problems_of(registry.find("aa-test"))
    assert bool(registry.problems_of(registry.find("bb-test"))) == (name != "a requirement")


def test_check_finds_what_a_project_asks_for_in_vain(run, two, only):
    """Missing and wrong versions, cycles, names in `order`, two owners."""
    (two / "pyproject.toml").write_text(
        '[tool.eventloop]\nrequired = ["nosuch>=2", "aa-test>=9"]\n'
        'order = {epoch_edn = ["aa-test"]}\n'
    )

    ran = run("plugins", "check", *only)

    assert ran.status == 1
    for part in ("eventloop-nosuch>=2", "eventloop-aa-test>=9", "'epoch_end'", "3 problems"):
        assert part in ran.out


def test_an_order_on_a_hook_that_a_plugin_does_not_implement_is_a_problem(run, two, only):
    """It would be without effect; `all` means the hooks that each has, and a pair counts as one."""
    (two / "pyproject.toml").write_text(
        '[tool.eventloop.order]\nepoch_end = ["bb-test", "aa-test"]\nall = ["aa-test"]\n'
    )

    ran = run("plugins", "check", *only)

    assert ran.status == 1
    assert "order.epoch_end names 'aa-test', which doesn't implement epoch_end" in ran.out
    assert "2 problems" in ran.out


def test_check_finds_a_circle_and_who_drew_it(run, install, clean, only):
    """Nobody can run before and after the same plugin."""
    code = HEAD + "class Plugin:\n    @hookimpl(after='{}')\n    def batch_end(self, state): 0\n"
    install("aa-test", code.format("bb-test"))
    install("bb-test", code.format("aa-test"))

    ran = run("plugins", "check", *only)

    assert ran.status == 1
    assert "aa-test → bb-test → aa-test" in ran.out


def test_check_finds_a_shadowed_distribution(run, install, clean, only, tmp_path):
    """Which of two versions trains would depend on a path."""
    install("aa-test")
    install("bb-test")
    stale = tmp_path / "stale" / "eventloop_aa_test-0.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: eventloop-aa-test\nVersion: 0.9\n"
    )
    sys.path.append(str(stale.parent))

    ran = run("plugins", "check", *only)

    assert ran.status == 1
    assert "eventloop-aa-test is installed in 2 versions" in ran.out
    assert f"0.9 in {stale.parent}" in ran.out


@pytest.fixture
def info(two, tmp_path):
    """The folder of metadata of one of two plugins."""
    return tmp_path / "site" / "eventloop_aa_test-1.0.dist-info"


REMAINS = {
    "nothing": None,
    "no name": b"Metadata-Version: 2.1\nVersion: 1.0\n",
    "no version": b"Metadata-Version: 2.1\nName: eventloop-aa-test\n\nVersion: 1.0\n",
    "no UTF-8": "Name: eventloop-aa-test\nVersion: 1.0\nAuthor: Jos\u00e9\n".encode("latin-1"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("remains", REMAINS.values(), ids=REMAINS)
def test_a_plugin_whose_metadata_is_gone_is_a_problem(run, info, only, remains):
    """An installation that was interrupted leaves this; nobody could say which version trained."""
    (info / "METADATA").unlink()
    if remains is not None:
        (info / "METADATA").write_bytes(remains)

    rows = as_json(run("plugins", "--json", *only))
    ran = run("plugins", "check", *only)
    refused = run("fit", "task.py", *only)

    status = {row["name"]: (row["status"], row["version"]) for row in rows}
    assert status["aa-test"] == ("problem", "")
    assert status["bb-test"] == ("active", "1.0")
    assert ran.status == 1
    for said in (ran.out, refused.err):
        assert "aa-test comes from a distribution without a name and version" in said
        assert "entry_point  eventloop.algorithms: aa-test = eventloop_aa_test_module:P" in said
        assert f"folder       {info}" in said
        assert "`-p no:aa-test`" in said
    assert refused.status == 1
    assert run("plugins", "check", "-p", "bb-test", "-p", "no:aa-test").status == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [b"[eventloop.algorithms]\naa-test\n", b"[\xfc]\n"])
def test_entry_points_that_cannot_be_read_hide_no_other_plugin(run, info, only, text):
    """One broken file would end every command with a traceback."""
    (info / "entry_points.txt").write_bytes(text)

    rows = as_json(run("plugins", "--json", "-p", "bb-test"))
    ran = run("plugins", "check", "-p", "bb-test")

    status = {row["name"]: row["status"] for row in rows}
    assert (status["eventloop-aa-test"], status["bb-test"]) == ("problem", "active")
    assert "aa-test" not in status
    assert ran.status == 1
    assert "1. eventloop-aa-test 1.0 has entry points that can't be read: " in ran.out
    assert "`pip install --force-reinstall eventloop-aa-test`" in ran.out
    assert "1 problem\n" in ran.out


@pytest.mark.parametrize("name", ["REQUESTED", "INSTALLER"])
def test_what_an_installer_notes_need_not_be_text(run, info, only, name):
    """It decides about a mark alone."""
    (info / "REQUESTED").unlink()
    (info / name).write_bytes(b"\xff")

    rows = as_json(run("plugins", "--json", *only))

    assert [row["status"] for row in rows if row["name"] == "aa-test"] == ["active"]


@pytest.mark.nightly
def test_remains_without_a_name_are_told_by_their_folder(run, info, clean, tmp_path, monkeypatch):
    """One must know what to delete; not even a link that leads nowhere may end the command."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    other = info.with_name("rest\x1b[31m-1.0.dist-info")
    for folder in (info, other):
        folder.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(name)

    rows = as_json(run("plugins", "--json", "-p", "bb-test"))
    ran = run("plugins", "check", "-p", "bb-test")

    assert {info.name, other.name} <= {row["name"] for row in rows if row["status"] == "problem"}
    assert f"folder  {info}\n" in ran.out
    assert "rest\\x1b[31m-1.0.dist-info" in ran.out
    assert "\x1b" not in ran.out


def test_one_broken_file_changes_nothing_about_which_version_hides_which(run, info, only, tmp_path):
    """Names of distributions are compared as installers compare them."""
    (info.parent / "zz.dist-info").mkdir()
    (info.parent / "zz.dist-info" / "entry_points.txt").write_text("[a]\nb\n")
    stale = tmp_path / "stale" / "Eventloop_AA.test-0.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text("Name: Eventloop_AA.test\nVersion: 0.9\n")
    (stale / "entry_points.txt").write_text("[eventloop.algorithms]\naa-test = eventloop_old:P\n")
    sys.path.append(str(stale.parent))

    rows = as_json(run("plugins", "--json", *only))

    assert [row["version"] for row in rows if row["name"] == "aa-test"] == ["1.0"]


@pytest.mark.nightly
def test_a_required_version_of_what_has_none_is_no_second_problem(run, info, clean, only):
    """The first says what is wrong."""
    (info / "METADATA").unlink()
    (clean / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["aa-test>=1"]\n')

    ran = run("plugins", "check", *only)

    assert "a distribution without a name and version" in ran.out
    assert "1 problem\n" in ran.out


@pytest.mark.nightly
def test_what_is_left_of_an_old_version_is_seen_without_its_metadata(run, info, only, tmp_path):
    """What hides it, or is hidden by it, must be named all the same."""
    stale = tmp_path / "stale" / "eventloop_aa_test-0.9.dist-info"
    stale.mkdir(parents=True)
    sys.path.append(str(stale.parent))

    ran = run("plugins", "check", *only)

    assert f"1.0 in {info.parent}, none in {stale.parent}" in ran.out


def test_check_is_content_with_what_would_run(run, two, only, monkeypatch):
    """And tells what each import costs."""
    content = as_json(run("plugins", "check", "--json", *only))

    costs = {row["name"]: row["imports_torch"] for row in content["plugins"]}
    assert costs["aa-test"] is False
    assert content["problems"] == []


def test_check_compares_with_the_lock(run, two, only, tmp_path):
    """The version says nothing of a file that was edited where it is installed."""
    run("plugins", "lock", *only)
    with (tmp_path / "site" / "eventloop_bb_test_module.py").open("a") as module:
        module.write("#")

    ran = run("plugins", "check", *only)

    assert ran.status == 1
    assert "changed  eventloop_bb_test_module.py of bb-test" in ran.out


@pytest.mark.nightly
def test_a_dormant_plugin_is_off_unless_it_is_named(run, install, clean, only):
    """Naming it is a wish that can't be granted without the option."""
    install("aa-test", "class Plugin:\n    def __init__(self, *, teacher: str): pass\n")
    install("bb-test")

    asleep = run("plugins", "check", "--json", "--autoload", "true", "-p", "bb-test")
    named = run("plugins", "check", *only)

    reasons = {row["name"]: row["reason"] for row in json.loads(asleep.out)["plugins"]}
    assert reasons["aa-test"] == "waiting for --aa-test.teacher"
    assert "aa-test needs its option 'teacher'" in named.out


BROKEN = {
    "no module": ("", ":Plugin", "import nosuch_module\nclass Plugin: pass\n", "nosuch_module"),
    "no Python": ("", ":Plugin", "def (:\n", "SyntaxError"),
    "no such name": ("", ":Plugni", "class Plugin: pass\n", "the closest is 'Plugin'"),
    "raises": ("", ":Plugin", "raise RuntimeError('imported')\n", "raises"),
    "no such hook": (
        "",
        ":Plugin",
        HEAD + "class Plugin:\n    @hookimpl\n    def batch_edn(self, state): 0\n",
        "'batch_edn'",
    ),
}


def test_thirty_plugins_of_which_five_are_broken_are_thirty_rows(run, install, clean):
    """The list is where one looks when something is wrong."""
    for idx in range(25):
        install(f"good-{idx:02d}")
    for idx, (_, target, code, _) in enumerate(BROKEN.values()):
        install(f"broken-{idx}", code, target=target)

    rows = as_json(run("plugins", "--json"))
    ours = [row for row in rows if row["name"].startswith(("good", "broken"))]

    assert len(ours) == 30
    reasons = [row["reason"] for row in ours if row["status"] == "problem"]
    assert len(reasons) == len(BROKEN)
    for reason, (*_, part) in zip(reasons, BROKEN.values(), strict=True):
        assert part in reason


@pytest.mark.parametrize("argv", [["list"], ["order"], ["check"], ["show", "broken-0"]])
def test_no_subcommand_fails_because_of_a_plugin(run, install, clean, argv):
    """A traceback would hide the other plugins."""
    for idx, (_, target, code, _) in enumerate(BROKEN.values()):
        install(f"broken-{idx}", code, target=target)
    install("evil", "class Plugin:\n    def __dir__(self): raise OSError('evil')\n")

    ran = run("plugins", *argv)

    assert ran.status == (1 if argv == ["check"] else 0)
    assert ran.err == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "BaseException('odd')", "SystemExit(0)"])
@pytest.mark.parametrize("where", ["import", "constructor"])
def test_whatever_a_plugin_raises_is_its_row(run, install, clean, only, raised, where):
    """It can't end a command that is asked what is wrong with it."""
    body = f"class Plugin:\n    def __init__(self): raise {raised}\n    {HOOK}\n"
    install("aa-test", f"{HEAD}raise {raised}\n" if where == "import" else HEAD + body)
    install("bb-test")

    content = json.loads(run("plugins", "check", "--json", *only).out)

    (row,) = [row for row in content["plugins"] if row["name"] == "aa-test"]
    assert (row["status"], len(content["problems"])) == ("problem", 1)
    assert raised.partition("(")[0] in row["reason"]


def test_two_distributions_of_one_name_are_two_rows_with_the_problem(run, install, clean):
    """Either of them may be the one to remove."""
    install("TWIN", distribution="one")
    install("twin", distribution="two")

    content = json.loads(run("plugins", "check", "--json").out)

    rows = [row for row in content["plugins"] if row["name"].lower() == "twin"]
    assert [row["status"] for row in rows] == ["problem", "problem"]
    assert len([one for one in content["problems"] if "2 plugins are named" in one]) == 1


FILES = {
    "a function": (":plugin", "def plugin(): pass\n", "it is the function 'plugin'"),
    "a number": (":plugin", "plugin = 3\n", "it is an int"),
    "a module": ("", f"{HEAD}class Watch:\n    {HOOK}\n", ":Watch"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "code", "part"), FILES.values(), ids=FILES)
def test_an_entry_point_to_what_has_no_hooks_is_a_problem(
    run, install, clean, only, target, code, part
):
    """It would be listed as active, and do nothing."""
    install("aa-test", code, target=target)
    install("bb-test")

    ran = run("plugins", "check", *only)

    assert "aa-test implements no hook" in ran.out
    assert part in ran.out


def test_a_file_without_hooks_says_which_of_its_classes_has_some(run, clean, only):
    """`-p ./watch.py` names the module."""
    (clean / "watch.py").write_text(f"{HEAD}class Watch:\n    {HOOK}\n")

    ran = run("plugins", "check", "-p", "./watch.py", "--no-plugins")

    assert "name a class in it: `-p ./watch.py:Watch`" in ran.out
