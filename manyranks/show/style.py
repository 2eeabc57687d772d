"""One look for every picture in the book.

A picture is an SVG whose text is text. It is legible on a light and on a dark page, and it is the same
to the byte whenever it is drawn again, because the notebooks' stored outputs are compared.

>>> from manyranks.show.style import figure, picture
>>> fig = figure(480, 200)
>>> ax = fig.add_subplot()
>>> _ = ax.plot([1, 2, 4, 8], [1.0, 1.5, 1.75, 1.875])
>>> picture(fig, alt="Sent bytes rise towards twice the message as ranks grow")
Picture('Sent bytes rise towards twice the message as ranks grow')

How both themes are served: text, axes and grid are drawn in `INK`, and `to_svg` writes that colour as
`currentColor`. Inside a page the picture then takes the page's own text colour. Where the SVG stands alone
(a notebook on a code host, an `<img>`), it falls back to a mid grey with a contrast of about 4.3 on both
white and near-black. Fills come from `COLORS`, whose contrast is at least 3 against both.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import xml.etree.ElementTree as ET

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "INK",
    "ON_FILL",
    "HATCHES",
    "Picture",
    "canvas",
    "color",
    "figure",
    "picture",
    "to_svg",
    "use",
]

#: Fill and line colours: each has a contrast of 3 or more on white and on #121212, black text on them has 4.5
#: or more, and neighbours differ in hue for the common kinds of colour blindness (after Okabe and Ito).
COLORS = {
    "blue": "#1f7fc4",
    "orange": "#b87d00",
    "green": "#00916a",
    "red": "#d55e00",
    "purple": "#8a6bd1",
    "pink": "#c4669a",
    "teal": "#0f9aa8",
    "grey": "#7c7c7c",
}

#: Hatches to pair with the colours, so that colour is not the only carrier of meaning.
HATCHES = ["", "///", "...", "\\\\\\", "xx", "++", "--", "oo"]

#: The colour of text, axes and grids. `to_svg` turns exactly this colour into `currentColor`.
INK = "#797a7b"

#: The colour of text that stands on a fill from `COLORS`, in both themes.
ON_FILL = "#000000"

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_DPI = 72  # the SVG backend's own unit, so that one matplotlib point is one CSS pixel here

_RC = {
    "figure.dpi": _DPI,
    "figure.facecolor": "none",
    "figure.edgecolor": "none",
    "savefig.facecolor": "none",
    "savefig.edgecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=list(COLORS.values())),
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.8,
    "font.size": 12,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "patch.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "manyranks",
}


def use() -> None:
    """Set the book's look in matplotlib's `rcParams` (for this process). `figure` and `canvas` call it."""
    matplotlib.rcParams.update(_RC)


def color(index: int) -> str:
    """The colour for item number `index` (a rank, a chunk, a stage); repeats after eight.

    >>> color(0), color(8) == color(0)
    ('#1f7fc4', True)
    """
    return list(COLORS.values())[index % len(COLORS)]


def figure(
    width: float = 520,
    height: float = 260,
    *,
    left: float = 60,
    right: float = 16,
    top: float = 34,
    bottom: float = 48,
) -> Figure:
    """A figure of `width` by `height` CSS pixels, with margins in pixels, in the book's look.

    Add axes with `fig.add_subplot()` or `fig.subplots(...)`. The margins are fixed rather than fitted, so that
    axes stay in place from frame to frame of an explorer. The figure is not known to pyplot: nothing is shown
    until you return `picture(fig, alt=...)`, and nothing has to be closed.

    Widths up to 520 fit a phone with readable text; a wider picture scrolls sideways inside its own box there.
    """
    for name, value in {"width": width, "height": height}.items():
        if not value > 0:
            raise ValueError(f"{name} must be a positive number of pixels, got {value!r}")
    use()
    fig = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    fig.subplots_adjust(
        left=left / width, right=1 - right / width, bottom=bottom / height, top=1 - top / height
    )
    return fig


def canvas(width: float = 520, height: float = 260) -> tuple[Figure, Axes]:
    """A figure with one bare axes whose data units are pixels, (0, 0) at the top left: for diagrams.

    >>> fig, ax = canvas(200, 100)
    >>> _ = ax.text(100, 50, "rank 0", ha="center")
    >>> to_svg(fig).startswith("<svg")
    True
    """
    fig = figure(width, height, left=0, right=0, top=0, bottom=0)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_axis_off()
    return fig, ax


class Picture:
    """An SVG with its alternative text. Shows itself in a notebook; its text form is the alt text.

    Attributes
    ----------
    svg : str
        The whole SVG element, which carries `alt` as its accessible name.
    alt : str
        What the picture says, in words.
    """

    def __init__(self, svg: str, alt: str):
        if not isinstance(svg, str) or "<svg" not in svg:
            raise TypeError(f"svg must be a string with an <svg> element, got {svg!r:.60}")
        if not isinstance(alt, str) or not alt.strip():
            raise ValueError(f"alt must be a non-empty string that says what the picture shows, got {alt!r}")
        self.alt = " ".join(alt.split())
        self.svg = with_alt(svg, self.alt)

    def __repr__(self) -> str:
        return f"Picture({self.alt!r})"

    def _repr_svg_(self) -> str:
        return self.svg


def picture(fig: Figure | str, alt: str) -> Picture:
    """Turn a matplotlib figure (or an SVG string) into a `Picture` with alternative text.

    Write it as the last line of a cell. `alt` is required: it is what a reader who can't see it gets.
    """
    return Picture(fig if isinstance(fig, str) else to_svg(fig), alt)


def with_alt(svg: str, alt: str) -> str:
    """Give the root element of `svg` the accessible name `alt`, replacing one it has."""
    start = svg.index("<svg")
    end = svg.index(">", start)
    tag = re.sub(r'\s(?:role|aria-label)="[^"]*"', "", svg[start:end])
    # Leave "/" of an empty <svg/> where it is.
    tail = "/" if tag.endswith("/") else ""
    tag = tag.removesuffix("/")
    return f'{tag} role="img" aria-label="{html.escape(alt)}"{tail}{svg[end:]}'


def to_svg(fig: Figure) -> str:
    """Draw `fig` as a small SVG element: text as text, no background, the same bytes for the same figure.

    Compared with matplotlib's own output there is no XML header, no date, no page-wide `<style>`, no id that
    nothing refers to, no font list at each word, and two decimals rather than six. Ids that remain are derived
    from the picture's content, so that two pictures on one page don't clash.
    """
    if not isinstance(fig, Figure):
        raise TypeError(f"fig must be a matplotlib Figure, got {type(fig).__name__}")
    buffer = io.StringIO()
    with matplotlib.rc_context(_RC):
        fig.savefig(buffer, format="svg", dpi=_DPI, metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.S)
    root = ET.fromstring(text[text.index("<svg") :])
    width, height = (f"{float(v):g}" for v in root.get("viewBox").split()[2:])
    _tidy(root, _useless_clips(root, float(width), float(height)))
    _name_ids(root)
    body = "".join(ET.tostring(child, encoding="unicode") for child in root)
    body = body.replace(f' xmlns:ns0="{_SVG}"', "").replace("ns0:", "").replace(" />", "/>")
    body = re.sub(r">\s+<", "><", body).strip().replace(INK, "currentColor")
    least = round(0.7 * float(width))
    return (
        f'<svg xmlns="{_SVG}" class="mr-svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' style="max-width:100%;min-width:min({least}px,100vw);height:auto" color="#797979" fill="currentColor"'
        f' font-family="{_FONT}" font-size="12px" stroke-linejoin="round" stroke-linecap="butt">{body}</svg>'
    )


_DECLARED = re.compile(r"\s*([\w-]+)\s*:\s*([^;]+?)\s*(?:;|$)")
_NUMBER = re.compile(r"-?\d+\.\d+")
_DRAWN = {"path", "text", "use", "rect", "circle"}


def _short(match: re.Match) -> str:
    text = f"{float(match.group()):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _useless_clips(root: ET.Element, width: float, height: float) -> set[str]:
    """References to clips that cover the whole picture, as those of `canvas` do."""
    found = set()
    for clip in root.iter(f"{{{_SVG}}}clipPath"):
        rect = clip[0]
        x, y, w, h = (float(rect.get(k, "nan")) for k in ("x", "y", "width", "height"))
        if x <= 0 and y <= 0 and x + w >= width - 0.01 and y + h >= height - 0.01:
            found.add(f"url(#{clip.get('id')})")
    return found


def _tidy(element: ET.Element, useless: set[str], shared: bool = False) -> None:
    """Drop what draws nothing and shorten what draws, in place, depth first.

    `shared` elements stand in `<defs>`: a marker there takes its fill from where it is used.
    """
    for child in list(element):
        tag = child.tag.rsplit("}", 1)[-1]
        _tidy(child, useless, shared or tag == "defs")
        attrs = child.attrib
        if f"{{{_XLINK}}}href" in attrs:
            attrs["href"] = attrs.pop(f"{{{_XLINK}}}href")
        if attrs.get("clip-path") in useless:
            del attrs["clip-path"]
        if tag in _DRAWN:
            style = dict(_DECLARED.findall(attrs.pop("style", "")))
            style.pop("font-family", None)
            style.pop(
                "stroke-linejoin", None
            )  # the root says "round"; at these widths a mitre looks the same
            if style.get("font-size") == "12px":
                del style["font-size"]
            if tag == "path" and style.get("fill") == "none" and "stroke" not in style:
                element.remove(child)
                continue
            if not shared:
                style.setdefault(
                    "fill", "#000"
                )  # matplotlib leaves black unsaid, and the root's fill is the ink
            if style.get("fill") == INK and not shared:
                del style["fill"]
            if style:
                attrs["style"] = ";".join(f"{k}:{v}" for k, v in style.items())
        if "d" in attrs:
            attrs["d"] = re.sub(r"\s*([A-Za-z])\s*", r"\1", _NUMBER.sub(_short, " ".join(attrs["d"].split())))
        for name in ("x", "y", "width", "height"):
            if name in attrs:
                attrs[name] = _NUMBER.sub(_short, attrs[name])
        turn = attrs.get("transform", "")
        if re.fullmatch(r"rotate\(-?0(\.0)? .*\)", turn):
            del attrs["transform"]
        elif re.fullmatch(r"(?:(?:translate|rotate)\([^)]*\)\s*)+", turn):
            attrs["transform"] = _NUMBER.sub(_short, turn)
        if tag == "style" or (tag in ("g", "defs") and not len(child)):
            element.remove(child)
    # Now that children are clean, unwrap groups that say nothing (matplotlib names every one of them).
    flat: list[ET.Element] = []
    for child in element:
        bare = child.tag.endswith("}g") and not (set(child.attrib) - {"id"})
        flat.extend(child if bare else [child])
    element[:] = flat


def _name_ids(root: ET.Element) -> None:
    """Keep only the ids that something refers to, under short names made from the picture's content."""
    whole = ET.tostring(root, encoding="unicode")
    used = list(dict.fromkeys(re.findall(r'(?:url\(#|href="#)([^)"]+)', whole)))
    salt = hashlib.sha256(whole.encode()).hexdigest()[:8]
    names = {old: f"m{salt}{number:x}" for number, old in enumerate(used)}
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in names:
            element.set("id", names[name])
        for key, value in element.attrib.items():
            if "#" in value and key != "id":
                element.set(
                    key,
                    re.sub(
                        r"(url\(#|^#)([^)]+)", lambda m: m.group(1) + names.get(m.group(2), m.group(2)), value
                    ),
                )
