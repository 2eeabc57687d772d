"""Every page of the built book, in a real browser: no other host, no error, formulas, both themes, both widths."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .conftest import BOOK, FIXTURE, ROOT, WIDGET_VIEW, wait_for_widgets

#: A page of a chapter, with everything that it loads, compressed (see CONTRIBUTING on the budget).
BUDGET = 700_000

# Contrast of all visible text in the article against the colour behind it. Text in a picture that has a fill of its
# own (a label on a coloured box) is left out: `tests/test_explore.py` holds those colours to their limits.
CONTRAST = r"""
() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = [r, g, b].map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const over = (top, under) => { const a = top[3] ?? 1; return [0, 1, 2].map((i) => a * top[i] + (1 - a) * under[i]); };
  const known = new Map();
  const behind = (element) => {
    if (!known.has(element)) known.set(element, below(element));
    return known.get(element);
  };
  const below = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length && (colour[3] ?? 1) > 0) { layers.push(colour); if ((colour[3] ?? 1) === 1) break; }
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const bad = [];
  const article = document.querySelector('.bd-article') || document.body;
  for (const element of article.querySelectorAll('*:not(.katex *)')) {  // a formula has its surroundings' colour
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join('');
    if (!text || element.closest('script, style, noscript, .katex-mathml, .visually-hidden, .headerlink, .copybtn')) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    const colour = parse(drawn ? style.fill : style.color);
    if (drawn && style.fill !== style.color) continue;
    const back = behind(drawn ? element.ownerSVGElement.parentElement : element);
    const [a, b] = [light(over(colour, back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)} for "${text.slice(0, 40)}" (${element.tagName}.${element.className.baseVal ?? element.className})`);
  }
  return [...new Set(bad)].slice(0, 12);
}
"""

FORMULAS = r"""
() => {
  const bad = [];
  for (const math of document.querySelectorAll('.bd-article .math, .bd-article .amsmath')) {
    if (!math.querySelector('.katex, mjx-container')) bad.push('not rendered: ' + math.textContent.slice(0, 60));
  }
  for (const wrong of document.querySelectorAll('.katex-error, .mr-formula-error, mjx-merror')) {
    bad.push('in error: ' + wrong.textContent.slice(0, 60));
  }
  const text = document.querySelector('.bd-article')?.cloneNode(true);
  text?.querySelectorAll('pre, code, .katex, script, .jupyter-widgets, svg').forEach((e) => e.remove());
  const raw = text?.textContent.match(/\\\(|\\\[|\$\$|\\frac|\\begin\{/);
  if (raw) bad.push('raw formula in the text: ' + raw[0]);
  return bad;
}
"""

WITHOUT_WORDS = r"""
() => [...document.querySelectorAll('.bd-article img, .bd-article svg.mr-svg')]
  .filter((e) => e.checkVisibility())
  .map((e) => [e, e.getAttribute('alt') ?? e.getAttribute('aria-label') ?? ''])
  .filter(([e, words]) => !words.trim() || /_build|_images|jupyter_execute|\.(png|svg)$/.test(words))
  .map(([e, words]) => `${e.tagName} ${e.src || ''} "${words}"`)
"""


def _wait_for_theme(page, theme: str) -> None:
    page.evaluate(
        f"document.documentElement.dataset.theme = document.documentElement.dataset.mode = '{theme}'"
    )
    page.wait_for_timeout(300)  # the theme fades between its colours


def test_page(visit, address) -> None:
    with visit(1300, "light") as opened:
        page = opened.page
        problems = _weight(page, address[0])
        problems += [f"formula {p}" for p in page.evaluate(FORMULAS)]
        problems += [f"picture without words: {p}" for p in page.evaluate(WITHOUT_WORDS)]
        for theme in ("light", "dark"):
            _wait_for_theme(page, theme)
            problems += [f"{theme}: contrast {p}" for p in page.evaluate(CONTRAST)]
            for width in (400, 1300):
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_timeout(100)
                over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                if over > 0:
                    problems.append(f"{theme}: scrolls sideways by {over} px at {width} px")
        problems += opened.problems
    assert not problems, "\n".join(problems)


def _weight(page, site: str) -> list[str]:
    """What the page made the browser fetch, compressed, is within the budget; and only what it uses."""
    root = BOOK if site == "book" else FIXTURE
    loaded: dict[str, int] = {}
    path = urlsplit(page.url).path.lstrip("/")  # the site's first address leads on to book/index.html
    names = page.evaluate("performance.getEntriesByType('resource').map((e) => new URL(e.name).pathname)")
    for name in {f"/{path}", *names}:
        file = root / name.lstrip("/")
        if file.is_file():
            data = file.read_bytes()
            loaded[name] = len(data) if file.suffix == ".woff2" else len(gzip.compress(data))
    problems = []
    has_widgets = "application/vnd.jupyter.widget-state+json" in (root / path).read_text(encoding="utf-8")
    if any("widgets.js" in name for name in loaded) != has_widgets:
        problems.append("widgets.js belongs on pages with widgets, and only there")
    if any("searchindex" in name for name in loaded) != (path == "search.html"):
        problems.append("the search index belongs on the search page, and only there")
    total = sum(loaded.values())
    print(f"{site}:{path}: {total / 1e3:.0f} kB compressed, {len(loaded)} files")
    if total > BUDGET:
        largest = sorted(loaded.items(), key=lambda item: -item[1])[:8]
        problems.append(
            f"{total / 1e3:.0f} kB: " + ", ".join(f"{name} {size / 1e3:.0f} kB" for name, size in largest)
        )
    return problems


AXE = r"""
(rules) => axe.run(document, { resultTypes: ['violations'], runOnly: rules })
  .then((found) => found.violations.filter((v) => ['serious', 'critical'].includes(v.impact))
    .map((v) => `${v.impact} ${v.id}: ${v.help}: ` + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160)).join(' | ')))
"""


# A chapter has 200 blocks of code with 30,000 words in them, which take axe most of its time, in a dozen colours. One that
# holds no kind of word that the blocks before it didn't is taken out first: what it could show they show.
ONE_OF_A_KIND = r"""
() => {
  const seen = new Set();
  for (const block of document.querySelectorAll('.highlight')) {
    const kinds = [...new Set([...block.querySelectorAll('span')].map((word) => word.className))];
    if (seen.size && kinds.every((kind) => seen.has(kind))) block.remove();
    kinds.forEach((kind) => seen.add(kind));
  }
}
"""


def test_no_barriers(visit, address) -> None:
    """axe-core finds nothing serious or critical; what depends on the theme is looked at in both."""
    script = ROOT / "_assets/build/axe.min.js"
    if not script.exists():
        pytest.skip("axe-core has not been fetched: run python tools/assets.py")
    with visit(1300, "light") as opened:
        opened.page.add_script_tag(content=script.read_text(encoding="utf-8"))
        opened.page.evaluate(ONE_OF_A_KIND)
        everything = {
            "type": "tag",
            "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
        }
        problems = [f"light: {p}" for p in opened.page.evaluate(AXE, everything)]
        _wait_for_theme(opened.page, "dark")
        contrast = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
        problems += [f"dark: {p}" for p in opened.page.evaluate(AXE, contrast)]
    assert not problems, "\n".join(problems)


def test_phone_from_the_start(visit) -> None:
    """Opened at 400 px in the dark, rather than brought there."""
    with visit(400, "dark") as opened:
        over = opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"scrolls sideways by {over} px"
        assert not opened.problems, "\n".join(opened.problems)


@pytest.mark.explorers
def test_without_scripts(visit, address) -> None:
    """A reader with scripts off still gets the first frame of each widget."""
    site, path = address
    source = (BOOK if site == "book" else FIXTURE) / path
    with visit(1300, scripts=False) as opened:
        wanted = source.read_text(encoding="utf-8").count(f'type="{WIDGET_VIEW}"')
        shown = opened.page.locator("noscript .mr-frame").count()
        assert shown >= wanted, f"{wanted} widgets, {shown} pictures in their place"


@pytest.mark.explorers
def test_from_a_disk(visit, address, browser) -> None:
    """The page works when its file is opened with no server at all."""
    site, path = address
    if site == "fixture":
        with visit(scripts=False):  # so that it is built
            pass
    context = browser.new_context()
    page = context.new_page()
    page.goto(((BOOK if site == "book" else FIXTURE) / path).as_uri(), wait_until="load")
    wait_for_widgets(page)
    assert page.locator(".mr-explore .mr-frame").first.is_visible()
    context.close()


def test_built_files_name_no_other_host(address) -> None:
    """No script, stylesheet, font or picture of another host is named in the page, whether loaded or not."""
    site, path = address
    root = BOOK if site == "book" else FIXTURE
    file: Path = root / path
    if not path or not file.exists():
        return
    html = file.read_text(encoding="utf-8")
    foreign = re.findall(r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//[^"]+"', html)
    foreign += re.findall(r'<link(?![^>]+rel="canonical")[^>]+href="(?:https?:)?//[^"]+"', html)
    assert not foreign, foreign
