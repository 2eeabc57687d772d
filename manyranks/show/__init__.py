"""Pictures: one look for all of them (`style`), and one way to make them answer to a slider (`explore`)."""

from .bars import bars
from .chunks import chunk_grid, contributions
from .explore import Explorer, explore
from .plots import lines, loglog
from .style import COLORS, HATCHES, INK, ON_FILL, Picture, canvas, color, figure, picture, to_svg
from .tables import before_after, data_grid
from .timeline import timeline

__all__ = [
    "COLORS",
    "HATCHES",
    "INK",
    "ON_FILL",
    "Explorer",
    "Picture",
    "bars",
    "before_after",
    "canvas",
    "chunk_grid",
    "color",
    "contributions",
    "data_grid",
    "explore",
    "figure",
    "lines",
    "loglog",
    "picture",
    "timeline",
    "to_svg",
]
