"""The file alone."""

import csv
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eventloop_csv
from eventloop import Moment
from eventloop.toolbox import RunFolder
from eventloop_csv import WideFile

MOMENT = list(Moment._fields)


def at(batch):
    return Moment(epoch=0, batch=batch, sample=4 * batch, token=0, seconds=batch / 3)


def file_in(folder):
    return WideFile(RunFolder(folder), "metrics.csv")


def table(file):
    """Returns the columns and the rows, each with as many fields as there are columns."""
    with file.path.open(encoding="utf-8", newline="") as opened:
        header, *rows = csv.reader(opened, strict=True)
    assert header[:5] == MOMENT
    assert {len(row) for row in rows} <= {len(header)}
    return header[5:], [row[5:] for row in rows]


def test_a_new_name_is_a_new_column(tmp_path):
    """Rows before it have nothing there, so that the file is a table at any time."""
    file = file_in(tmp_path)

    file.append({"loss": 0.5}, at(1))
    file.append({"lr": 0.1, "loss": 0.25}, at(2))
    file.append({"lr": 0.2}, at(3))
    file.close()

    assert table(file) == (["loss", "lr"], [["0.5", ""], ["0.25", "0.1"], ["", "0.2"]])
    assert file.path.read_bytes().splitlines()[1] == b"0,1,4,0,0.3333333333333333,0.5,"


any_text = st.text(st.characters(exclude_categories=("Cs",)))
any_row = st.dictionaries(any_text, st.one_of(st.floats(), st.integers(), st.booleans()))


@pytest.mark.nightly
@given(st.lists(any_row, max_size=5))
def test_whatever_is_logged_is_read_back(tmp_path_factory, logged):
    """By the names it was logged under: commas, quotes, line ends and names of the moment, too."""
    file = file_in(tmp_path_factory.mktemp("any"))

    for batch, row in enumerate(logged):
        file.append(row, at(batch))
        if batch % 2:
            file.close()
    file.close()

    columns, rows = table(file) if logged else ([], [])
    assert len(columns) == len(set(columns))
    for wrote, row in zip(logged, rows, strict=True):
        found = {name: float(text) for name, text in zip(columns, row, strict=True) if text}
        assert found.keys() == wrote.keys()
        for name, value in wrote.items():
            assert found[name] == value or math.isnan(found[name]) == math.isnan(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(10**400, "inf"), (-(10**400), "-inf"), (math.nan, "nan"), (True, "1"), (7, "7")],
)
def test_values_are_numbers_for_any_reader(tmp_path, value, text):
    """`float`, pandas and spreadsheets read them."""
    file = file_in(tmp_path)
    file.append({"x": value}, at(1))
    file.close()

    assert table(file) == (["x"], [[text]])


def test_half_a_surrogate_pair_is_escaped(tmp_path):
    """UTF-8 can't hold it, and one odd name must not cost the others."""
    file = file_in(tmp_path)
    file.append({"half \ud83d pair": 1.0}, at(1))
    file.close()

    assert table(file)[0] == ["half \\ud83d pair"]


def test_rows_are_in_the_file_before_it_is_closed(tmp_path):
    """What follows a run reads its numbers at once, and a killed process loses none."""
    code = """if True:
        import os, pathlib, signal, sys
        from eventloop import Moment
        from eventloop.toolbox import RunFolder
        from eventloop_csv import WideFile

        file = WideFile(RunFolder(pathlib.Path(sys.argv[1])), "metrics.csv")
        for batch in range(50):
            file.append({"loss": batch / 7, f"extra {batch // 10}": 1}, Moment(0, batch, 0, 0, 0.5))
        os.kill(os.getpid(), signal.SIGKILL)
    """

    source = Path(eventloop_csv.__file__).parents[1]  # which isn't installed everywhere
    environ = os.environ | {"PYTHONPATH": str(source)}
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], env=environ, check=False)

    assert ended.returncode == -signal.SIGKILL
    columns, rows = table(file_in(tmp_path))
    assert columns == ["loss", *(f"extra {number}" for number in range(5))]
    assert [float(row[0]) for row in rows] == [batch / 7 for batch in range(50)]


@pytest.mark.parametrize("num_bytes", range(1, 13))
def test_half_a_row_of_a_killed_process_is_cut_off(tmp_path, num_bytes):
    """A number that lacks its last digits is another number."""
    file = file_in(tmp_path)
    file.append({"loss": 0.5}, at(1))
    file.close()
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + b"0,2,8,0,0.6,0.125\n"[:num_bytes])

    again = file_in(tmp_path)
    again.append({"loss": 0.25}, at(2))
    again.close()

    assert file.path.read_bytes() == whole + b"0,2,8,0,0.6666666666666666,0.25\n"


def test_a_file_that_a_spreadsheet_saved_is_gone_on_with(tmp_path):
    """With the line ends of Windows."""
    file = file_in(tmp_path)
    file.append({"loss": 0.5}, at(1))
    place = file.end()
    file.append({"loss": 0.125}, at(2))
    file.close()
    file.path.write_bytes(file.path.read_bytes().replace(b"\n", b"\r\n"))

    again = file_in(tmp_path)
    was_cut = again.cut_after(place)
    again.append({"loss": 0.25, "lr": 1.0}, at(2))
    again.close()

    assert was_cut
    assert table(again) == (["loss", "lr"], [["0.5", ""], ["0.25", "1.0"]])


def test_rows_after_a_place_are_taken_back_with_their_columns(tmp_path):
    """The run that goes on makes them again, in their order."""
    file = file_in(tmp_path)
    file.append({"loss": 0.5}, at(1))
    file.close()
    before, place = file.path.read_bytes(), file.end()
    file.append({"late": 0.5}, at(2))

    was_cut = file.cut_after(place)
    file.close()

    assert was_cut
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("lines", [[], [b"0,9,36,0,0.5,1.0"], [b"0,1,4,0,0.5,1.0"]])
def test_a_file_without_the_place_is_not_cut(tmp_path, lines):
    """It is shorter, or has other rows: it isn't the one that the checkpoint knows."""
    file = file_in(tmp_path)
    for batch in (1, 2):
        file.append({"loss": 0.5}, at(batch))
    place = file.end()
    file.close()
    header, *_ = file.path.read_bytes().splitlines()
    other = b"".join(line + b"\n" for line in [header, *lines])
    file.path.write_bytes(other)

    was_cut = file_in(tmp_path).cut_after(place)

    assert not was_cut
    assert file.path.read_bytes() == other


@pytest.mark.parametrize("found", [b"name,value\nx,1\n", b"\xff\xfe\x00", b"hello"])
def test_the_file_of_another_program_is_left_alone(tmp_path, found):
    """It was there first."""
    file = file_in(tmp_path)
    file.path.write_bytes(found)

    with pytest.raises(ValueError, match=r"columns|decode"):
        file.append({"loss": 0.5}, at(1))
    file.close()

    assert file.path.read_bytes() == found


def test_what_does_not_fit_is_taken_back(tmp_path):
    """A disk that fills up in the middle of a row must not leave half of it."""
    file = file_in(tmp_path)
    file.append({"loss": 0.5}, at(1))
    before = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append({"loss": 0.25}, at(2))
        with pytest.raises(OSError, match="too large"):
            file.append({"a new column": 0.25}, at(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    file.close()

    assert file.path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_file_that_was_deleted_is_told_of(tmp_path):
    """Rows would go to where no one finds them, and the run would end well."""
    file = file_in(tmp_path)
    file.append({"loss": 0.5}, at(1))
    file.path.unlink()

    with pytest.raises(FileNotFoundError, match="deleted while the run wrote into it"):
        file.append({"loss": 0.5}, at(2))
    file.close()
