"""The book's own Sphinx extension: a site that asks no other host for anything, and widgets that live.

`_config.yml` names it under `local_extensions`, so a plain `jupyter-book build .` uses it too.

* If `tools/assets.py` has fetched the browser assets, pages load them from the book itself and formulas are
  rendered by KaTeX while the book is built. If not, pages take html-manager and MathJax from a public CDN.
* The scripts of the theme's search, with the index of the whole book, are loaded by the search page only. There,
  glossary entries and chapters come before other pages.
* Notebook figures that `manyranks.show` drew are put into the page as SVG elements, so that their text takes
  the page's colour in both themes, and are searched and selected as text.
* A widget's first frame stands in `<noscript>`.
* A term of the glossary that a chapter sets in bold, where it explains it, links to its entry.
* The theme's 1.5 MB icon script, which also breaks the Play button, is replaced by the icon fonts that the
  theme ships, cut down to the icons in use.
* Changing `manyranks/` runs the notebooks again (the execution cache looks only at the notebook).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import assets
import pydata_sphinx_theme
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.index_entries import split_index_msg
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SITE = Path(__file__).with_name("site")
EMBED_CDN = "https://cdn.jsdelivr.net/npm/@jupyter-widgets/html-manager@1.0.15/dist/embed.js"
WIDGETS = "widgets/widgets.js"


def setup(app: Sphinx) -> dict:
    app.add_html_math_renderer("katex", (visit_math, None), (visit_math_block, None))
    app.connect("config-inited", configure, priority=100)
    app.connect("env-get-outdated", outdated_pages)
    app.connect("html-page-context", tidy_scripts, priority=900)
    app.connect("html-collect-pages", remember_index_entries)
    app.connect("build-finished", finish)
    app.add_post_transform(FallbackFrame)
    app.add_post_transform(InlineFigures)
    app.add_post_transform(GlossaryLinks)
    # Before any other script: should the theme's icon script run after all, it must leave the <i> in place,
    # or the Play button's own code fails.
    app.add_js_file(None, body="window.FontAwesomeConfig = {autoReplaceSvg: 'nest'}", priority=1)
    app.add_css_file("manyranks.css", priority=900)
    app.add_js_file("manyranks.js", defer="defer")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


# --- where things come from -----------------------------------------------------------------------------------


def configure(app: Sphinx, config) -> None:
    """Point the page at its assets, here or on a CDN, and let kernels find the package."""
    static = [str(assets.ROOT / "book/assets")]
    if config_of_assets() == "here":
        static.append(str(assets.ASSETS / "site"))
        config.nb_ipywidgets_js = {WIDGETS: {"defer": "defer"}}
        config.html_math_renderer = "katex"
    else:
        logger.info(
            "the browser assets are not here: pages will use a CDN (python tools/assets.py fetches them)"
        )
        config.nb_ipywidgets_js = {EMBED_CDN: {"crossorigin": "anonymous", "defer": "defer"}}
        config.html_math_renderer = "mathjax"
    config.html_static_path = static
    # The page for addresses that don't exist is served at any depth, so its links start at the site's root.
    start = config.notfound_urls_prefix = urlsplit(config.html_baseurl).path or "/"
    config.notfound_context = {
        "title": "No such page",
        "body": "<h1>No such page</h1><p>This address leads nowhere in this book: the page was renamed, or the link is "
        f'mistyped. The chapters are in the menu; the <a href="{start}genindex.html">index</a> and the '
        f'<a href="{start}search.html">search</a> find what moved.</p>',
    }
    config.ogp_site_url = config.html_baseurl
    config.templates_path.append(str(SITE / "templates"))
    config.html_search_scorer = str(SITE / "scorer.js")
    # The search stands in the sidebar; the theme would add an otherwise empty bar on top for a second one.
    config.html_theme_options.setdefault("navbar_persistent", [])
    root = str(assets.ROOT)
    if root not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    _forget_old_runs(app)


def _forget_old_runs(app: Sphinx) -> None:
    """Note what changed since the last good build that Sphinx doesn't see; empty the execution cache if it must be."""
    mark = _mark(app)
    before = json.loads(mark.read_text()) if mark.exists() else {}
    app.manyranks_now = {
        "package": _digest((assets.ROOT / "manyranks").rglob("*.py")),
        "site": _digest([*(assets.ROOT / "book/assets").iterdir(), *SITE.rglob("*"), __file__]),
        "assets": config_of_assets(),
    }
    app.manyranks_stale = {key for key, value in app.manyranks_now.items() if before.get(key) != value}
    if app.manyranks_now["package"] != before.get("package"):
        shutil.rmtree(mark.parent / ".jupyter_cache", ignore_errors=True)
        # Noted now: should this build fail, the next one keeps what was run until then.
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({**before, "package": app.manyranks_now["package"]}))


def remember_index_entries(app: Sphinx) -> list:
    """Put the glossary's terms back into the search: Sphinx loses those of pages that it didn't write this time."""
    known = app.builder.indexer._index_entries
    for docname, entries in app.env.get_domain("index").entries.items():
        if docname not in known:
            known[docname] = sorted(
                {
                    (word, target or "", main)
                    for kind, value, target, main, _ in entries
                    for word in split_index_msg(kind, value)
                }
            )
    return []


def _mark(app: Sphinx) -> Path:
    return Path(app.outdir).parent / ".manyranks_digests.json"


def _digest(files) -> str:
    digest = hashlib.sha256()
    for file in sorted(map(Path, files)):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def config_of_assets() -> str:
    """Which way pages find their assets: a change of it concerns every page."""
    return "here" if assets.ready() and assets.find("node") else "cdn"


def outdated_pages(app: Sphinx, env, added, changed, removed) -> list[str]:
    """The pages to read again: all when the site's own files changed, the notebooks when the package did."""
    if app.manyranks_stale - {"package"}:
        return list(env.found_docs)
    if "package" in app.manyranks_stale:
        return [name for name in env.found_docs if str(env.doc2path(name)).endswith(".ipynb")]
    return []


def tidy_scripts(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Leave out sphinx-thebe, which the book doesn't use; give pages with formulas or widgets their stylesheets.

    Colab and Binder open notebooks: a page that is executed but isn't a notebook gets no button for them.
    """
    if "header_buttons" in context and not str(app.env.doc2path(pagename)).endswith(".ipynb"):
        context["header_buttons"] = [
            b for b in context["header_buttons"] if b.get("label") != "launch-buttons"
        ]
    scripts = context.get("script_files")
    if scripts is not None:
        context["script_files"] = [
            s
            for s in scripts
            if "thebe" not in str(getattr(s, "filename", s) or "")
            and "THEBE" not in str(getattr(s, "attributes", {}).get("body", ""))
        ]
        if any(str(getattr(s, "filename", s)).endswith(WIDGETS) for s in scripts):
            app.add_css_file("widgets/widgets.css")
    if (
        app.builder.math_renderer_name == "katex"
        and doctree is not None
        and any(True for _ in doctree.findall(lambda n: isinstance(n, (nodes.math, nodes.math_block))))
    ):
        app.add_css_file("katex/katex.min.css")


# --- formulas ---------------------------------------------------------------------------------------------------


@functools.cache
def _server(process: int) -> subprocess.Popen:
    """The Node process that renders formulas, one for each process that writes pages."""
    script = SITE / "katex_server.js"
    return subprocess.Popen(
        [assets.find("node"), str(script), str(assets.ASSETS / "build/katex.min.js")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@functools.cache
def _katex(tex: str, display: bool) -> tuple[str, str]:
    server = _server(os.getpid())
    server.stdin.write(json.dumps({"tex": tex, "display": display}) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        raise RuntimeError("the formula renderer stopped")
    answer = json.loads(line)
    return answer.get("html", ""), answer.get("error", "")


def _formula(node: nodes.Element, tex: str, display: bool) -> str:
    # Sphinx numbers equations; KaTeX must not do it once more.
    tex = re.sub(r"\\(begin|end)\{(align|alignat|equation|gather)\}", r"\\\1{\2*}", tex)
    markup, error = _katex(tex, display)
    if error:
        logger.warning(
            "KaTeX can't render %r: %s", tex, error, location=node, type="manyranks", subtype="formula"
        )
        return f'<code class="mr-formula-error">{nodes.unescape(tex)}</code>'
    return markup


def visit_math(self, node) -> None:
    self.body.append(self.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    self.body.append(_formula(node, node.astext(), False) + "</span>")
    raise nodes.SkipNode


def visit_math_block(self, node) -> None:
    self.body.append(self.starttag(node, "div", "", CLASS="math notranslate nohighlight"))
    if node.get("number"):
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, _("Link to this equation"))
        self.body.append("</span>")
    self.body.append(_formula(node, node.astext().strip(), True) + "</div>\n")
    raise nodes.SkipNode


# --- words ------------------------------------------------------------------------------------------------------


class GlossaryLinks(SphinxPostTransform):
    """Link the terms that a chapter sets in bold to the glossary; the notebooks' own text stays plain."""

    default_priority = 4
    formats = ("html",)

    def run(self, **kwargs) -> None:
        if not self.env.docname.startswith("chapters/"):
            return
        terms = {
            name.lower(): (name, entry)
            for name, _, kind, entry, anchor, _ in self.env.get_domain("std").get_objects()
            if kind == "term"
            for entry in [f"{self.app.builder.get_relative_uri(self.env.docname, entry)}#{anchor}"]
        }
        linked: set[str] = set()
        for strong in list(self.document.findall(nodes.strong)):
            words = strong.astext().strip().rstrip(".:,").lower()
            found = next(
                (w for w in (words, words.removesuffix("s"), words.removesuffix("es")) if w in terms), None
            )
            if found is None or found in linked or isinstance(strong.parent, (nodes.reference, nodes.title)):
                continue
            linked.add(found)
            name, uri = terms[found]
            link = nodes.reference("", "", internal=True, refuri=uri, reftitle=f"Glossary: {name}")
            strong.replace_self(link)
            link += strong


# --- figures ----------------------------------------------------------------------------------------------------


class FallbackFrame(SphinxPostTransform):
    """Keep the picture that stands beside a widget, for browsers that run no script."""

    default_priority = 3  # before MyST-NB chooses one output of each bundle
    formats = ("html",)

    def run(self, **kwargs) -> None:
        for bundle in list(self.document.findall(nodes.container)):
            if bundle.get("nb_element") != "mime_bundle":
                continue
            kinds = {child.get("mime_type"): child for child in bundle.children}
            if WIDGET_VIEW not in kinds:
                continue
            markup = None
            if "image/svg+xml" in kinds:
                for image in kinds["image/svg+xml"].findall(nodes.image):
                    markup = _svg_of(self, image)
            elif "text/html" in kinds:
                markup = kinds["text/html"].astext()
            if markup:
                bundle.parent.insert(
                    bundle.parent.index(bundle) + 1,
                    nodes.raw(
                        "", f'<noscript><div class="mr-frame">{markup}</div></noscript>', format="html"
                    ),
                )


class InlineFigures(SphinxPostTransform):
    """Put the SVG of a notebook's figure into the page, rather than refer to a file."""

    default_priority = 6  # after MyST-NB has chosen
    formats = ("html",)

    def run(self, **kwargs) -> None:
        for image in list(self.document.findall(nodes.image)):
            if "jupyter_execute" not in image.get("uri", ""):
                continue
            svg = _svg_of(self, image)
            if svg is not None:
                image.replace_self(nodes.raw("", f'<div class="mr-frame">{svg}</div>', format="html"))
            elif (
                not image.get("alt")
                or image["alt"] in (image["uri"], os.path.basename(image["uri"]))
                or "jupyter_execute" in image["alt"]
            ):
                logger.warning(
                    "a figure of this notebook has no alternative text (use manyranks.show.picture,"
                    " or mystnb.image.alt)",
                    location=image,
                    type="manyranks",
                    subtype="alt",
                )


def _svg_of(transform: SphinxPostTransform, image: nodes.image) -> str | None:
    """The SVG that `image` refers to, if `manyranks.show` drew it."""
    place = Path(transform.app.srcdir) / image["uri"].lstrip("/")
    if place.suffix != ".svg" or not place.exists():
        place = Path(image["uri"])
    if place.suffix != ".svg" or not place.exists():
        return None
    text = place.read_text(encoding="utf-8")
    return text.strip() if "mr-svg" in text[:300] else None


# --- the end ----------------------------------------------------------------------------------------------------


def finish(app: Sphinx, exception: Exception | None) -> None:
    if _server.cache_info().currsize:
        _server(os.getpid()).stdin.close()
    if exception is None:
        _mark(app).write_text(json.dumps(app.manyranks_now))
    if exception is None and app.builder.format == "html":
        _use_icon_fonts(Path(app.outdir) / "_static")


def _use_icon_fonts(static: Path) -> None:
    """Empty the theme's icon script and cut its icon fonts down to the icons that the theme's files can name."""
    script = static / "scripts/fontawesome.js"
    fonts = static / "vendor/fontawesome/webfonts"
    styles = static / "styles/pydata-sphinx-theme.css"
    if not script.exists() or not fonts.exists() or ".fa-play:before" not in styles.read_text():
        logger.warning("the theme's icons are not where they used to be; its icon script is left as it is")
        return
    script.write_text(
        "/* The icons of this site come from the icon fonts, see tools/manyranks_sphinx.py. */\n"
    )
    try:
        import brotli  # noqa: F401  (fontTools needs it for woff2)
        from fontTools import subset
    except ImportError:
        logger.info("brotli is not installed: the icon fonts are served whole")
        return
    css = styles.read_text()
    names = {
        "play",
        "pause",
        "stop",
        "step-backward",
        "step-forward",
        "backward",
        "forward",
        "retweet",
    }  # Play's own
    for file in [*static.parent.rglob("*.html"), *static.rglob("*.js")]:
        names |= set(re.findall(r"\bfa-([a-z][a-z0-9-]*)", file.read_text(encoding="utf-8", errors="ignore")))
    named = re.compile(r'((?:\.fa-[\w-]+:{1,2}before,?)+)\{content:"\\([0-9a-f]+)"\}')
    codes = {0x20}
    for chosen, code in named.findall(css):
        if names & set(re.findall(r"fa-([\w-]+):", chosen)):
            codes.add(int(code, 16))
    for file in static.rglob("*.css"):  # icons that stylesheets put in by themselves
        text = named.sub("", file.read_text(encoding="utf-8", errors="ignore"))
        codes |= {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", text)}
    before = after = 0
    theme = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static"
    for font in fonts.glob("*.woff2"):
        # From the whole font each time: in a later build other icons may be in use.
        whole = theme / font.relative_to(static)
        before += whole.stat().st_size
        options = subset.Options(flavor="woff2", notdef_outline=True, layout_features=[])
        options.drop_tables += ["FFTM"]
        loaded = subset.load_font(str(whole), options)
        worker = subset.Subsetter(options)
        worker.populate(unicodes=codes)
        worker.subset(loaded)
        subset.save_font(loaded, str(font), options)
        after += font.stat().st_size
    logger.info("icon fonts: %d icons, %.0f kB of %.0f", len(codes) - 1, after / 1e3, before / 1e3)
