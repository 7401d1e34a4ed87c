"""Lines and the file that holds them."""

import json
import math
import resource
import signal
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventloop import Moment
from eventloop_jsonl import LineFile, lines, text_lines

AT = Moment(epoch=2, batch=40, sample=2560, token=0, seconds=1.25)


def strictly(text):
    """Parses as the standard says: without Python's NaN and Infinity, and encodable as UTF-8."""

    def refuse(constant):
        raise ValueError(constant)

    parsed = json.loads(text, parse_constant=refuse)
    json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    return parsed


def test_a_number_is_one_line_with_its_moment():
    """The format is what other programs rely on."""
    text = lines({"train/loss": 0.5, "steps": 3}, AT)

    moment = {"epoch": 2, "batch": 40, "sample": 2560, "token": 0, "seconds": 1.25}
    assert [strictly(line) for line in text.splitlines()] == [
        {"name": "train/loss", "value": 0.5, **moment},
        {"name": "steps", "value": 3, **moment},
    ]


any_text = st.text(st.characters(exclude_categories=()))


@given(st.dictionaries(any_text, st.one_of(st.floats(), st.integers(), st.booleans())))
def test_whatever_is_logged_can_be_parsed(numbers):
    """One bad name or value must not cost the reader of the file all the others."""
    written = lines(numbers, AT)

    parsed = [strictly(line) for line in written.splitlines()]
    assert written.isascii()
    assert len(parsed) == len(numbers)
    for value, line in zip(numbers.values(), parsed, strict=True):
        back = float(line["value"]) if isinstance(line["value"], str) else line["value"]
        assert back == value or (math.isnan(back) and math.isnan(value))


def test_a_text_and_a_table_are_a_line_each():
    """In the order and with the keys of the numbers, so that one reader takes all."""
    texts = {"said": "a\nb\x1b", "samples": {"prompt": ["x", "y"], "score": [math.nan, None]}}

    first, second = map(strictly, text_lines(texts, AT, "run").splitlines())

    assert first == {"name": "said", "text": "a\nb\x1b", **AT._asdict(), "run": "run"}
    assert second["table"] == {"prompt": ["x", "y"], "score": ["NaN", None]}
    assert list(second) == ["name", "table", *AT._fields, "run"]


cells = st.one_of(any_text, st.floats(), st.integers(), st.booleans(), st.none())
tables = st.dictionaries(any_text, st.lists(cells), max_size=3)


@given(st.dictionaries(any_text, st.one_of(any_text, tables), max_size=3))
def test_whatever_is_logged_as_text_can_be_parsed(texts):
    """What a model says may be anything: half of an emoji, an escape sequence."""
    written = text_lines(texts, AT)

    parsed = [strictly(line) for line in written.splitlines()]
    assert written.isascii()
    assert len(parsed) == len(texts)
    for text, line in zip(texts.values(), parsed, strict=True):
        if isinstance(text, str):
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            assert line["text"] == whole
        else:
            assert [*map(len, line["table"].values())][:1] == [*map(len, text.values())][:1]


def test_half_of_a_long_text_is_cut_off(tmp_path):
    """A killed process leaves half a line, of a text longer than what is read at once."""
    path = tmp_path / "metrics.jsonl"
    whole = lines({"n": 1.0}, AT)
    path.write_text(whole + text_lines({"said": "x" * 3_000_000}, AT)[:2_500_000])

    file = LineFile(path)
    file.append(whole)
    file.close()

    assert path.read_text() == whole * 2


def test_the_strict_parser_is_strict():
    """Without this the tests above would show nothing."""
    for text in ('{"value": NaN}', '{"value": -Infinity}', '{"name": "\\ud800"}'):
        with pytest.raises(ValueError, match=r"NaN|Infinity|surrogates not allowed"):
            strictly(text)


@pytest.mark.parametrize(
    ("name", "read_back"),
    [
        ('a "quote" and \\', 'a "quote" and \\'),
        ("two\nlines\u2028here\x00", "two\nlines\u2028here\x00"),
        ("größe \U0001f600", "größe \U0001f600"),
        ("\ud83d\ude00", "\U0001f600"),
        ("half \ud83d pair", "half \ufffd pair"),
    ],
)
def test_a_name_comes_back_as_it_was(name, read_back):
    """Only half a surrogate pair, which no text may hold, is replaced."""
    assert strictly(lines({name: 1.0}, AT))["name"] == read_back


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        pytest.param(10**5000, "Infinity", id="too large"),
        pytest.param(-(10**5000), "-Infinity", id="too small"),
    ],
)
def test_what_json_lacks_is_a_text(value, written):
    """The text is one that `float` reads."""
    assert strictly(lines({"x": value}, AT))["value"] == written


def test_a_file_is_made_with_its_folder_when_it_is_needed(tmp_path):
    """A run that logs nothing leaves nothing behind."""
    file = LineFile(tmp_path / "a" / "b" / "numbers.jsonl")
    file.close()
    existed = file.path.parent.exists()

    file.append("{}\n")
    file.close()

    assert not existed
    assert file.path.read_text() == "{}\n"


def test_lines_are_in_the_file_before_it_is_closed_and_stay_after(tmp_path):
    """Whoever watches a run reads its numbers at once; a resumed run goes on in the same file."""
    first, second = (LineFile(tmp_path / "numbers.jsonl") for _ in range(2))

    first.append("1\n2\n")
    while_open = first.path.read_text()
    first.close()
    second.append("3\n")
    second.close()

    assert while_open == "1\n2\n"
    assert second.path.read_text() == "1\n2\n3\n"


def test_a_killed_process_leaves_whole_lines(tmp_path):
    """A buffer of the process would die with it, and leave half a line at its edge."""
    path = tmp_path / "numbers.jsonl"
    text = lines({f"name {idx}": idx / 7 for idx in range(100)}, AT)
    code = """if True:
        import os, pathlib, signal, sys
        from eventloop_jsonl import LineFile

        file = LineFile(pathlib.Path(sys.argv[1]))
        for _ in range(50):
            file.append(sys.argv[2])
        os.kill(os.getpid(), signal.SIGKILL)
    """

    ended = subprocess.run([sys.executable, "-c", code, path, text], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == 50 * text


@pytest.mark.parametrize("length", range(1, 40))
def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path, length):
    """The operating system may stop a write in the middle, and the next run must not go on there."""
    path, text = tmp_path / "numbers.jsonl", lines({"train/loss": 0.5}, AT)
    path.write_text(text + text[:length])

    file = LineFile(path)
    file.append(text)
    file.close()

    assert path.read_text() == 2 * text


@pytest.mark.parametrize("before", ["", "1\n", '{"other": 1}', "x" * 2**17, "\n"])
def test_what_others_wrote_is_kept(tmp_path, before):
    """A path given by mistake must not cost its file."""
    path = tmp_path / "other.txt"
    path.write_text(before)

    file = LineFile(path)
    file.append("{}\n")
    file.close()

    ended = before if before.endswith("\n") or not before else before + "\n"
    assert path.read_text() == ended + "{}\n"


def test_what_does_not_fit_is_taken_back(tmp_path):
    """A disk that fills up in the middle of a line must not leave half of it."""
    file = LineFile(tmp_path / "numbers.jsonl")
    file.append("first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append(100 * "x" + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()

    assert file.path.read_text() == "first\n"


def test_long_names_are_written_and_forgotten():
    """Ten megabytes each; what is kept of names makes the next lines quick, not the memory full."""
    tracemalloc.start()
    try:
        for number in range(3):
            name = f"{number}{'x' * 10_000_000}"
            assert strictly(lines({name: 1.0}, AT))["name"] == name
        del name
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 1_000_000


def test_a_file_that_was_deleted_is_told_of(tmp_path):
    """Lines would go to where no one finds them, and the run would end well."""
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append("{}\n")
    file.path.unlink()

    with pytest.raises(FileNotFoundError, match="deleted while the run wrote into it"):
        file.append("{}\n")
    file.close()
