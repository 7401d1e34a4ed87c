"""The pages of the site that aren't in `docs/`: READMEs of plugins, and the files that pages link to.

MkDocs calls these functions; `mkdocs.yml` names this file. On the site and in the repository the same
links work: one that leads out of `docs/` leads to a page that is made of that file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files of the repository that have a page of their own, by the page's place.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "examples": "examples.md",
    "plugins": "plugins/index.md",
    "plugins/README.md": "plugins/index.md",
}
KEYWORDS = yaml.safe_load((ROOT / "docs" / "keywords.yml").read_text(encoding="utf-8"))
# What says everything once more is found after the pages that explain it.
_LAST = ("project/", "decisions/")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the parts of the navigation that are lists of files."""
    decisions = sorted(one.name for one in (ROOT / "docs" / "decisions").glob("0*.md"))
    lists = {
        "plugins": ["plugins/index.md", *(f"plugins/{name}.md" for name in _plugins())],
        "decisions": ["decisions/README.md", *(f"decisions/{name}" for name in decisions)],
    }
    config.nav = _filled(config.nav, lists)
    if (repository := str(config.extra["repository"])).startswith("https://"):
        config.repo_url = repository.removesuffix(".git")
        config.repo_name = urlsplit(config.repo_url).path.strip("/")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside of `docs/` that a page links to, and for each plugin."""
    waiting = {
        **{target: place for target, place in PAGES.items() if (ROOT / target).is_file()},
        **{f"plugins/{name}/README.md": f"plugins/{name}.md" for name in _plugins()},
    }
    del waiting["README.md"]
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    for uri, source in sources.items():
        waiting |= _sources_linked(uri, source)
    while waiting:
        source, uri = waiting.popitem()
        if files.get_file_from_path(uri) is not None:
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".md"):
            waiting |= _sources_linked(uri, source)
        else:
            title = f"---\nsearch: {{exclude: true}}\n---\n\n# `{source}`\n\n"
            text = f'{title}```` {Path(source).suffix[1:]} linenums="1"\n{text}````\n'
        file = File.generated(config, uri, content=text)
        files.append(file)
        SOURCE_OF[uri] = source
    unknown = [uri for uri in KEYWORDS if files.get_file_from_path(uri) is None]
    assert not unknown, f"docs/keywords.yml: no page is {', '.join(unknown)}"
    return files


# The file of the repository that a page is made of, by the page's place; of `docs/` where none is here.
SOURCE_OF: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to their pages; says what a page is found by."""
    uri = page.file.src_uri
    if uri in KEYWORDS:
        page.meta["tags"] = KEYWORDS[uri]
    if uri.startswith(_LAST):
        page.meta.setdefault("search", {"boost": 0.1})
    source = SOURCE_OF.get(uri, f"docs/{uri}")

    def lead(match: re.Match[str]) -> str:
        target = _in_repository(source, match[1])
        place = _place(target)
        if place is None:
            return match[0]
        return posixpath.relpath(place, posixpath.dirname(uri) or ".") + (match[2] or "")

    parts = _FENCE.split(markdown)
    return "".join(part if idx % 2 else _LINK.sub(lead, part) for idx, part in enumerate(parts))


def on_post_build(config: MkDocsConfig) -> None:
    """Puts `search_worker.js` before the theme's search worker."""
    (worker,) = Path(config.site_dir).glob("assets/javascripts/workers/search.*.js")
    ours = (ROOT / "docs" / "search_worker.js").read_text(encoding="utf-8")
    worker.write_text(ours + worker.read_text(encoding="utf-8"), encoding="utf-8")


def _plugins() -> list[str]:
    return sorted(one.parent.name for one in (ROOT / "plugins").glob("*/README.md"))


def _filled(nav: Any, lists: dict[str, list[str]]) -> Any:
    if isinstance(nav, list):
        return [_filled(one, lists) for one in nav]
    if isinstance(nav, dict):
        return {key: _filled(one, lists) for key, one in nav.items()}
    return lists.get(nav, nav)


def _sources_linked(uri: str, source: str) -> dict[str, str]:
    """Returns the files that a page links to and that aren't pages of `docs/`, each with its place."""
    text = "".join(_FENCE.split((ROOT / source).read_text(encoding="utf-8"))[::2])
    found = {}
    for match in _LINK.finditer(text):
        target = _in_repository(source, match[1])
        place = _place(target)
        if place is not None and (ROOT / target).is_file() and not target.startswith("docs/"):
            found[target] = place
    return found


def _in_repository(source: str, link: str) -> str:
    """Returns where a link of a file leads, as a path from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(target: str) -> str | None:
    """Returns the place of the page for a file or folder of the repository; None for none."""
    if target in PAGES:
        return PAGES[target]
    parts = target.split("/")
    if parts[0] == "plugins" and (len(parts) == 2 or parts[2] == "README.md"):
        return f"plugins/{parts[1]}.md"
    if parts[0] == "docs":
        return "/".join(parts[1:])
    return f"source/{target}.md" if (ROOT / target).is_file() else None
