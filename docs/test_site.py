"""The site in a browser: what its search finds, and its pages on a phone. `tox -e docs` runs it.

It needs Chromium and its driver, `apt-get install chromium chromium-driver`; the driver is found on the PATH.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

sys.path.insert(0, str(Path(__file__).parent))
from site_pages import on_config

SITE = Path(__file__).parents[1] / "site"
PHONE, LAPTOP = 390, 1366
# What is searched for, and the page that comes first.
QUERIES = {
    "checkpoint": "how-to/checkpoints/",
    "checkpoints": "how-to/checkpoints/",
    "--run-dir": "how-to/checkpoints/",
    "run_dir": "how-to/checkpoints/",
    "eval": "how-to/train-your-own-model/",
    "validation every n steps": "how-to/train-your-own-model/",
    "W&B": "plugins/eventloop-wandb/",
    "wandb": "plugins/eventloop-wandb/",
    "tensorboard": "plugins/eventloop-tensorboard/",
    "early stopping": "plugins/eventloop-early-stopping/",
    "install": "quick-start/",
    "getting started": "quick-start/",
    "resume": "how-to/checkpoints/",
    "continue training": "how-to/checkpoints/",
    "mixed precision": "how-to/mixed-precision/",
    "bf16": "how-to/mixed-precision/",
    "amp": "how-to/mixed-precision/",
    "learning rate schedule": "how-to/schedule-learning-rates/",
    "warmup": "how-to/schedule-learning-rates/",
    "gradient accumulation": "reference/settings/",
    "clip_norm": "reference/settings/",
    "--clip-norm": "reference/settings/",
    "multi gpu": "how-to/train-on-several-devices/",
    "ddp": "how-to/train-on-several-devices/",
    "fsdp": "plugins/eventloop-fsdp/",
    "s3": "how-to/remote-storage/",
    "write a plugin": "how-to/write-a-plugin/",
    "callback": "how-to/write-a-plugin/",
    "ablation": "how-to/ablate/",
    "hyperparameter search": "how-to/sweep/",
    "lightning": "how-to/coming-from-lightning/",
    "hugging face": "how-to/coming-from-hugging-face/",
    "composer": "how-to/coming-from-composer/",
    "freeze layers": "how-to/fine-tune/",
    "gan": "how-to/train-a-gan/",
    "reinforcement learning": "how-to/train-without-a-data-set/",
    "Ctrl-C": "how-to/stop-a-run/",
    "dry run": "how-to/everyday-modes/",
    "batch_end": "reference/events/",
    "Trainer": "reference/python-train/",
    "resume training after crash": "how-to/checkpoints/",
    "ctrl-c": "how-to/stop-a-run/",
    "save checkpoint every n steps": "how-to/checkpoints/",
    "load best checkpoint": "how-to/checkpoints/",
    "weights and biases": "plugins/eventloop-wandb/",
    "learning rate warmup": "how-to/schedule-learning-rates/",
    "cosine schedule": "how-to/schedule-learning-rates/",
    "reducelronplateau": "how-to/schedule-learning-rates/",
    "gradient clipping": "reference/settings/",
    "amp autocast": "how-to/mixed-precision/",
    "distributed data parallel": "how-to/train-on-several-devices/",
    "torchrun": "how-to/train-on-several-devices/",
    "write own callback": "how-to/write-a-plugin/",
    "disable a plugin": "how-to/choose-plugins/",
    "order of callbacks": "explanation/hooks-at-a-glance/",
    "test my plugin": "how-to/test-a-plugin/",
    "optuna": "how-to/sweep/",
    "find learning rate": "plugins/eventloop-experiments/",
    "gradient accumulation bug": "how-to/check-a-loss/",
    "huggingface trainer": "how-to/coming-from-hugging-face/",
    "lightning module": "how-to/coming-from-lightning/",
    "custom dataset dict batch": "how-to/train-your-own-model/",
    "exponential moving average": "plugins/eventloop-ema/",
    "reproducible seed": "explanation/promises/",
    "overfit one batch": "how-to/everyday-modes/",
    "command line options": "reference/command-line/",
    "list of events": "reference/events/",
    "multiple dataloaders": "how-to/several-data-loaders/",
    "group by length": "how-to/sequences-of-different-lengths/",
    "rlhf": "how-to/align-a-language-model/",
    "predict_with_generate": "how-to/generate-while-evaluating/",
    "variable length sequences": "how-to/sequences-of-different-lengths/",
    "validation loss metric names": "how-to/train-your-own-model/",
    "nan loss": "how-to/mixed-precision/",
    "out of memory": "how-to/train-your-own-model/",
    "profiler": "plugins/eventloop-profile/",
    "predict": "reference/command-line/",
    "torch.compile": "reference/settings/",
    "change learning rate when resuming": "how-to/schedule-learning-rates/",
    "train for more epochs": "how-to/checkpoints/",
    "resume an iterable dataset": "how-to/resume-in-mid-epoch/",
    "jupyter notebook": "plugins/eventloop-progress/",
    "export safetensors": "reference/command-line/",
    "compare two runs": "how-to/checkpoints/",
    "multiple gpus": "how-to/train-on-several-devices/",
    "max_epochs": "reference/settings/",
    "load weights into model": "how-to/checkpoints/",
    "export onnx": "plugins/eventloop-export/",
}
# Searched for on the way to a longer word.
LETTERS = ("c", "e", "m", "check", "ev")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served."""
    assert (SITE / "index.html").is_file(), "build the site first: mkdocs build"
    serve = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """A browser without a window."""
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for one in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def found(browser: webdriver.Chrome, address: str, query: str) -> list[str]:
    """Returns the pages that the search finds, the first first."""
    browser.get(f"{address}glossary/?q={urllib.parse.quote(query)}")
    WebDriverWait(browser, 20).until(
        lambda one: one.execute_script(
            "return /matching/.test(document.querySelector('.md-search-result__meta').textContent)"
        )
    )
    links = browser.execute_script(
        "return [...document.querySelectorAll('.md-search-result__item > a')].map(one => one.href)"
    )
    return [link.partition("?")[0].removeprefix(address) for link in links]


@pytest.mark.parametrize(("query", "page"), [*QUERIES.items(), *((one, None) for one in LETTERS)])
def test_the_page_that_is_searched_for_comes_first(query, page, browser, address):
    """The theme writes what its search throws to the console, and shows no results."""
    browser.get_log("browser")  # of the test before

    pages = found(browser, address, query)

    assert [
        one["message"] for one in browser.get_log("browser") if "search" in one["message"]
    ] == []
    assert pages[:1] == [page or pages[0]]


def test_no_page_scrolls_sideways_on_a_phone(browser, address):
    """A table or a line of code that is too wide scrolls by itself."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": PHONE, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    widths = {}
    for path in sorted(SITE.rglob("index.html")):
        page = path.parent.relative_to(SITE).as_posix()
        if not page.startswith("source"):
            browser.get(f"{address}{page}/")
            widths[page] = browser.execute_script("return document.documentElement.scrollWidth")

    assert len(widths) > 80
    assert {page: width for page, width in widths.items() if width > PHONE} == {}


def shown(browser: webdriver.Chrome, address: str, page: str, width: int) -> None:
    """Opens a page in a window of a width."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE},
    )
    browser.get(f"{address}{page}")


def test_a_phone_shows_the_description_of_each_setting(browser, address):
    """A column beside two others would lie outside of the screen."""
    shown(browser, address, "reference/settings/", PHONE)

    edges = browser.execute_script(
        "return [...document.querySelectorAll('.md-typeset td:last-child')]"
        ".filter(one => one.textContent).map(one => one.getBoundingClientRect())"
        ".map(one => [one.left, one.right])"
    )

    assert len(edges) > 20
    assert [edge for edge in edges if edge[0] < 0 or edge[1] > PHONE] == []


def test_code_fits_on_a_laptop(browser, address):
    """Its lines have 100 characters at most, and scrolling hides what a reader compares."""
    wide = {}
    for page in ("", "quick-start/", "tutorial/", "how-to/write-a-plugin/", "explanation/design/"):
        shown(browser, address, page, LAPTOP)
        wide[page] = browser.execute_script(
            "return [...document.querySelectorAll('.md-typeset pre > code.md-code__content, "
            ".md-typeset pre > code')].filter(one => one.scrollWidth > one.clientWidth + 1"
            " && Math.max(...one.textContent.split('\\n').map(line => line.length)) <= 100)"
            ".map(one => one.textContent.slice(0, 80))"
        )

    assert wide == {page: [] for page in wide}


def test_the_header_links_to_the_repository_once_the_release_has_filled_it_in():
    """The place of a clone isn't known before."""
    config = MkDocsConfig(config_file_path=str(SITE.parent / "mkdocs.yml"))
    config.nav, config.extra = [], {"repository": "https://example.org/people/eventloop.git"}

    on_config(config)

    assert config.repo_url == "https://example.org/people/eventloop"
    assert config.repo_name == "people/eventloop"


def test_no_heading_of_promises_is_the_name_of_a_class():
    """Such a heading has lost its section."""
    text = (SITE.parent / "docs" / "explanation" / "promises.md").read_text(encoding="utf-8")

    assert "### Finite weights" in text
    assert re.findall(r"^#+ [A-Z][a-z]+[A-Z]\w*$", text, re.MULTILINE) == []
