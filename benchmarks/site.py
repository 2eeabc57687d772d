"""How heavy and how quick the book's pages are, beside jupyter-book's defaults.

    python -m benchmarks.site             # builds, opens every page; writes book/benchmarks_site.md and results/site.json
    python -m benchmarks.site --no-build  # opens the pages that lie in _build/html; keeps the builds of the last record

The comparison is one chapter built by `jupyter-book build` with a `_config.yml` that holds a title and nothing else. Its
pages take scripts from public networks of servers; those that npm has are handed to the browser from npm's packages, so
that they count without a network. The rest (stylesheets and fonts of the maths) doesn't arrive and counts nothing, in
the default's favour.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from manyranks.runtime import machine
from tests.site.conftest import Server, wait_for_widgets
from tools import assets
from tools import browser as installed

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build/html"
CHAPTER = "02_collectives"
# What a default page asks other hosts for: the beginning of the address (version cut out) -> npm package, file in it.
CDN = {
    r"/npm/mathjax@3/es5/tex-mml-chtml\.js": ("mathjax@3", "es5/tex-mml-chtml.js"),
    r"/ajax/libs/require\.js/": ("requirejs@2.3.6", "require.js"),
    r"/npm/@jupyter-widgets/html-manager@[^/]*/dist/embed-amd\.js": (
        "@jupyter-widgets/html-manager@1.0.15",
        "dist/embed-amd.js",
    ),
}


def fetched() -> dict[str, bytes]:
    """The default page's scripts, from npm's packages."""
    out = {}
    for pattern, (package, name) in CDN.items():
        with tarfile.open(fileobj=io.BytesIO(assets.pack(assets.find("npm"), package))) as tar:
            out[pattern] = tar.extractfile(f"package/{name}").read()
    return out


def _build(command: list[str], cwd: Path) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - began


def default_book(folder: Path) -> Path:
    """One chapter as jupyter-book builds it with its defaults."""
    (folder / "_config.yml").write_text(
        "title: default\nexecute:\n  execute_notebooks: force\n  timeout: 120\n"
    )
    (folder / "_toc.yml").write_text(f"format: jb-book\nroot: {CHAPTER}\n")
    shutil.copy(ROOT / f"chapters/{CHAPTER}.ipynb", folder)
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", "."]
    _build(command, folder)
    page = folder / f"_build/html/{CHAPTER}.html"
    # npm's copies of the scripts have other digests than the addresses in the page.
    page.write_text(re.sub(r' integrity="[^"]*"', "", page.read_text(encoding="utf-8")), encoding="utf-8")
    return page.parent


def open_page(
    browser: Browser, base: str, name: str, scripts: dict[str, bytes]
) -> tuple[Page, dict[str, Any]]:
    """A page, opened with an empty cache; what it made the browser fetch, compressed, and when one can use it."""
    page = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
    sizes: dict[str, int] = {}
    missing: list[str] = []

    def answer(route) -> None:
        address = route.request.url
        if address.startswith((base, "data:", "blob:")):
            route.continue_()
            return
        for pattern, data in scripts.items():
            if re.search(pattern, address):
                sizes[address] = len(gzip.compress(data))
                headers = {"Access-Control-Allow-Origin": "*", "Content-Type": "text/javascript"}
                route.fulfill(body=data, headers=headers)
                return
        missing.append(address)
        route.abort()

    def arrived(response) -> None:
        if response.url.startswith(base) and response.ok:
            body = response.body()
            sizes[response.url] = (
                len(body) if response.url.endswith((".woff2", ".png")) else len(gzip.compress(body))
            )

    page.route("**/*", answer)
    page.on("response", arrived)
    page.goto(base + name, wait_until="load")
    has_widgets = page.locator('script[type="application/vnd.jupyter.widget-view+json"]').count()
    if has_widgets:
        wait_for_widgets(page)
    ready = page.evaluate("performance.now()") / 1e3 - 0.3  # wait_for_widgets ends with a pause of 0.3 s
    page.wait_for_load_state("networkidle")
    found = {
        "page": name,
        "compressed_bytes": sum(sizes.values()),
        "files": len(sizes),
        "not_fetched": len(missing),
        "interactive_seconds": ready if has_widgets else page.evaluate(
            "performance.getEntriesByType('navigation')[0].domInteractive / 1e3"
        ),
    }  # fmt: skip
    return page, found


SLIDE = """
async (steps) => {
  // From the key to the frame in which the new picture is painted: two animation frames after the last change of the page.
  const took = [];
  for (const handle of [...document.querySelectorAll('.mr-explore .noUi-handle')].filter((h) => h.offsetParent)) {
    for (let i = 0; i < steps; i++) {
      handle.focus();
      const before = handle.getAttribute('aria-valuenow');
      const key = i % 6 < 3 ? 'ArrowRight' : 'ArrowLeft';
      const began = performance.now();
      handle.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      if (handle.getAttribute('aria-valuenow') !== before) took.push(performance.now() - began);
    }
  }
  return took;
}
"""


def measure(build: bool) -> dict[str, Any]:
    """All figures of one run."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("jupyter-book", "sphinx", "ipywidgets")},
        "build": {},
        "pages": [],
    }
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        folder = Path(name)
        browser = started.chromium.launch(executable_path=installed.find(), args=["--no-sandbox"])
        found["versions"]["Chromium"] = browser.version
        if build:
            command = [sys.executable, "tools/build.py"]
            shutil.rmtree(ROOT / "_build/html", ignore_errors=True)
            shutil.rmtree(ROOT / "_build/.doctrees", ignore_errors=True)
            shutil.rmtree(ROOT / "_build/.jupyter_cache", ignore_errors=True)
            found["build"]["date"] = found["date"]
            found["build"]["clean"] = _build(command, ROOT)
            found["build"]["nothing changed"] = _build(command, ROOT)
            page = ROOT / "book/how_to_use.md"
            text = page.read_bytes()
            try:
                page.write_bytes(text + b"\n")
                found["build"]["one page of text changed"] = _build(command, ROOT)
            finally:
                page.write_bytes(text)
            _build(command, ROOT)
        scripts = fetched()
        plain = Server(default_book(folder))
        page, opened = open_page(browser, plain.base, f"{CHAPTER}.html", scripts)
        found["default"] = opened
        page.context.close()
        site = Server(HTML)
        for file in sorted(HTML.glob("chapters/*.html")) + [
            HTML / "book/index.html",
            HTML / "book/glossary.html",
        ]:
            page, opened = open_page(browser, site.base, file.relative_to(HTML).as_posix(), {})
            if page.locator(".mr-explore").count():
                took = sorted(page.evaluate(SLIDE, 12))
                opened["slider_milliseconds"] = {
                    "steps": len(took),
                    "median": statistics.median(took),
                    "p95": took[int(0.95 * (len(took) - 1))],
                }
            page.context.close()
            found["pages"].append(opened)
        plain.close()
        site.close()
        browser.close()
    return found


PAGE = """<!-- Generated by `python -m benchmarks.site`; edit benchmarks/site.py instead. -->
# The pages, weighed and timed

What a reader's browser fetches (compressed, with an empty cache), when the page can be used (its widgets are drawn), and
how long a step of a slider takes from the key to the new picture. Measured on {date}: {cpu}, {cores} cores, {os}, Chromium
{chromium}, pages served from the same machine.

{pages}

The default is the same chapter built by jupyter-book {jupyter_book} with a configuration that holds a title only, opened in
the same run. {missing} further files that it asks other hosts for are not counted. Its sliders move nothing.

{build}
"""


def render(found: dict[str, Any]) -> str:
    """The page of the book that shows the figures."""
    head = ["page", "compressed", "files", "usable after", "slider step, median", "95 of 100 within"]
    rows = [["**chapter 2 with defaults**", *_cells(found["default"])]]
    rows += [[Path(p["page"]).stem, *_cells(p)] for p in found["pages"]]
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)]
    built = [f"| {what} | {seconds:.0f} s |" for what, seconds in found["build"].items() if what != "date"]
    return PAGE.format(
        date=found["date"],
        cpu=found["machine"]["cpu"],
        cores=found["machine"]["cores"],
        os=found["machine"]["os"],
        chromium=found["versions"]["Chromium"],
        jupyter_book=found["versions"]["jupyter-book"],
        missing=found["default"]["not_fetched"],
        pages="\n".join(table),
        build="\n".join(
            [f"| a build, all chapters run ({found['build']['date']}) | |", "| --- | ---: |", *built]
        )
        if built
        else "",
    )


def _cells(page: dict[str, Any]) -> list[str]:
    slider = page.get("slider_milliseconds")
    return [
        f"{page['compressed_bytes'] / 1e3:.0f} kB",
        str(page["files"]),
        f"{page['interactive_seconds']:.2f} s",
        f"{slider['median']:.0f} ms" if slider else "",
        f"{slider['p95']:.0f} ms" if slider else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.site", description=__doc__.splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="measure what is built")
    given = parser.parse_args()
    found = measure(not given.no_build)
    record = ROOT / "results/site.json"
    if given.no_build and record.exists():
        found["build"] = json.loads(record.read_text(encoding="utf-8"))["build"]
    text = render(found)
    print(text)
    (ROOT / "book/benchmarks_site.md").write_text(text, encoding="utf-8")
    record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
