"""Files of configuration: which are found and read, and what they may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.config.configuration import Configuration
from eventloop.errors import SettingError


def read(directory: Path, flags=None, *, environ=None, **options) -> Configuration:
    return Configuration.read(flags, environ=environ or {}, directory=directory, **options)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(SettingError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_the_nearest_pyproject_upwards_counts(tmp_path):
    """Commands are run from subfolders too."""
    (tmp_path / "pyproject.toml").write_text("[tool.eventloop]\nseed = 5\n")
    (tmp_path / "deep" / "er").mkdir(parents=True)

    configuration = read(tmp_path / "deep" / "er")

    assert configuration.setting("seed") == 5
    assert (
        configuration.setting_values()["seed"].source.replace("\\", "/") == "../../pyproject.toml"
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_config_file_says_nothing(tmp_path, text):
    """A template with everything commented out is not a mistake."""
    (tmp_path / "run.yaml").write_text(text)

    assert read(tmp_path, config_file=tmp_path / "run.yaml").settings() is not None


@pytest.mark.parametrize("name", ["run.yaml", "pyproject.toml"])
def test_a_file_from_windows_is_read(tmp_path, name):
    """Editors there write a byte order mark and other line endings."""
    text = "seed: 9\n" if name == "run.yaml" else "[tool.eventloop]\nseed = 9\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    config_file = tmp_path / name if name == "run.yaml" else None

    assert read(tmp_path, config_file=config_file).setting("seed") == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n", "should hold names with values"),
        (b"task: 3\n", "task should hold names with values, not 3"),
        (b"plugins: [mixup]\n", "plugins should hold"),
        (b"a: [", "can't be read as YAML"),
        (b"\xff\xfe", "can't be read as text"),
        (b"seed: 1\nSEED: 2\n", "'SEED' is given twice"),
        (b"plugins: {ema: {decay: 1}}\nema: {decay: 2}\n", "'ema.decay' is given twice"),
        (b"task: {lr: 1}\nTask: {LR: 2}\n", "'Task.LR' is given twice"),
    ],
)
def test_a_config_file_of_another_form_is_refused_by_name(tmp_path, content, message):
    """The file is the user's to fix, so the message names it."""
    (tmp_path / "run.yaml").write_bytes(content)

    text = refusal(read, tmp_path, config_file=tmp_path / "run.yaml")

    assert message in text
    assert "run.yaml" in text


def test_a_config_file_that_does_not_exist_is_refused_with_the_closest(tmp_path):
    """A misspelt path is the most common mistake."""
    (tmp_path / "run.yaml").touch()

    text = refusal(read, tmp_path, config_file=tmp_path / "rnu.yaml")

    assert "the closest is 'run.yaml'" in text


def test_a_pyproject_that_is_no_toml_is_refused(tmp_path):
    """Going on without it would train with other settings."""
    (tmp_path / "pyproject.toml").write_text("[tool\n")

    assert "can't be read as TOML" in refusal(read, tmp_path)


@pytest.mark.parametrize("text", ["tool = 3\n", "[[tool]]\n", "[tool]\neventloop = 3\n"])
def test_a_pyproject_without_a_table_of_tools_is_refused(tmp_path, text):
    """What is written there was meant to count."""
    (tmp_path / "pyproject.toml").write_text(text)

    assert "should hold names with values" in refusal(read, tmp_path)


def test_a_site_file_holds_rules_alone(read_configuration):
    """A default that everything overrules would be no rule."""
    assert "'seed'" in refusal(read_configuration, site="seed = 1")


def test_a_site_file_that_is_not_there_is_an_error(tmp_path):
    """Its rules would be gone without a word."""
    environ = {"EVENTLOOP_SITE_CONFIG": str(tmp_path / "nosuch.toml")}

    message = refusal(read, tmp_path, environ=environ)

    assert "EVENTLOOP_SITE_CONFIG" in message
    assert "TOML" not in message
