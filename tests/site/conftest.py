"""The built book, served to a browser that can reach nothing else."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools import browser as installed

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "_build/html"
FIXTURE_SOURCE = Path(__file__).parent / "fixture_book"
FIXTURE = ROOT / "_build/fixture/_build/html"
FIXTURE_PAGES = ["index.html", "widgets.html"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

#: Told apart from real errors: what the theme's own scripts are known to log.
ALLOWED_ERRORS = ("THEBE_JS_URL",)


def book_pages() -> list[str]:
    """Every page of the built book, as paths below its root."""
    if not BOOK.exists():
        return []
    found = (file.relative_to(BOOK) for file in BOOK.rglob("*.html"))
    # 404.html is served at any address, so its links start at the site's root: test_site.py opens it that way.
    return sorted(
        str(file)
        for file in found
        if file.parts[0] not in ("_static", "_sources", "reports") and str(file) != "404.html"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `address` once for every page; one that is marked `explorers`, for pages that have some."""
    if "address" not in metafunc.fixturenames:
        return
    places = [("book", page) for page in book_pages()]
    if metafunc.definition.get_closest_marker("explorers"):
        places = [
            ("book", page) for _, page in places if WIDGET_VIEW in (BOOK / page).read_text(encoding="utf-8")
        ]
        places += [("fixture", "widgets.html")]
    else:
        places = (places or [("book", "")]) + [("fixture", page) for page in FIXTURE_PAGES]
    metafunc.parametrize("address", places, ids=[f"{site}:{page or 'not built'}" for site, page in places])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "explorers: runs on the pages that have explorers")


@pytest.fixture(scope="session")
def fixture_site() -> Path:
    """The fixture book, built (or brought up to date) once a session."""
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tools/build.py",
            "--source",
            FIXTURE_SOURCE,
            "--out",
            ROOT / "_build/fixture",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return FIXTURE


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium, without a window."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the Python package playwright is not installed"
    )
    chromium = installed.find()
    if chromium is None:
        pytest.skip(installed.MISSING)
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Server:
    """A folder served on this machine, under a prefix as GitHub Pages does it; 404.html answers for what isn't there."""

    def __init__(self, folder: Path, prefix: str = "/"):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def translate_path(self, path):
                inside = path.startswith(prefix)
                return super().translate_path("/" + path[len(prefix) :] if inside else "/nothing")

            def send_error(self, code, *arguments, **more):
                page = folder / "404.html"
                if code != 404 or not page.exists():
                    return super().send_error(code, *arguments, **more)
                self.send_response(404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(page.read_bytes())

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.base = f"http://127.0.0.1:{self._server.server_port}{prefix}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    running: dict[str, Server] = {}
    yield running
    for server in running.values():
        server.close()


@dataclass
class Visit:
    """An open page and what went wrong on it."""

    page: object
    problems: list[str] = field(default_factory=list)


@pytest.fixture
def visit(address, browser, servers, request):
    """Open the page of this test at a width, in a theme; `with visit(400, "dark") as opened:`."""
    site, path = address
    if site == "fixture":
        request.getfixturevalue("fixture_site")
    elif not path:
        pytest.skip("the book is not built: run make book")
    if site not in servers:
        servers[site] = Server(FIXTURE if site == "fixture" else BOOK)
    base = servers[site].base

    @contextmanager
    def open_page(width: int = 1300, theme: str = "light", scripts: bool = True) -> Iterator[Visit]:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=scripts, reduced_motion="reduce"
        )
        context.add_init_script(
            f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')"
        )
        page = context.new_page()
        opened = Visit(page)

        def only_here(route):
            if route.request.url.startswith((base, "data:", "blob:")):
                route.continue_()
            else:
                opened.problems.append(f"asked another host: {route.request.url}")
                route.abort()

        def said(message):
            if message.type == "error" and not any(known in message.text for known in ALLOWED_ERRORS):
                opened.problems.append(f"console: {message.text}")

        def failed(error):
            if not any(known in str(error) for known in ALLOWED_ERRORS):
                opened.problems.append(f"script error: {error}")

        def answered(response):
            if response.status >= 400:
                opened.problems.append(f"{response.status}: {response.url}")

        context.route("**/*", only_here)
        page.on("console", said)
        page.on("pageerror", failed)
        page.on("response", answered)
        page.goto(base + path, wait_until="load")
        text = ((FIXTURE if site == "fixture" else BOOK) / path).read_text(encoding="utf-8")
        if leads_on := re.search(r'<meta http-equiv="Refresh" content="0; url=([^"]+)"', text):
            page.wait_for_url(base + leads_on[1], wait_until="load")
        if scripts:
            wait_for_widgets(page)
        yield opened
        context.close()

    return open_page


def wait_for_widgets(page) -> None:
    """Wait until as many widgets are drawn as the page's source announces."""
    page.wait_for_function(
        f"""() => document.querySelectorAll('.widget-subarea').length
                  >= document.querySelectorAll('script[type="{WIDGET_VIEW}"]').length
              && [...document.querySelectorAll('.widget-subarea')].every((area) => area.querySelector('.jupyter-widgets'))
        """,
        timeout=20_000,
    )
    page.wait_for_timeout(300)
