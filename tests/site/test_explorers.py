"""Every explorer on every page: its picture follows the mouse, the keyboard and the Play button."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.explorers


def _picture(explorer) -> str:
    """What the explorer shows."""
    return explorer.evaluate(
        """(box) => [...box.querySelectorAll('.widget-html-content')].filter((e) => e.checkVisibility())
                      .map((e) => e.innerHTML).join('|')"""
    )


def _wait(condition, seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.03)
    return condition()


def _sliders(explorer) -> list:
    return [s for s in explorer.locator(".widget-slider").all() if s.is_visible()]


def _value(slider) -> str:
    return slider.locator(".widget-readout").inner_text()


def _name(slider) -> str:
    return slider.locator(".noUi-handle").get_attribute("aria-label") or ""


# A chapter's code takes most of the time of a step in a test, and none of the explorers'; test_pages sees pages whole.
ONLY_EXPLORERS = """
() => {
  for (const cell of document.querySelectorAll('.cell')) if (!cell.querySelector('.mr-explore')) cell.remove();
  for (const code of document.querySelectorAll('.cell_input')) code.remove();
}
"""


def _explorers(page) -> list:
    page.evaluate(ONLY_EXPLORERS)
    return page.locator(".mr-explore").all()


def test_keyboard(visit) -> None:
    with visit(1300) as opened:
        for number, explorer in enumerate(_explorers(opened.page)):
            for place in range(len(_sliders(explorer))):
                slider = _sliders(explorer)[place]
                handle = slider.locator(".noUi-handle")
                where = f"explorer {number}, slider {place} ({_name(slider)!r})"
                assert _name(slider), f"{where} has no accessible name"
                assert handle.get_attribute("tabindex") == "0", f"{where} can't be reached by the Tab key"
                handle.focus()
                handle.press("Home")
                before, values, changed = _picture(explorer), [_value(slider)], False
                for _ in range(400):
                    handle.press("ArrowRight")
                    if not _wait(lambda: _value(slider) != values[-1], 0.5):  # noqa: B023
                        break
                    values.append(_value(slider))
                    changed = _wait(lambda: _picture(explorer) != before, 0.5 if len(values) < 4 else 0.1)  # noqa: B023
                    if changed:
                        break
                assert len(values) > 1, f"{where} did not move"
                assert changed, f"{where}: the same picture for {values}"
                assert _wait(lambda: handle.get_attribute("aria-valuetext") == _value(slider)), where  # noqa: B023
                handle.press("Home")
                assert _wait(lambda: _picture(explorer) == before), f"{where}: no way back"  # noqa: B023
                # Left in the middle, where the next slider has something to show.
                for _ in range(int(float(handle.get_attribute("aria-valuemax"))) // 2):
                    handle.press("ArrowRight")
                    _wait(lambda: False, 0.03)
        assert not opened.problems, "\n".join(opened.problems)


@pytest.mark.parametrize("width", [1300, 400])
def test_mouse(visit, width) -> None:
    with visit(width) as opened:
        for number, explorer in enumerate(_explorers(opened.page)):
            for place in range(len(_sliders(explorer))):
                slider = _sliders(explorer)[place]
                where = f"explorer {number}, slider {place}"
                slider.scroll_into_view_if_needed()
                seen = set()
                for part in (
                    0.01,
                    0.99,
                    0.5,
                ):  # and leave it in the middle, where the next slider has something to show
                    track = slider.locator(".noUi-base").bounding_box()
                    at = slider.locator(".noUi-handle").bounding_box()
                    opened.page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
                    opened.page.mouse.down()
                    opened.page.mouse.move(
                        track["x"] + part * track["width"], at["y"] + at["height"] / 2, steps=2
                    )
                    opened.page.mouse.up()
                    _wait(lambda: _picture(explorer) not in seen, 0.15)  # noqa: B023
                    seen.add(_picture(explorer))
                assert len(seen) > 1, f"{where}: the picture does not follow the mouse"
        assert not opened.problems, "\n".join(opened.problems)


def test_play(visit) -> None:
    with visit(1300) as opened:
        for number, explorer in enumerate(_explorers(opened.page)):
            for row in explorer.locator(".mr-control").all():
                if not row.is_visible() or not row.locator(".widget-play").count():
                    continue
                slider = row.locator(".widget-slider")
                slider.locator(".noUi-handle").focus()
                slider.locator(".noUi-handle").press("Home")
                _wait(lambda: False, 0.1)
                values, pictures = [_value(slider)], {_picture(explorer)}
                buttons = row.locator(".widget-play button")
                assert buttons.first.get_attribute("aria-label"), "the Play button has no accessible name"
                buttons.first.click()
                while len(values) < 4 and _wait(lambda: _value(slider) != values[-1], 3):  # noqa: B023
                    values.append(_value(slider))
                    _wait(lambda: False, 0.1)
                    pictures.add(_picture(explorer))
                assert len(values) > 1, f"explorer {number}: Play does not advance"
                assert len(pictures) > 1, (
                    f"explorer {number}: Play advances to {values}, the picture does not follow"
                )
                buttons.first.click()
        assert not opened.problems, "\n".join(opened.problems)
