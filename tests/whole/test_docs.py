"""What the documentation says of hooks and settings is what the code says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eventloop import PluginError, hookimpl
from eventloop.events import EVENTS
from eventloop.plugin.declared_hooks import HOOKS
from eventloop_experiments.ablate.paired import paired_difference
from eventloop_experiments.ablate.variants import read_variants
from eventloop_testing.case import isolated_trainer

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pseudo_code() -> str:
    page = (DOCS / "explanation" / "design.md").read_text()
    return re.search(r"## The loop\n.*?```text\n(.*?)```", page, re.DOTALL)[1]


def module_at(path: Path) -> ModuleType:
    """Returns a script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The reference as the docstrings say it now."""
    return module_at(DOCS / "build_reference.py").pages()


def test_the_reference_is_made_of_the_docstrings(pages):
    """A contract that changes must change there: `python docs/build_reference.py`."""
    written = {name: (DOCS / "reference" / name).read_text() for name in pages}

    assert written == pages


def test_the_drawing_of_a_step_is_that_of_the_design():
    """It is drawn from the loop's pseudo-code: `python docs/build_step.py`."""
    module = module_at(DOCS / "build_step.py")
    drawn = [name for row in module.rows() for name, _ in row.hooks]

    assert module.PICTURE.read_text(encoding="utf-8") == module.picture()
    assert set(drawn) <= HOOKS.keys()
    assert len(drawn) > 30


def test_the_picture_of_the_architecture_is_current():
    """It is drawn from the imports: `python docs/build_architecture.py`."""
    module = module_at(DOCS / "build_architecture.py")

    assert module.PICTURE.read_text() == module.picture()


def test_the_tables_of_the_evidence_are_those_of_its_results():
    """Numbers that were copied by hand would be those of another day: `python docs/build_evidence.py`."""
    module = module_at(DOCS / "build_evidence.py")
    tables = [*module.tables(json.loads(module.RESULTS.read_text()))]
    page = (DOCS / "explanation" / "evidence.md").read_text()

    assert len(tables) == 4
    for table in tables:
        assert f"\n\n{table}\n\n" in page


def test_the_rows_of_the_evidence_are_those_of_its_commands():
    """Each has the rate that its sweep found best, and as many seeds as any other."""
    module = module_at(DOCS / "build_evidence.py")
    for name, task in json.loads(module.RESULTS.read_text()).items():
        rows = {row.name: row for row in read_variants(module.RESULTS.with_name(f"{name}.yaml"))}
        best_of = max if task["factor"] > 0 else min

        assert task["rows"].keys() == rows.keys()
        for row, content in task["rows"].items():
            options = dict(rows[row].options)
            assert float(options.get("muon.lr") or options["task.lr"]) == content["rate"]
            assert len(content["values"]) == 5
            if tuning := content.get("tuning"):
                assert float(best_of(tuning, key=tuning.get)) == content["rate"]


def test_a_comparison_holds_among_others_by_the_method_of_holm():
    """The smallest of four has to be below a quarter of 5 %, the next one below a third."""
    module = module_at(DOCS / "build_evidence.py")
    gain = paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0})

    def holding(**ps):
        rows = [module.Row(name, 0.0, 0.0, gain, p) for name, p in ps.items()]
        return {name for _, name in module.holm({"one": rows[:1], "other": rows[1:]})}

    assert holding(a=0.04, b=0.016, c=0.012, d=0.03) == {"b", "c"}
    assert holding(a=0.02, b=0.03, c=0.04) == set()
    assert holding(a=0.04) == {"a"}


def events_in(text: str) -> list[str]:
    """The events in the order of the text: each stands alone on its line, or first on it."""
    first_words = re.findall(r"^ *([a-z_]+)(?=\s{2,}|$)", text, re.MULTILINE)
    return [word for word in first_words if word in EVENTS]


def test_the_pseudo_code_has_every_event_in_order(pseudo_code):
    """The page, the hookspecs and the loop are one order; evaluation stands in a section of its own."""
    floors = {"eval": 1, "eval batch": 1, "predict": 2, "any": 3}
    order = sorted(EVENTS, key=lambda name: floors.get(EVENTS[name].per, 0))
    order.sort(key=lambda name: name == "close")

    assert events_in(pseudo_code) == order


def run_page(name: str) -> dict[str, object]:
    """Runs the blocks of a page, one after the other; gives what they define."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "how-to" / name).read_text(), re.DOTALL)
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    return namespace


def test_what_the_page_on_state_says_of_versions_and_of_saving_works(tmp_path):
    """A state of version 0.1, a checkpoint that is handed over, one that is saved elsewhere."""
    page = run_page("keep-a-plugins-state.md")
    ema, paths, given = page["EmaThatCounts"](), [], {"checkpoint_interval": "2ba"}
    elsewhere = page["SavesElsewhere"](folder=tmp_path)

    ema.load_state_dict({"means": {}}, "0.1")
    callbacks = [page["Uploads"](paths.append)]
    with isolated_trainer(tmp_path / "one", callbacks=callbacks, **given) as trainer:
        trainer.fit()
    with isolated_trainer(tmp_path / "two", algorithms=[elsewhere], **given) as trainer:
        trainer.fit()
    given["resume"] = str(tmp_path / "after-2")
    with isolated_trainer(tmp_path / "three", algorithms=[elsewhere], **given) as trainer:
        assert trainer.state.clock.batch == 2

    assert ema._loaded["num_updates"] == 0
    assert [path.name for path in paths] == [f"ba{batch:08}" for batch in (0, 2, 3)]


def test_the_plugins_of_the_pages_on_order_and_on_combining_work(make_trainer):
    """Their readers copy them."""
    page = (DOCS / "how-to" / "write-a-plugin.md").read_text()
    part = page[page.index("## Order\n") : page.index("## Test it\n")]
    namespace = {"__name__": "page", **run_page("combine-plugins.md")}
    for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
        exec(compile(block, "write-a-plugin.md", "exec"), namespace)
    swap = namespace["Swap"]()
    algorithms = [namespace[name]() for name in ("Clamp", "Ema", "SkipRepeats")]

    trainer = make_trainer(algorithms=[swap, *algorithms], callbacks=[namespace["Report"]()])
    trainer.fit()

    assert swap.averages is trainer.state.plugin("ema")
    ordered = [one.plugin.name for one in trainer.assembly.implementations["batch_end"]]
    assert ordered.index("clamp") < ordered.index("ema")  # the edge; else reversed by name
    with pytest.raises(PluginError, match="no height and width"):
        make_trainer(algorithms=[namespace["OnlyImages"]()])


def test_the_regularizer_of_the_page_on_extending_collects_terms(make_trainer):
    """The terms of two other plugins, weighted by a third; and what the next version says."""
    page = run_page("let-others-extend-yours.md")
    regularizer, l1, confidence, no_weight, later = (
        page[name]() for name in ("Regularizer", "L1", "Confidence", "NoWeight", "LaterRegularizer")
    )

    def losses(*algorithms):
        """Trains twelve batches; returns the losses."""
        seen = []
        watch = type(
            "Watch", (), {"after_loss": hookimpl(lambda _, state: seen.append(state.loss))}
        )
        make_trainer(algorithms=algorithms, callbacks=[watch()], max_duration="12ba").fit()
        return torch.stack(seen).detach()

    plain, alone = losses(), losses(regularizer)
    some = losses(regularizer, confidence)
    delayed = losses(regularizer, l1, confidence, no_weight)

    assert torch.equal(plain, alone)
    assert some[0] > plain[0]
    assert torch.equal(delayed[:10], plain[:10])
    assert delayed[10] > plain[10]
    with pytest.raises(PluginError, match="it was renamed to regularizer_penalties in"):
        make_trainer(algorithms=[later, l1])
    make_trainer(algorithms=[confidence])  # does other things as well
    with pytest.raises(PluginError, match="l1 requires regularizer, which isn't installed"):
        make_trainer(algorithms=[l1])


@pytest.mark.parametrize("name", HOOKS)
def test_the_pseudo_code_names_every_hook(name, pseudo_code):
    """Whoever looks for a place to hook in reads that page."""
    written = rf"<{name}>" if HOOKS[name].kind == "action" else rf"\b{name}\b"

    assert re.search(written, pseudo_code)
