"""`explore` and the pictures it shows, without a browser (tests/site moves the sliders in one)."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import ipywidgets as widgets
import pytest

from manyranks.show.explore import explore
from manyranks.show.style import COLORS, INK, ON_FILL, Picture, canvas, color, figure, picture, to_svg

# --- explore ------------------------------------------------------------------------------------------------


def words(**axes) -> str:
    return ", ".join(f"{name}={value}" for name, value in axes.items())


def stacks(explorer) -> list:
    found, todo = [], [explorer.widget]
    while todo:
        widget = todo.pop()
        if isinstance(widget, widgets.Stack):
            found.append(widget)
        todo.extend(getattr(widget, "children", ()))
    return found


def leaf(explorer, *indices: int):
    """The HTML widget that is shown when the picture's stacks stand at `indices`."""
    widget = explorer.widget.children[-1]
    for index in indices:
        widget = widget.children[index]
    return widget


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"ranks": (2, 4, 8), "step": range(15)}, "explore(ranks: 2 | 4 | 8, step: 0…14)"),
        ({"size": {"1 kB": 1e3, "1 MB": 1e6}}, "explore(size: 1 kB | 1 MB)"),
        ({"n": tuple(range(12))}, "explore(n: 0 | 1 | 2 | … | 11)"),
        ({"ranks": (1, 2), "step": lambda ranks: range(ranks)}, "explore(ranks: 1 | 2, step: by ranks)"),
        ({"step": range(1)}, "explore(step: 0)"),
    ],
)
def test_text_form_is_short_and_stable(axes, text):
    assert repr(explore(words, **axes)) == text
    assert explore(words, **axes)._repr_mimebundle_()["text/plain"] == text


def test_every_choice_leads_to_its_frame():
    explorer = explore(words, ranks=(2, 4, 8), step=range(5))
    for i, ranks in enumerate((2, 4, 8)):
        for step in range(5):
            assert leaf(explorer, i, step).value == f"<pre>ranks={ranks}, step={step}</pre>"


def test_ragged_grid_has_a_slider_for_each_length():
    seen = []
    explorer = explore(
        lambda ranks, step: seen.append((ranks, step)) or words(ranks=ranks, step=step),
        ranks=(1, 2, 4),
        step=lambda ranks: range(2 * (ranks - 1) + 1),
    )
    assert seen == [(r, s) for r in (1, 2, 4) for s in range(2 * (r - 1) + 1)]
    rows = explorer.widget.children[1]  # ranks' slider, then step's rows, then the picture
    assert isinstance(rows, widgets.Stack)
    assert isinstance(rows.children[0], widgets.Label)
    assert [len(row.children[1].options) for row in rows.children[1:]] == [3, 7]
    assert leaf(explorer, 2, 6).value == "<pre>ranks=4, step=6</pre>"


def test_function_axis_may_depend_on_a_dependent_one():
    explorer = explore(words, a=(1, 2), b=lambda a: tuple(range(a)), c=lambda b: range(b + 1))
    assert leaf(explorer, 1, 1, 1).value == "<pre>a=2, b=1, c=1</pre>"
    assert repr(explorer) == "explore(a: 1 | 2, b: by a, c: by b)"


def test_equal_frames_are_stored_once():
    explorer = explore(lambda ranks, step: f"{ranks}", ranks=(2, 4), step=range(10))
    assert len(explorer._frames.html) == 2
    # An axis that changes nothing needs no stack.
    assert len(stacks(explorer)) == 1


def test_none_shows_a_note():
    explorer = explore(lambda step: None if step == 1 else "x", step=range(3))
    assert "nothing to show" in leaf(explorer, 1).value


def test_start_is_shown_first():
    explorer = explore(words, ranks=(2, 4, 8), step=range(3), start={"ranks": 4})
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/html"] == "<pre>ranks=4, step=0</pre>"
    assert explorer.widget.children[-1].selected_index == 1


def test_sliders_carry_labels_and_formats():
    explorer = explore(
        words,
        message_size=(1e6, 2e6),
        labels={"message_size": "message"},
        formats={"message_size": lambda n: f"{n / 1e6:g} MB"},
    )
    slider = explorer.widget.children[0].children[0]
    assert slider.description == "message"
    assert slider.options == ("1 MB", "2 MB")
    assert explore(words, message_size=(1, 2)).widget.children[0].children[0].description == "message size"


def test_play_stands_by_ranges_only():
    rows = explore(words, ranks=(2, 4), step=range(3), interval=250).widget.children[:2]
    assert [any(isinstance(w, widgets.Play) for w in row.children) for row in rows] == [False, True]
    play = rows[1].children[0]
    assert (play.min, play.max, play.interval) == (0, 2, 250)


def test_text_is_escaped():
    assert leaf(explore(lambda n: "<script>&", n=(1, 2))).value == "<pre>&lt;script&gt;&amp;</pre>"


def test_mimebundle_has_the_first_frame_as_a_picture():
    def frame(ranks):
        fig, ax = canvas(100, 50)
        ax.text(50, 25, f"{ranks} ranks")
        return fig

    bundle = explore(frame, ranks=(2, 4), alt=lambda ranks: f"a picture of {ranks}")._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/svg+xml", "application/vnd.jupyter.widget-view+json"}
    assert 'aria-label="a picture of 2"' in bundle["image/svg+xml"]
    assert "2 ranks" in bundle["image/svg+xml"]
    again = explore(frame, ranks=(2, 4), alt=lambda ranks: f"a picture of {ranks}")._repr_mimebundle_()
    assert again["image/svg+xml"] == bundle["image/svg+xml"]


def test_alt_text_names_the_choice():
    plain = '<svg xmlns="http://www.w3.org/2000/svg"><text>x</text></svg>'
    explorer = explore(lambda ranks, step: plain + f"<!--{ranks}{step}-->", ranks=(2, 4), step=range(2))
    assert 'aria-label="ranks 4, step 1"' in leaf(explorer, 1, 1).value
    explorer = explore(lambda ranks: plain, ranks=(2, 4), alt="The ring")
    assert 'aria-label="The ring (ranks 2)"' in explorer._repr_mimebundle_()["image/svg+xml"]
    explorer = explore(lambda ranks: Picture(plain, "own words"), ranks=(2, 4))
    assert 'aria-label="own words"' in explorer._repr_mimebundle_()["image/svg+xml"]


def test_frames_may_show_themselves():
    class Html:
        def _repr_html_(self):
            return "<b>html</b>"

    class Svg:
        def _repr_svg_(self):
            return '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'

    class Bundle:
        def _repr_mimebundle_(self, include=None, exclude=None):
            return {"text/plain": "no", "text/html": "<i>yes</i>"}

    assert leaf(explore(lambda n: Html() if n else "x", n=(1, 0)), 0).value == "<b>html</b>"
    assert leaf(explore(lambda n: Bundle() if n else "x", n=(1, 0)), 0).value == "<i>yes</i>"
    value = leaf(explore(lambda n: Svg() if n else "x", n=(1, 0)), 0).value
    assert value == '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="n 1"/>'


def test_pyplot_figures_are_closed():
    plt = pytest.importorskip("matplotlib.pyplot")
    before = plt.get_fignums()

    def frame(n):
        fig, ax = plt.subplots(figsize=(2, 1))
        ax.plot([0, n])
        return fig

    explore(frame, n=(1, 2))
    assert plt.get_fignums() == before


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"frame": "no"}, TypeError, "frame must be a function"),
        ({}, TypeError, "at least one axis"),
        ({"ranks": 3}, TypeError, "axis 'ranks' must be a tuple"),
        ({"ranks": "248"}, TypeError, "axis 'ranks' must be a tuple"),
        ({"ranks": ()}, ValueError, "axis 'ranks' has no values"),
        ({"ranks": (2, 2)}, ValueError, "two values with the same label"),
        ({"ranks": ([2], [4])}, TypeError, "can't be hashed"),
        ({"step": lambda ranks: range(ranks)}, ValueError, "axis 'step' is a function of 'ranks'"),
        ({"ranks": (2,), "step": lambda ranks: ranks}, TypeError, "axis 'step' at ranks=2 must be"),
        ({"ranks": (2,), "step": lambda ranks: ()}, ValueError, "axis 'step' at ranks=2 has no values"),
        ({"ranks": (2,), "labels": {"rank": "GPUs"}}, ValueError, "labels has 'rank'"),
        ({"ranks": (2,), "labels": ["GPUs"]}, TypeError, "labels must be a dict"),
        ({"ranks": (2,), "labels": {"ranks": "$N$"}}, ValueError, "can't show formulas"),
        ({"ranks": (2,), "formats": {"ranks": "{} GPUs"}}, TypeError, "formats['ranks'] must be a function"),
        ({"ranks": (2,), "start": {"ranks": 3}}, ValueError, "start['ranks'] is 3"),
        ({"ranks": (2,), "alt": 3}, TypeError, "alt must be"),
        ({"ranks": (2,), "alt": lambda ranks: ""}, TypeError, "alt must return"),
        ({"ranks": (2,), "interval": 0}, ValueError, "interval must be at least 1"),
        ({"ranks": (2,), "interval": 0.5}, TypeError, "interval must be a whole number"),
        ({"ranks": range(100), "step": range(100)}, ValueError, "max_frames=400"),
        ({"ranks": (2, 4), "max_bytes": 10}, ValueError, "max_bytes=10"),
    ],
)
def test_bad_input_names_the_argument(arguments, error, says):
    with pytest.raises(error, match=re.escape(says)):
        explore(arguments.pop("frame", words), **arguments)


def test_a_frame_of_the_wrong_kind_is_named():
    with pytest.raises(TypeError, match=re.escape("frame(ranks=4) must return a matplotlib Figure")):
        explore(lambda ranks: "x" if ranks == 2 else 17, ranks=(2, 4))


def test_too_large_a_grid_fails_before_any_frame_is_drawn():
    drawn = []
    with pytest.raises(ValueError, match="max_frames"):
        explore(lambda n: drawn.append(n) or "x", n=range(1000))
    assert not drawn


def test_older_ipywidgets_are_driven_by_the_kernel(monkeypatch):
    """ipywidgets 7 has no Stack: the same explorer, with Python doing the choosing."""
    monkeypatch.delattr(widgets, "Stack")
    explorer = explore(words, ranks=(2, 4), step=lambda ranks: range(ranks))
    *rows, view = explorer.widget.children
    assert view.value == "<pre>ranks=2, step=0</pre>"
    rows[0].children[0].index = 1
    *rows, view = explorer.widget.children
    rows[1].children[1].index = 3
    assert view.value == "<pre>ranks=4, step=3</pre>"


# --- style --------------------------------------------------------------------------------------------------


def luminance(code: str) -> float:
    parts = (int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def plot():
    fig = figure(520, 260)
    ax = fig.add_subplot()
    ax.plot([1, 2, 3], [1.0, 4.0, 9.0], marker="o", label="squares")
    ax.bar([1, 2, 3], [1, 2, 3], color=color(1), hatch="//")
    ax.set(xlabel="ranks", ylabel="bytes < 3 & more", title="A title")
    ax.text(2, 5, "on a fill", color=ON_FILL)
    ax.grid(True)
    ax.legend()
    return fig


def test_colours_are_legible_in_both_themes():
    for name, code in COLORS.items():
        assert contrast(code, "#ffffff") >= 3, name
        assert contrast(code, "#121212") >= 3, name
        assert contrast(code, ON_FILL) >= 4.5, name
    assert len(set(COLORS.values())) == len(COLORS)


def test_svg_is_small_and_the_same_again():
    svg = to_svg(plot())
    assert svg == to_svg(plot())
    assert len(svg) < 12_000
    ET.fromstring(svg)


def test_svg_has_text_as_text_in_the_page_s_colour():
    svg = to_svg(plot())
    for text in ("ranks", "bytes &lt; 3 &amp; more", "A title", "squares", "on a fill"):
        assert f">{text}</text>" in svg
    assert INK not in svg and "currentColor" in svg
    assert re.search(r"<text[^>]+fill:#000[^>]*>on a fill", svg)


def test_svg_leaves_nothing_that_disturbs_a_page():
    svg = to_svg(plot())
    for trouble in ("<style", "<metadata", "<?xml", "<!DOCTYPE", "xlink", "figure_1", "DejaVu Sans; "):
        assert trouble not in svg
    assert not re.search(r"20\d\d-\d\d-\d\dT", svg)


def test_svg_ids_are_used_and_differ_between_pictures():
    svg = to_svg(plot())
    ids = set(re.findall(r' id="([^"]+)"', svg))
    assert ids == set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    fig = plot()
    fig.axes[0].set_title("Another")
    assert not ids & set(re.findall(r' id="([^"]+)"', to_svg(fig)))


def test_canvas_counts_pixels_from_the_top_left():
    fig, ax = canvas(200, 100)
    ax.text(10, 20, "here")
    assert re.search(r'<text x="10" y="20"[^>]*>here', to_svg(fig))


def test_picture_shows_its_words():
    shown = picture(plot(), alt='Squares  "rise"\n and rise')
    assert repr(shown) == "Picture('Squares \"rise\" and rise')"
    assert 'role="img" aria-label="Squares &quot;rise&quot; and rise"' in shown._repr_svg_()
    with pytest.raises(ValueError, match="alt must be"):
        picture(plot(), alt=" ")
    with pytest.raises(TypeError, match="fig must be a matplotlib Figure"):
        picture(3, alt="x")
    with pytest.raises(ValueError, match="width must be"):
        figure(0, 100)


def test_rotated_text_stays_rotated():
    fig, ax = canvas(100, 100)
    ax.text(50, 50, "up", rotation=90, ha="center", va="center")
    assert re.search(r'transform="translate\(\d+\.\d\d? \d+\.\d\d?\) rotate\(-90\)">up<', to_svg(fig))
