"""Options read from signatures, and values converted to their types."""

from __future__ import annotations

import enum
import shlex
from pathlib import Path
from typing import Any, Literal

import pytest

from eventloop.clock import Time
from eventloop.config.option_types import REQUIRED, Option, Value, convert_value, options_of, typed
from eventloop.errors import SettingError


class Documented:
    """Has options.

    Args:
        alpha: how much,
            on two lines.
        label_smoothing: how smooth.
    """

    def __init__(self, *, alpha: float = 0.4, label_smoothing: float = None, teacher: str) -> None:  # noqa: RUF013
        pass


def test_a_constructor_is_read_with_types_defaults_and_docs():
    """The signature is the only place where an author declares options."""
    options = options_of(Documented)

    alpha = options["alpha"]
    assert (alpha.name, alpha.type, alpha.default) == ("alpha", float, 0.4)
    assert alpha.doc == "how much, on two lines."
    assert options["label_smoothing"].type == float | None
    assert options["teacher"].default is REQUIRED


def test_a_parameter_without_annotation_has_the_type_of_its_default():
    """A newcomer writes `def task(lr=0.1)` and expects `--task.lr 0.2` to be a number."""

    def task(lr=0.1, size=8, name="x", flag=False, other=None):
        pass

    types = {name: option.type for name, option in options_of(task).items()}

    assert types == {"lr": float, "size": int | float, "name": str, "flag": bool, "other": Any}


def test_star_parameters_are_no_options():
    """Nobody can name them on a command line."""

    def task(*args, lr=0.1, **kwargs):
        pass

    assert list(options_of(task)) == ["lr"]


def test_an_annotation_that_only_type_checkers_see_takes_anything():
    """A plugin may import types under TYPE_CHECKING; that mustn't break its other options."""

    def task(tensor: Tensor = None, lr: float = 0.1):  # noqa: F821
        pass

    options = options_of(task)

    assert options["tensor"].type is Any
    assert options["lr"].type is float


@pytest.mark.parametrize("annotation", ["the rate", "pytest.nope", 5])
def test_an_annotation_that_is_no_type_takes_anything(annotation):
    """A plugin with one must not break the help of all commands."""

    def task(lr=0.1, other=None):
        pass

    task.__annotations__ = {"lr": annotation, "other": annotation}

    assert [one.type for one in options_of(task).values()] == [Any, Any]


@pytest.mark.parametrize(
    ("annotation", "raw", "value"),
    [
        (int, "5", 5),
        (float, "1e-3", 0.001),
        (float, 1, 1.0),
        (bool, "false", False),
        (str, "5", "5"),
        (Time, "5ep", Time("5ep")),
        (Time, "1e9tok", Time("1e9tok")),
        (Time | None, Time("2ba"), Time("2ba")),
        (Path | None, "runs", Path("runs")),
        (float | None, "none", None),
        (str | None, "NULL", None),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[float, float], [0.9, 0.99], (0.9, 0.99)),
        (Literal["a", "b"], "b", "b"),
        (Any, "0.5", 0.5),
    ],
)
def test_what_a_person_writes_becomes_a_value_of_the_type(annotation, raw, value):
    """Flags, variables and files write one thing in several ways."""
    converted = convert_value(Option("x", annotation, None, print), raw)

    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("annotation", "raw", "message"),
    [
        (int, "2.5", "'2.5' isn't of type int"),
        (int, True, "True isn't of type int"),
        (str, None, "none isn't of type str"),
        (float, "none", "'none' isn't of type float"),
        (Time | None, "5 epoch", "'5 epoch' is not a time; write '5ep'"),
        (Literal["fp32", "bf16"], "fp23", "isn't one of fp32, bf16; the closest is 'fp32'"),
    ],
)
def test_what_has_another_type_is_refused_with_what_was_expected(annotation, raw, message):
    """The message alone must be enough to fix it."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        convert_value(Option("x", annotation, None, print), raw)


@pytest.mark.parametrize("annotation", [int, float, int | float, int | None])
def test_a_time_of_day_is_no_number(annotation):
    """YAML 1.1 reads 16:32, meant as a range, as 992 seconds."""
    assert convert_value(Option("x", int | str, 1, print), "16:32") == "16:32"
    assert convert_value(Option("x", Any, 1, print), "16:32") == "16:32"

    with pytest.raises(ValueError, match="'16:32' isn't of type"):
        convert_value(Option("x", annotation, 1, print), "16:32")


@pytest.mark.parametrize("text", ["null", "NULL", "~"])
def test_a_word_of_yaml_for_none_is_a_text_like_others(text):
    """An option that isn't optional must not be given none: its plugin doesn't expect it."""
    assert convert_value(Option("x", str, "a", print), text) == text
    assert convert_value(Option("x", Literal["a", text], "a", print), text) == text
    assert convert_value(Option("x", int | None, 1, print), text) is None
    for annotation in (int, Literal["a"], list[str]):
        with pytest.raises(ValueError, match=f"'{text}' isn't"):
            convert_value(Option("x", annotation, None, print), text)


def test_a_refused_value_is_told_with_its_source_and_a_line_to_paste():
    """A value may come from five places; a message that doesn't say which is no help."""
    option = Option("label_smoothing", float, 0.1, print)

    with pytest.raises(SettingError) as caught:
        typed(option, Value("x", "run.yaml"), "mixup")

    assert "mixup.label_smoothing: 'x' isn't of type float" in str(caught.value)
    assert "source  run.yaml" in str(caught.value)
    assert "`--mixup.label-smoothing 0.1`" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "line"),
    [("flag", """`--lora.target-modules '["TEXT"]'`"""), ("task", """`target_modules=["TEXT"]`""")],
)
def test_the_line_for_a_list_shows_how_one_is_written(source, line):
    """`--lora.target-modules VALUE` leaves open whether commas do."""
    option = Option("target_modules", list[str] | None, None, print)

    with pytest.raises(SettingError) as caught:
        typed(option, Value("q_proj", source), "lora")

    assert f"give it as list[str] or none: {line}" in str(caught.value)


class Shade(enum.StrEnum):
    """The values are others than the names."""

    DARK = "d"
    LIGHT = "l"


@pytest.mark.parametrize(
    ("annotation", "default", "fix"),
    [
        (Shade, Shade.LIGHT, "give it as DARK, LIGHT: `--task.x LIGHT`"),
        (Shade | None, None, "give it as DARK, LIGHT or none: `--task.x DARK`"),
        (tuple[float, float], (0.8, 0.9), "`--task.x '[0.8, 0.9]'`"),
        (Literal["a", "b"], REQUIRED, "give it as a, b: `--task.x a`"),
    ],
)
def test_the_line_to_paste_is_accepted(annotation, default, fix):
    """An Enum's members are typed by name, a tuple as a list."""
    option = Option("x", annotation, default, print)

    with pytest.raises(SettingError) as caught:
        typed(option, Value("DRAK", "flag"), "task")

    assert fix in str(caught.value)
    *_, text = shlex.split(fix.rpartition("`--")[2].rstrip("`"))
    assert convert_value(option, text) is not None
    if annotation is Shade:
        assert "isn't one of DARK, LIGHT; the closest is 'DARK'" in str(caught.value)


def test_a_union_is_tried_in_its_own_order():
    """Unions of the same types are equal to Python, in whatever order they are written."""

    def task(first: int | float, second: float | int):
        pass

    values = [convert_value(option, "3") for option in options_of(task).values()]

    assert [type(one) for one in values] == [int, float]


@pytest.mark.parametrize(
    ("text", "source", "line"),
    [
        ("1", "EVENTLOOP_SHUFFLE", "`EVENTLOOP_SHUFFLE=true`"),
        ("0", "EVENTLOOP_PLUG__SHUFFLE", "`EVENTLOOP_PLUG__SHUFFLE=false`"),
        ("0", "flag", "`--plug.shuffle false`"),
        ("y", "run.yaml", "`--plug.shuffle true`"),
    ],
)
def test_a_boolean_of_a_shell_is_named_as_it_is_written_here(text, source, line):
    """A variable is 1 or 0 in most programs; the line keeps what was meant, at the place where it was said."""
    with pytest.raises(SettingError) as caught:
        typed(Option("shuffle", bool, True, print), Value(text, source), "plug")

    assert f"give it as bool: {line}" in str(caught.value)


def test_a_number_that_is_no_boolean_keeps_its_message():
    """Control: an option of a number has no such words."""
    with pytest.raises(SettingError, match="isn't of type int") as caught:
        typed(Option("size", int, 3, print), Value("off", "EVENTLOOP_SIZE"))

    assert "here it is" not in str(caught.value)
    assert "`EVENTLOOP_SIZE=3`" in str(caught.value)
