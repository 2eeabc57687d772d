"""The browser that prints the book, tests its pages and times them: the system's Chromium."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "no Chromium on the PATH (on Debian and Ubuntu: apt-get install chromium)"


def find() -> str | None:
    """Its path, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)
