"""Print the built book into one PDF: `_build/html/many-ranks.pdf`, served beside the pages.

    python tools/pdf.py                   # every page of the table of contents, in its order
    python tools/pdf.py book/glossary     # some pages

Each page is printed by Chromium as a reader's browser would print it, with hints and solutions open and each widget at the
choice it starts with. The parts are joined with an outline, and links from page to page lead to the page in the PDF.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser as chromium
from build import ROOT, pages
from playwright.sync_api import Browser, sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, NameObject, NumberObject

HTML = ROOT / "_build/html"
PDF = HTML / "many-ranks.pdf"

FOOT = (
    '<div style="font-size: 8px; width: 100%; margin: 0 14mm; display: flex; justify-content: space-between">'
    '<span>Many Ranks · <span class="title"></span></span><span class="pageNumber"></span></div>'
)
OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def printed(browser: Browser, name: str) -> PdfReader:
    """One page of the site on A4."""
    page = browser.new_page(viewport={"width": 1000, "height": 1200}, color_scheme="light")
    page.add_init_script("localStorage.setItem('mode', 'light'); localStorage.setItem('theme', 'light')")
    page.goto((HTML / f"{name}.html").as_uri(), wait_until="load")
    page.wait_for_timeout(1500)  # the widgets draw themselves
    page.evaluate(OPEN_ALL)
    page.wait_for_timeout(800)  # what was closed fades in
    data = page.pdf(
        format="A4",
        scale=0.72,
        margin={"top": "14mm", "bottom": "16mm", "left": "14mm", "right": "14mm"},
        print_background=True,
        display_header_footer=True,
        header_template="<span></span>",
        footer_template=FOOT,
        outline=True,
        tagged=True,
    )
    page.close()
    return PdfReader(io.BytesIO(data))


def title_of(name: str) -> str:
    """The page's own title, as the browser shows it."""
    text = (HTML / f"{name}.html").read_text(encoding="utf-8")
    return text.partition("<title>")[2].partition("</title>")[0].split("—")[0].strip()


def join(parts: dict[str, PdfReader]) -> PdfWriter:
    """All parts in one document; a link to another part's page leads to where that part begins."""
    writer = PdfWriter()
    begins: dict[Path, int] = {}
    for name, part in parts.items():
        begins[(HTML / f"{name}.html").resolve()] = len(writer.pages)
        writer.append(part, outline_item=title_of(name), import_outline=True)
    for page in writer.pages:
        for annotation in page.get("/Annots", ArrayObject()):
            link = annotation.get_object()
            action = link.get("/A", {})
            address = urlsplit(str(action.get("/URI", "")))
            begin = begins.get(Path(unquote(address.path)).resolve()) if address.scheme == "file" else None
            if begin is not None:
                del link[NameObject("/A")]
                target = writer.pages[begin].indirect_reference
                link[NameObject("/Dest")] = ArrayObject(
                    [target, NameObject("/XYZ"), NumberObject(0), NumberObject(900), NumberObject(0)]
                )
    writer.add_metadata({"/Title": "Many Ranks: distributed training from first principles"})
    writer.page_mode = "/UseOutlines"
    return writer


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the built book into one PDF.")
    parser.add_argument("names", nargs="*", help="pages, as _toc.yml names them (default: all)")
    parser.add_argument("--out", type=Path, default=PDF)
    given = parser.parse_args()
    names = given.names or pages(ROOT)
    missing = [name for name in names if not (HTML / f"{name}.html").exists()]
    if missing:
        sys.exit(f"pdf: not built: {', '.join(missing)}; run make book first")
    path = chromium.find()
    if path is None:
        sys.exit(f"pdf: {chromium.MISSING}")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        parts = {name: printed(browser, name) for name in names}
        browser.close()
    writer = join(parts)
    writer.write(given.out)
    print(f"pdf: {len(writer.pages)} pages, {given.out.stat().st_size / 1e6:.1f} MB, in {given.out}")


if __name__ == "__main__":
    main()
