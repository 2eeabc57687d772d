"""What the feedback pages and the class report share: one page of HTML that needs nothing else, in light and dark."""

from __future__ import annotations

import html

__all__ = ["escape", "number", "page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f1f3f5; --line: #c9ced4; --good: #0a6b2d;
  --bad: #a8071a; --mark: #1f5fae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15181c; --soft: #22272d; --line: #454c55;
  --good: #6fd08c; --bad: #ff9a8f; --mark: #7db4f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; font: 1rem/1.55 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { background: var(--soft); padding: .7rem .9rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .9rem/1.45 ui-monospace, monospace; }
.scroll { overflow-x: auto; } .big { font-size: 1.3rem; font-weight: 600; }
.passed { color: var(--good); font-weight: 600; } .failed { color: var(--bad); font-weight: 600; }
section.test { border-left: .25rem solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1.2rem 0; }
section.test.failed-test { border-left-color: var(--bad); }
summary { cursor: pointer; } :focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font: 13px system-ui, sans-serif; }
svg .bar { fill: var(--mark); } svg .axis { stroke: var(--line); }
@media print { body { max-width: none; } details > *:not(summary) { display: block; } }
"""


def escape(text: object) -> str:
    """Text for HTML, whoever wrote it: markup and control characters have no effect."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return html.escape(plain, quote=True)


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def page(title: str, body: str) -> str:
    """A whole page. The policy in its head lets nothing be loaded and nothing run, whatever `body` holds."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
