"""Small data on ranks as tables: what every rank holds (`data_grid`), and what a collective does (`before_after`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from manyranks.runtime.phantom import is_phantom

from .pen import WIDTH, Pen, check_words, text_width
from .style import COLORS, ON_FILL, Picture

__all__ = ["before_after", "data_grid"]

MOST_RANKS = 16


def as_array(value: Any, argument: str) -> np.ndarray:
    """A NumPy array of numbers or words from an array, a tensor, a list or a number."""
    if is_phantom(value):
        raise TypeError(f"{argument} must hold numbers, got a phantom, which has none")
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    made = np.asarray(value)
    if made.dtype == object:
        raise TypeError(f"{argument} must be an array of numbers or words, got {value!r:.60}")
    return made


def _blocks(value: Any, argument: str) -> list[np.ndarray]:
    """The arrays that a rank holds: none, one, or a list of them."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)) and any(
        v is None or isinstance(v, (list, tuple)) or getattr(v, "ndim", 0) > 0 for v in value
    ):
        return [
            block for v in value for block in ([as_array(v, argument)] if v is not None else [np.array([])])
        ]
    return [as_array(value, argument)]


def _say_cell(value: Any) -> str:
    if isinstance(value, (str, np.str_)):
        return str(value)
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return f"{float(value):.4g}".replace("e+0", "e").replace("e-0", "e-")


class _Table:
    """One column of ranks with what each holds, measured before it is drawn."""

    GAP = 8  # between two arrays of one rank

    def __init__(self, values: Any, argument: str, most: int):
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence | np.ndarray):
            raise TypeError(
                f"{argument} must be a sequence with one entry for each rank, got {type(values).__name__}"
            )
        if len(values) == 0:
            raise ValueError(f"{argument} must have at least one entry, got none")
        if len(values) > MOST_RANKS:
            raise ValueError(f"{argument} must have at most {MOST_RANKS} entries (ranks), got {len(values)}")
        self.ranks = len(values)
        self.blocks = [
            [np.atleast_1d(b) for b in _blocks(v, f"{argument}[{r}]")] for r, v in enumerate(values)
        ]
        self.numbers = {_say_cell(x) for row in self.blocks for b in row for x in b.ravel()}
        self.rows: list[list[list[list[str]]]] = []  # rank -> line -> block -> cells
        for row in self.blocks:
            tall = max((len(b) if b.ndim > 1 else 1 for b in row), default=1)
            if tall > 8:
                raise ValueError(f"{argument} must hold arrays of at most 8 rows, got {tall}; draw fewer")
            lines = []
            for k in range(tall):
                line = []
                for b in row:
                    flat = b.reshape(len(b), -1) if b.ndim > 1 else b.reshape(1, -1)
                    cells = [_say_cell(x) for x in flat[k]] if k < len(flat) else []
                    line.append(cells if len(cells) <= most else [*cells[: most - 2], "…", cells[-1]])
                lines.append(line)
            self.rows.append(lines)
        texts = [t for lines in self.rows for line in lines for cells in line for t in cells]
        self.font = 13
        self.cell = max(22.0, max((text_width(t, self.font) for t in texts), default=0) + 8)

    @property
    def width(self) -> float:
        return max((self._line_width(line) for lines in self.rows for line in lines), default=0)

    def _line_width(self, line: list[list[str]]) -> float:
        return sum(len(cells) * self.cell or 10 for cells in line) + self.GAP * max(0, len(line) - 1)

    def heights(self) -> list[int]:
        return [len(lines) for lines in self.rows]

    def draw(
        self, pen: Pen, x0: float, ys: list[float], line: float, owner: dict[str, int] | None, cls: str
    ) -> None:
        """`owner` gives the rank that a number belongs to; None: each to the rank that holds it."""
        by_owner: dict[int, list] = {}
        texts: dict[bool, list] = {}
        for rank, lines in enumerate(self.rows):
            if not self.blocks[rank]:
                pen.texts([(x0 + self.cell / 2, ys[rank] + line / 2, "–")], self.font, "middle", opacity=0.8)
            for k, blocks in enumerate(lines):
                x, y = x0, ys[rank] + k * line
                for cells in blocks:
                    for text in cells:
                        of = rank if owner is None else owner.get(text, -1)
                        by_owner.setdefault(of, []).append((x, y, self.cell, line))
                        texts.setdefault(of >= 0, []).append((x + self.cell / 2, y + line / 2, text))
                        x += self.cell
                    x += self.GAP if cells else 10 + self.GAP
        for of, boxes in sorted(by_owner.items()):
            if of >= 0:
                pen.boxes(boxes, list(COLORS.values())[of % len(COLORS)], cls)
            pen.boxes(boxes, "", cls if of < 0 else "", 0.8, 0.8)
        pen.texts(texts.get(True, []), self.font, "middle", fill=ON_FILL)
        pen.texts(texts.get(False, []), self.font, "middle")


def _owners(inputs: _Table, *others: _Table) -> tuple[dict[str, int], bool]:
    """Which rank each number came from, where that can be told; and whether the other tables hold only such numbers."""
    owner: dict[str, int] = {}
    for rank, row in enumerate(inputs.blocks):
        for text in {_say_cell(x) for b in row for x in b.ravel()}:
            owner[text] = -1 if text in owner else rank
    moved = all(text in owner for table in others for text in table.numbers)
    return owner, moved


def before_after(
    inputs: Sequence[Any],
    results: Sequence[Any],
    title: str | None = None,
    *,
    labels: tuple[str, str] = ("before", "after"),
    alt: str | None = None,
    name: str = "rank",
    most: int = 12,
) -> Picture:
    """What a collective does, as data on ranks: every rank's data before and after.

    Numbers that are only moved keep the colour of the rank they came from; sums and other new numbers have none.

    Parameters
    ----------
    inputs, results
        One entry for each rank: None (the rank holds nothing), an array, or a list of arrays. Small ones: numbers or words.
    title
        Words above the picture, e.g. the call.
    labels
        What stands above the two halves.
    alt
        Alternative text; the default tells the data of up to 4 ranks.
    most
        Numbers drawn of each array's row; of a longer one the first and the last.

    Examples
    --------
    >>> before_after([[1, 2], [3, 4]], [[4, 6], [4, 6]], "all_reduce")
    Picture('all_reduce on 2 ranks. Before: rank 0 has 1 2; rank 1 has 3 4. After: rank 0 has 4 6; rank 1 has 4 6.')
    """
    _check_most(most)
    check_words(title=title, alt=alt, name=name)
    a, b = _Table(inputs, "inputs", most), _Table(results, "results", most)
    if a.ranks != b.ranks:
        raise ValueError(
            f"results must have one entry for each of the {a.ranks} ranks of inputs, got {b.ranks}"
        )
    if (
        not isinstance(labels, (tuple, list))
        or len(labels) != 2
        or not all(isinstance(w, str) for w in labels)
    ):
        raise ValueError(f"labels must be two words, for before and after, got {labels!r}")
    owner, moved = _owners(a, b)
    left, line = 14 + text_width(f"{name} {a.ranks - 1}", 13), 24
    beside = left + a.width + 50 + b.width <= WIDTH
    width = max(WIDTH, left + max(a.width, b.width) + 10)
    pen = Pen(width)
    top = 26 if title else 4
    if title:
        pen.texts([(4, 12, title)], 13, bold=True)
    tall = [max(pair) for pair in zip(a.heights(), b.heights())] if beside else None
    ys, end = _rows(top + 22, tall or a.heights(), line)
    a.draw(pen, left, ys, line, None, "mr-before")
    pen.texts([(left, top + 8, labels[0])], 12)
    _row_names(pen, left, ys, tall or a.heights(), line, name)
    if beside:
        x = left + a.width + 50
        middle = (ys[0] + end - 6) / 2
        pen.arrows([[(x - 36, middle), (x - 14, middle)]], 2, 9)
    else:
        x, top = left, end + 22
        pen.arrows([[(left + 10, end - 1), (left + 10, end + 17)]], 2, 9)
        ys, end = _rows(top + 22, b.heights(), line)
        _row_names(pen, left, ys, b.heights(), line, name)
    b.draw(pen, x, ys, line, owner if moved else {}, "mr-after")
    pen.texts([(x, top + 8, labels[1])], 12)
    said = f"{title or 'Data'} on {a.ranks} {name}s"
    if a.ranks <= 4:
        said += f". {labels[0].capitalize()}: {_say_data(a, name)}. {labels[1].capitalize()}: {_say_data(b, name)}."
    return pen.done(round(end), alt or said)


def data_grid(
    values: Sequence[Any],
    title: str | None = None,
    *,
    alt: str | None = None,
    name: str = "rank",
    most: int = 12,
) -> Picture:
    """What every rank holds, as a table: one entry for each rank, None, an array or a list of arrays.

    >>> data_grid([[1, 2], [3, 4]])
    Picture('Data on 2 ranks: rank 0 has 1 2; rank 1 has 3 4')
    """
    _check_most(most)
    check_words(title=title, alt=alt, name=name)
    table = _Table(values, "values", most)
    left, line = 14 + text_width(f"{name} {table.ranks - 1}", 13), 24
    pen = Pen(max(WIDTH, left + table.width + 10))
    if title:
        pen.texts([(4, 12, title)], 13, bold=True)
    ys, end = _rows(26 if title else 4, table.heights(), line)
    table.draw(pen, left, ys, line, None, "mr-data")
    _row_names(pen, left, ys, table.heights(), line, name)
    said = f"{title or 'Data'} on {table.ranks} {name}s"
    if table.ranks <= 4:
        said += f": {_say_data(table, name)}"
    return pen.done(round(end), alt or said)


def _check_most(most: Any) -> None:
    if isinstance(most, bool) or not isinstance(most, int):
        raise TypeError(f"most must be a whole number, got {most!r}")
    if most < 3:
        raise ValueError(f"most must be at least 3, got {most}")


def _rows(top: float, heights: Iterable[int], line: float) -> tuple[list[float], float]:
    ys = []
    for h in heights:
        ys.append(top)
        top += h * line + 6
    return ys, top


def _row_names(pen: Pen, left: float, ys: list[float], heights: list[int], line: float, name: str) -> None:
    pen.texts(
        [(left - 8, y + h * line / 2, f"{name} {r}") for r, (y, h) in enumerate(zip(ys, heights))], 13, "end"
    )


def _say_data(table: _Table, name: str) -> str:
    said = []
    for rank, lines in enumerate(table.rows):
        blocks = [" ".join(cells) for line in lines for cells in line if cells]
        said.append(f"{name} {rank} has {', '.join(blocks) or 'nothing'}")
    return "; ".join(said)
