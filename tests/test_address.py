"""tools/address.py: one address, and a fork that sets its own."""

from __future__ import annotations

import shutil

import pytest

from tools import address

FORK = "https://github.com/someone/their-ranks"


@pytest.fixture
def copy(tmp_path):
    """The files that hold the address, in a folder of their own."""
    for path in address.files():
        place = tmp_path / path.relative_to(address.ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return tmp_path


def test_every_place_agrees(capsys):
    assert address.main([]) == 0, capsys.readouterr().err
    kinds = {path.suffix for path, *_ in address.places()}
    assert kinds >= {".yml", ".toml", ".md", ".ipynb"}, "a pattern no longer finds what it should"


def test_a_fork(copy, capsys):
    before = address.places(copy)
    assert address.main([FORK, "--branch", "trunk"], copy) == 0, capsys.readouterr().err
    assert "places agree" in capsys.readouterr().out
    assert address.configured(copy) == (FORK, "trunk")
    after = address.places(copy)
    assert [(path, line) for path, line, *_ in after] == [(path, line) for path, line, *_ in before]
    assert {(owner, name) for *_, owner, name in after} == {("someone", "their-ranks")}
    readme = (copy / "README.md").read_text()
    assert "someone/their-ranks/blob/trunk/chapters" in readme and "many-ranks/many-ranks" not in readme
    assert "https://someone.github.io/their-ranks/" in (copy / "_config.yml").read_text()
    assert address.main([FORK], copy) == 0, "a second time changes nothing"


def test_one_forgotten_notebook(copy, capsys):
    notebook = next(copy.glob("chapters/02_*.ipynb"))
    notebook.write_text(notebook.read_text().replace("many-ranks/many-ranks@", "elsewhere/many-ranks@"))
    assert address.main([], copy) == 1
    assert "02_collectives.ipynb, line" in capsys.readouterr().err
    notebook.write_text("{}")
    assert address.main([], copy) == 1
    assert "set-up cell" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["github.com/a/b", "https://example.org/a/b", "https://github.com/a"])
def test_an_address_that_colab_could_not_open(copy, bad, capsys):
    with pytest.raises(SystemExit):
        address.main([bad], copy)
    assert "expected https://github.com/<owner>/<name>" in capsys.readouterr().err
