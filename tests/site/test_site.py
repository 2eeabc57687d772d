"""The built book as one site: missing addresses, search, links between pages, buttons, previews, the PDF."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools import address

from .conftest import BOOK, ROOT, Server, book_pages

pytestmark = pytest.mark.skipif(not book_pages(), reason="the book is not built: run make book")
CHAPTERS = sorted(page for page in book_pages() if page.startswith("chapters/"))


@pytest.fixture
def published(browser):
    """The site under the path that GitHub Pages would serve it at, and a page to look at it with."""
    name = address.parse(address.configured(ROOT)[0])[1]
    server = Server(BOOK, f"/{name}/")
    page = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
    yield server.base, page
    page.context.close()
    server.close()


@pytest.mark.parametrize("missing", ["nothing.html", "chapters/02_old_name.html", "a/b/c/d"])
def test_an_address_that_leads_nowhere(published, missing):
    base, page = published
    failed = []
    page.on(
        "response",
        lambda r: failed.append(r.url) if r.status >= 400 and not r.url.endswith(missing) else None,
    )
    assert page.goto(base + missing).status == 404
    assert page.locator("article h1").inner_text() == "No such page"
    assert not failed, "its stylesheets, scripts and logo are found from any depth"
    inside = page.eval_on_selector_all("article a", "all => all.map(a => a.getAttribute('href'))")
    assert inside and all(link.startswith(urlsplit(base).path) for link in inside if not link.startswith("#"))
    page.locator("nav.bd-links a", has_text="Collectives").click()
    assert page.url.startswith(base + "chapters/02_collectives.html")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("all-gather", "book/glossary.html#term-all-gather"),
        ("bubble", "book/glossary.html#term-bubble"),
        ("busbw", "book/glossary.html#term-busbw"),
        ("tensor parallelism", "book/glossary.html#term-tensor-parallelism"),
        ("ring all-reduce", "chapters/02_collectives.html"),
        ("pipeline bubble", "chapters/05_pipeline_parallelism.html"),
        ("deadlock", "book/glossary.html#term-deadlock"),
    ],
)
def test_search_finds_concepts_first(published, words, first):
    base, page = published
    page.goto(f"{base}search.html?q={words}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_timeout(300)
    links = page.eval_on_selector_all(
        "#search-results li a", "all => all.slice(0, 3).map(a => a.getAttribute('href'))"
    )
    assert links and first in links[0], links


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.meta: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        if of.get("id"):
            self.anchors.add(of["id"])
        if tag == "a" and of.get("href"):
            self.links.append(of["href"])
        if tag == "meta" and of.get("property"):
            self.meta[of["property"]] = of.get("content") or ""


@pytest.fixture(scope="module")
def parsed() -> dict[str, _Page]:
    return {page: _Page((BOOK / page).read_text(encoding="utf-8")) for page in book_pages()}


def test_no_broken_link_inside_the_book(parsed):
    broken, outside = [], set()
    for page, content in parsed.items():
        for link in content.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside.add(link)
                continue
            target = (BOOK / page).parent / unquote(parts.path) if parts.path else BOOK / page
            target = target.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                broken.append(f"{page}: {link}")
                continue
            other = parsed.get(target.relative_to(BOOK.resolve()).as_posix())
            if parts.fragment and other and unquote(parts.fragment) not in other.anchors:
                broken.append(f"{page}: {link} (no such place on that page)")
    print("\n".join(["links that leave the book:", *sorted(outside)]))
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_links_that_leave_the_book(parsed):
    """Where there is a network, each address of another host answers; where there is none, this skips."""
    # Buttons lead to pages that exist once the repository is public; the badge and search hosts answer robots with errors.
    own = address.configured(ROOT)[0]
    outside = sorted(
        {link.partition("#")[0] for page in parsed.values() for link in page.links if link.startswith("http")}
    )
    outside = [
        link
        for link in outside
        if not link.startswith((own, "https://colab.", "https://mybinder.")) and "localhost" not in link
    ]

    def answer(link: str) -> str:
        request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0"})
        try:
            with urllib.request.urlopen(request, timeout=15) as response:
                return "" if response.status < 400 else str(response.status)
        except urllib.error.HTTPError as error:
            return "" if error.code in (403, 405, 429) else f"{error.code}"
        except OSError as error:
            return f"no answer: {error}"

    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(outside, pool.map(answer, outside)))
    wrong = {link: said for link, said in answers.items() if said}
    if outside and all(said.startswith("no answer") for said in answers.values()):
        pytest.skip(f"no network here to try the {len(outside)} links that leave the book")
    assert not wrong, "\n".join(f"{link}: {said}" for link, said in wrong.items())


def test_previous_and_next_lead_through_the_chapters(parsed):
    for before, after in zip(CHAPTERS, CHAPTERS[1:]):
        text = (BOOK / before).read_text(encoding="utf-8")
        found = re.search(r'class="right-next"\s+href="([^"]+)"', text)
        assert found and found[1] == Path(after).name
        assert f'href="{Path(before).name}"' in (BOOK / after).read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_launch_buttons(chapter, parsed):
    repository, branch = address.configured(ROOT)
    owner, name = address.parse(repository)
    notebook = chapter.replace(".html", ".ipynb")
    links = parsed[chapter].links
    assert f"https://colab.research.google.com/github/{owner}/{name}/blob/{branch}/{notebook}" in links
    assert any(link.startswith(f"https://mybinder.org/v2/gh/{owner}/{name}/{branch}") for link in links)
    assert any(link.endswith(f"_sources/{notebook}") for link in links), "the download"


def test_no_launch_button_where_there_is_no_notebook(parsed):
    for page, content in parsed.items():
        if page not in CHAPTERS:
            assert not any("colab.research" in link or "mybinder" in link for link in content.links), page


def test_previews_for_other_sites(parsed):
    for page in ["book/index.html", *CHAPTERS]:
        meta = parsed[page].meta
        assert meta["og:site_name"] == "Many Ranks" and len(meta["og:description"]) > 60
        assert meta["og:url"].endswith(page) and meta["og:url"].startswith("https://")
        picture = urlsplit(meta["og:image"]).path
        assert (BOOK / picture[picture.index("_images") :]).stat().st_size > 10_000


def test_chapters_link_to_the_glossary(parsed):
    for chapter in CHAPTERS:
        linked = {link for link in parsed[chapter].links if "glossary.html#term-" in link}
        assert len(linked) >= 2, f"{chapter}: {sorted(linked)}"


@pytest.mark.slow
def test_print(browser, tmp_path):
    """Two pages, printed: open solutions, and a link from one page to the other that stays inside the PDF."""
    pypdf = pytest.importorskip("pypdf")
    out = tmp_path / "book.pdf"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/pdf.py", "book/success", "chapters/02_collectives", "--out", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pdf = pypdf.PdfReader(out)
    text = "\n".join(page.extract_text() for page in pdf.pages)
    assert "Are you there?" in text and "reduce-scatter" in text
    assert [item.title for item in pdf.outline if not isinstance(item, list)][-1].startswith("Collectives")
    inside = [a.get_object() for page in pdf.pages for a in page.get("/Annots", [])]
    assert any("/Dest" in link and "/A" not in link for link in inside), "no link leads to the other page"
