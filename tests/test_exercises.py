"""`attempt` says one line, whatever it is given."""

import doctest

import pytest

from manyranks import exercises, simulate


def check(answer):
    if answer(2) != 4:
        raise AssertionError("the square")  # a bare assert here would get pytest's own words added


def not_written_yet(comm):
    raise NotImplementedError


@pytest.mark.parametrize(
    "answer, said",
    [
        (..., "no answer yet."),
        (not_written_yet, "no answer yet."),
        (lambda n: n * n, "correct."),
        (lambda n: n, "not yet. the square"),
        (lambda n: n / 0, "your code raised ZeroDivisionError: division by zero"),
        (lambda n: None + n, "your code raised TypeError: unsupported operand"),
        ((1, 2), "a function is asked for; this is a tuple."),
        (None, "a function is asked for; this is a NoneType."),
    ],
)
def test_one_line(answer, said, capsys):
    exercises.attempt("1.1", check, answer)
    out = capsys.readouterr().out
    assert out.startswith(f"Exercise 1.1: {said}") and out.count("\n") == 1


def test_a_rank_program_that_is_not_written_yet(capsys):
    exercises.attempt("1.2", lambda program: simulate(program, ranks=2), not_written_yet)
    assert capsys.readouterr().out == "Exercise 1.2: no answer yet.\n"


def test_worked_example():
    assert doctest.testmod(exercises).failed == 0
