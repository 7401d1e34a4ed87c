"""Which options are secrets, and what is shown of them."""

from __future__ import annotations

import pytest

from eventloop.secret_values import is_secret, shown, shown_options, shown_words


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "api-key", "apiKey", "APIKEY", "wandb_api_key", "token", "hf_token", "access_token",
        "auth_tokens", "password", "db_password", "passwd", "secret", "client_secret", "secret_key",
        "aws_secret_access_key", "private_key", "credentials", "task.api_key", "bearer_token",
        "Authorization", "passcode", "jwt", "ssh_key", "storage_key", "api_keys", "session_key", "creds",
        "github_pat", "gitlab_pat", "task.github_pat",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    """However they are spelled."""
    assert is_secret(name)
    assert shown(name, "hunter2") == "***"


@pytest.mark.parametrize(
    "name",
    [
        "pad_token", "eos_token", "image_token", "stop_tokens", "num_tokens", "max_tokens", "tokenizer",
        "tokens_per_batch", "key", "label_key", "keys", "token_type", "credentials_file", "password_file",
        "api_key_env", "lr", "monkey", "keyboard", "secretary", "", "key_padding", "key_padding_mask",
        "author", "authors", "authority", "pat", "early_stop_pat", "patience", "patch_size", "pass_rate",
        "sort_key", "lang_token", "src_token", "target_token", "task_token", "draft_token",
        "placeholder_token", "trigger_word", "loss_per_token", "decoder_start_token",
    ],
)  # fmt: skip
def test_names_of_no_secrets(name):
    """A hidden setting of the training would hide a change of it, too."""
    assert not is_secret(name)
    assert shown(name, "hunter2") == "hunter2"


@pytest.mark.parametrize("value", [None, True, False, 0.5, ""])
def test_whether_there_is_a_secret_is_shown(value):
    """An option that is switched off, or that isn't set, is none."""
    assert shown("token", value) == value


@pytest.mark.parametrize("value", ["<sks>", "[V]", "*"])
def test_a_token_of_a_text_is_shown(value):
    """It is a setting of the training: a changed one has to be seen when a run is resumed."""
    assert shown("hub_token", value) == value
    assert shown("hub_token", "hf_abcdefgh") == "***"


SERVICE_TOKENS = {
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "11AB_cd" * 8,
    "GitLab": "glpat-" + "x1y2z3_-" * 3,
    "Hugging Face": "hf_" + "aBcD" * 8,
    "OpenAI": "sk-proj-" + "a1B2" * 8,
    "Slack": "xoxb-" + "1234567890-ab",
}


@pytest.mark.parametrize("token", SERVICE_TOKENS.values(), ids=SERVICE_TOKENS)
def test_a_token_of_a_service_is_masked_whatever_its_option_is_called(token):
    """Its form says what it is: an option `pat` or `hub` has a name that says nothing."""
    assert shown("pat", token) == "***"
    assert shown_words(["fit", "--task.pat", token, f"--task.hub={token}"]) == [
        "fit",
        "--task.pat",
        "***",
        "--task.hub=***",
    ]
    assert token not in str(shown("header", {"x": [f"use {token} here"]}))


@pytest.mark.parametrize(
    "text",
    [
        "hf_internal_testing/tiny-random-gpt2",
        "sk-learn-like-pipeline-of-features",
        "ghp_short",
        "pat",
    ],
)
def test_a_name_that_begins_like_a_token_is_shown(text):
    """Control: models and presets are called so, and a changed one has to be seen."""
    assert shown("model", text) == text


def test_nests_are_gone_through():
    """Mappings by their keys, lists by the option's name."""
    nest = {"storage": {"user": "me", "password": "hunter2", "ports": [1, 2]}, "tokens": ["a b"]}

    assert shown_options(nest) == {
        "storage": {"user": "me", "password": "***", "ports": [1, 2]},
        "tokens": ["a b"],
    }
    assert shown("secrets", {"a": "x", "b": ["y", 7]}) == {"a": "***", "b": ["***", "***"]}
    assert shown("urls", ("https://me:hunter2@host/x",)) == ("https://me:***@host/x",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task.api-key", "hunter2", "--seed", "1"], ["--task.api-key", "***", "--seed", "1"]),
        (["--wandb.token=hunter2"], ["--wandb.token=***"]),
        (["--task.api_key=hunter2=="], ["--task.api_key=***"]),
        (["--task.use-token", "--seed", "1"], ["--task.use-token", "--seed", "1"]),
        (["--task.pad-token", "<pad>"], ["--task.pad-token", "<pad>"]),
        (["--task.db", "postgres://me:hunter2@host/x"], ["--task.db", "postgres://me:***@host/x"]),
        (["--run-dir", "s3://b/r?token=hunter2&x=1"], ["--run-dir", "s3://b/r?token=***&x=1"]),
        (['--a.headers={"password": "hunter2"}'], ['--a.headers={"password": "***"}']),
        (
            ["--a.headers", "{user: me, token: hunter2}"],
            ["--a.headers", '{user: me, token: "***"}'],
        ),
        (["--a.more", "{'pad_token': 'x y', lr: 1}"], ["--a.more", "{'pad_token': 'x y', lr: 1}"]),
        (
            ['--a.b={"c": {"password": "hunter2 x", "lr": 1}, "token": ["hunter2"]}'],
            ['--a.b={"c": {"password": "***", "lr": 1}, "token": "***"}'],
        ),
        (["--a.env", "HF_TOKEN=hunter2"], ["--a.env", "HF_TOKEN=***"]),
        (["fit", "task.py"], ["fit", "task.py"]),
    ],
)
def test_command_lines(words, expected):
    """A value follows its flag, or is a part of it."""
    assert shown_words(words) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"db": {"user": "me", "password": "hunter2"}}',
            '{"db": {"user": "me", "password": "***"}}',
        ),
        ("HF_TOKEN=hunter2", "HF_TOKEN=***"),
        ("AccountName=me;AccountKey=hunter2==;", "AccountName=me;AccountKey=***;"),
        ("Bearer hunter2hunter2", "Bearer ***"),
        ("lr=0.1 and num_tokens=5", "lr=0.1 and num_tokens=5"),
        ("Never tell the password: it is secret.", "Never tell the password: it is secret."),
        ("https://host/x?lr=1&token=hunter2", "https://host/x?lr=1&token=***"),
    ],
)
def test_texts_that_hold_secrets_by_their_form(text, expected):
    """Mappings, variables, connection strings and headers are options, too."""
    assert shown("option", text) == expected
    assert shown("options", [text]) == [expected]
