"""What `eventloop plugins check` says an import costs."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("no_others")

HEAD = "from eventloop import hookimpl\n"
HOOK = "@hookimpl\n    def close(self): pass"


def as_json(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_check_tells_who_imports_torch(run, install, clean, only):
    """`eventloop plugins` should stay quick in an editor's completion."""
    install("aa-test", f"import torch\n{HEAD}class Plugin:\n    {HOOK}\n")
    install("bb-test")

    content = as_json(run("plugins", "check", "--json", *only))

    costs = {row["name"]: row["imports_torch"] for row in content["plugins"]}
    assert costs["aa-test"] is True


def test_the_cost_of_an_import_is_the_plugins_own(run, install, clean):
    """Each is imported alone, after torch: what one brought is no help to the next."""
    shared = "import time\ntime.sleep(0.2)\n"
    (clean.parent / "site" / "slow_dependency.py").write_text(shared)
    body = "class Plugin:\n    @hookimpl\n    def close(self): pass\n"
    install("aa-test", f"import torch\nimport slow_dependency\n{HEAD}{body}")
    install("bb-test", f"import slow_dependency\n{HEAD}{body}")
    install("cc-test", f"{HEAD}{body}")

    ran = run(
        "plugins",
        "check",
        "--json",
        "--no-plugins",
        *["-p", "aa-test", "-p", "bb-test", "-p", "cc-test"],
    )

    rows = {one["name"]: one for one in json.loads(ran.out)["plugins"]}
    assert rows["aa-test"]["import_s"] >= 0.2
    assert rows["bb-test"]["import_s"] >= 0.2
    assert (rows["aa-test"]["imports_torch"], rows["cc-test"]["imports_torch"]) == (True, False)
