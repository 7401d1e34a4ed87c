"""The Python examples of the README, run one after the other as a reader copies them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
# A fenced block with its output; and one that is indented, as that of peft is, which the tests of all documents
# can't run.
EXAMPLE = re.compile(
    r"^```python\n(?P<fenced>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?"
    r"|^(?P<indented>    from eventloop_llm[^\n]*\n(?:    [^\n]*\n|\n)*)",
    re.DOTALL | re.MULTILINE,
)


def test_the_examples_of_the_readme_run(capsys, monkeypatch):
    """The reader sees the numbers that the README promises."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    examples = [*EXAMPLE.finditer(README.read_text(encoding="utf-8"))]
    names = {}

    for example in examples:
        capsys.readouterr()
        exec(example["fenced"] or textwrap.dedent(example["indented"]), names)
        assert (example["output"] or "") in capsys.readouterr().out

    assert len(examples) == 8
    assert sorted(path.name for path in Path("runs/a/hf").iterdir()) == ["ba00000004", "ba00000008"]
    assert Path("adapter/adapter_config.json").is_file()
