"""The built site: complete, asking nobody for anything, and whole in a browser in every look."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.conftest import BROWSER
from tests.docs.browser import Browser
from tools.provenance import REPO

pytestmark = pytest.mark.slow

LOOKS = [(360, "light"), (360, "dark"), (1300, "light"), (1300, "dark")]
PAGES = sorted(path.stem for path in (REPO / "docs").glob("*.md"))
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Page(HTMLParser):
    """What a page loads, what it links to, its headings, and which of them its table of contents has."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.headings: list[tuple[str, str | None]] = []
        self.contents: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(values["id"])
        if tag in LOADS and (address := values.get(LOADS[tag])) and values.get("rel") not in ("next", "prev"):
            self.loads.append(address)
        if tag == "a" and (address := values.get("href")):
            self.links.append(address)
            if "md-nav__link" in (values.get("class") or "").split() and address.startswith("#"):
                self.contents.add(address[1:])
        if tag in ("h1", "h2", "h3"):
            self.headings.append((tag, values.get("id")))


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    return {path.stem: Page(path) for path in site.glob("*.html")}


def test_every_page_is_built_and_in_the_navigation(site: Path, pages) -> None:
    assert set(PAGES) <= set(pages)
    config = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in PAGES if f" {name}.md" not in config] == []


def test_no_page_loads_anything_from_elsewhere(site: Path, pages) -> None:
    """Neither by a tag nor by a style sheet."""
    for name, page in pages.items():
        for address in page.loads:
            assert "//" not in address, f"{name} loads {address}"
            assert name == "404" or (site / address.partition("?")[0]).is_file(), (
                f"{name}: {address} is missing"
            )
    for path in site.rglob("*.css"):
        css = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", css), f"{path.name} loads something"


def test_every_link_leads_somewhere(site: Path, pages) -> None:
    """Also those that mkdocs does not check, in generated HTML."""
    for name, page in pages.items():
        if name == "404":  # its links begin at the root of a server
            continue
        for address in page.links:
            if address.startswith("https://github.com/sgl-project/sglang/"):  # upstream's commits and pulls
                continue
            assert "://" not in address, f"{name} links to {address}"
            target, _, anchor = address.partition("#")
            stem = Path(target).stem if target else name
            assert stem in pages, f"{name} links to {address}"
            if anchor and not anchor.startswith("__"):
                assert anchor in pages[stem].ids, f"{name} links to {address}"


def test_a_page_has_one_title_and_its_contents_reach_the_end(pages) -> None:
    """A line that begins with the number of a pull request is no heading."""
    for name, page in pages.items():
        titles = [heading for heading in page.headings if heading[0] == "h1"]
        assert len(titles) == 1, f"{name} has {len(titles)} titles"
        if name != "404":
            absent = [anchor for tag, anchor in page.headings[1:] if anchor not in page.contents]
            assert absent == [], f"the contents of {name} lack {absent}"


def test_every_claim_is_linked_from_a_page_or_an_erratum(site: Path, pages) -> None:
    from tools.upstream.claims import read_claims

    linked = {link for name, page in pages.items() if name != "claims" for link in page.links}
    unused = [claim.id for claim in read_claims() if f"claims.html#{claim.id}" not in linked]
    assert unused == []


def test_the_pages_hold_no_code_of_upstream(site: Path) -> None:
    """What only upstream's files have: their licence header, and its own import path in code."""
    for path in site.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "Copyright 2023-2024 SGLang Team" not in text
        assert not re.search(r"^\+?\s*from sglang\.srt", text, re.MULTILINE), path.name


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER, "no chromium, chromium-browser or google-chrome was found"
    found = Browser(BROWSER, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def opened(browser: Browser, site: Path, name: str, width: int = 1300, scheme: str = "light") -> Browser:
    """A page in a fresh state, with nothing said yet."""
    browser.look(width, 900, scheme)
    browser.problems.clear()
    browser.requests.clear()
    browser.open((site / f"{name}.html").as_uri())
    return browser


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_in_every_look(browser, site: Path, name: str) -> None:
    page = opened(browser, site, name)
    for width, scheme in LOOKS:
        page.look(width, 900, scheme)
        wide = page.run("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} px wide on a screen of {width}"
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.browser
def test_the_scheme_follows_the_system(browser, site: Path) -> None:
    for scheme, name in (("light", "default"), ("dark", "slate")):
        opened(browser, site, "index", scheme=scheme).run("localStorage.clear()")
        page = opened(browser, site, "index", scheme=scheme)
        assert page.run("document.body.getAttribute('data-md-color-scheme')") == name
        ink = page.run("getComputedStyle(document.querySelector('.strip text')).fill")
        assert max(map(int, re.findall(r"\d+", ink))) > 150 if scheme == "dark" else True


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1300])
def test_the_player_plays_to_its_end_by_keyboard(browser, site: Path, width: int) -> None:
    page = opened(browser, site, "player", width)
    trace = next(iter(json.loads(page.run("JSON.stringify(window.FLEDGE_TRACES)")).values()))
    where = "document.getElementById('fledge-player').getAttribute('data-at')"
    scenes = int(page.run("document.getElementById('fledge-player').getAttribute('data-scenes')"))
    steps = [step for step in trace["steps"] for entry in step["requests"] if entry["request"] == 0]
    assert scenes >= len(steps)
    assert int(page.run(where)) > 0  # it opens at a round, with its tree
    assert page.run("document.querySelectorAll('#fledge-player .pill.accepted').length") >= 2
    page.press("Home")
    seen = set()
    for at in range(scenes):
        assert page.run(where) == str(at)
        words = page.run("document.querySelector('#fledge-player .words').textContent")
        seen.add(re.sub(r"\d+|“.*?”", "", words)[:12])
        page.press("ArrowRight")
    assert page.run(where) == str(scenes - 1)  # it stays at the end
    text = page.run("document.querySelector('#fledge-player .answer').textContent")
    pieces = [trace["pieces"][str(token)] for token in trace["requests"][0]["output_ids"]]
    assert text == trace["requests"][0]["prompt"] + " " + "".join(pieces)
    assert len(seen) > 1
    for key, expected in (("Home", 0), ("End", scenes - 1)):
        page.press(key)
        assert page.run(where) == str(expected)
    page.press("PageUp")
    assert 0 < int(page.run(where)) < scenes - 1
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.problems == []


@pytest.mark.browser
def test_the_player_shows_each_request(browser, site: Path) -> None:
    page = opened(browser, site, "player")
    options = page.run("[...document.querySelectorAll('#fledge-player option')].map(o => o.value)")
    assert options
    for value in options:
        page.run(
            f"(() => {{ const s = document.querySelector('#fledge-player select'); s.value = {value!r};"
            "s.dispatchEvent(new Event('change')); })()"
        )
        page.press("End")
        assert page.run("document.querySelectorAll('#fledge-player .new').length") > 0
    assert page.problems == []


@pytest.mark.browser
def test_the_search_finds_a_word_in_a_page_opened_from_a_file(browser, site: Path) -> None:
    page = opened(browser, site, "index")
    page.run("document.querySelector('[data-md-component=search-query]').focus()")
    page.type("TARGET_VERIFY")
    found = page.run(
        "new Promise(done => { const look = () => {"
        " const links = [...document.querySelectorAll('.md-search-result__link')].map(a => a.href);"
        " if (links.length) done(links); else requestAnimationFrame(look); }; look(); })"
    )
    assert any("glossary.html" in link for link in found)
    assert page.problems == []
