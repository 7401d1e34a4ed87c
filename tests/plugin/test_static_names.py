"""Modules are found, and their names read, with nothing imported."""

from __future__ import annotations

import ast
import json

from eventloop.plugin.static_names import Scope, bound_names, locate


def other_plugin(site, name, module):
    """Installs a plugin with a module of any depth."""
    path = site / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("class Plugin: pass\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[eventloop.callbacks]\n{name} = {module}:Plugin\n")


def test_a_module_of_a_namespace_of_any_depth_is_looked_at(run, install, site):
    """Python looks for the parents of a namespace among what is imported, and nothing is."""
    install("aa-test")
    other_plugin(site, "deep", "space_a.space_b.space_c.module")
    other_plugin(site, "gone", "space_a.space_b.space_d.module")
    (site / "space_a" / "space_b" / "space_d" / "module.py").unlink()

    rows = {one["name"]: one for one in json.loads(run("plugins", "list", "--json").out)}

    assert rows["deep"]["status"] == "active"
    assert rows["gone"]["status"] == "problem"
    assert rows["aa-test"]["status"] == "active"


def test_names_are_bound_in_either_branch():
    """A package has one class for new versions of what it uses, and another for old ones."""
    body = ast.parse(
        "import a.b\n"
        "try:\n    from c import d as e\n"
        "except ImportError:\n    class F: pass\n"
        "if True:\n    g = 1\n"
        "else:\n    def h(): j = 2\n"
        "k: int = 3\n"
    ).body

    assert [name for name, _ in bound_names(body)] == ["a", "e", "F", "g", "h", "k"]


def test_a_name_is_followed_through_the_modules_that_import_it(tmp_path, monkeypatch):
    """A package exports its class from anywhere, by another name."""
    package = tmp_path / "followed_here"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0\nfrom .inner import Own as Shown\n")
    (package / "inner.py").write_text("1 / 0\nclass Own:\n    facts = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    scope = Scope("followed_here", locate("followed_here")[0]).scope(["Shown"])

    assert [(name, ast.unparse(value)) for name, value in scope.assigned()] == [("facts", "3")]
    assert Scope("followed_here", locate("followed_here")[0]).scope(["Nothing"]) is None
