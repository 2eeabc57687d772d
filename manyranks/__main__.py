"""`python -m manyranks COMMAND`: the package's commands, each in a module of its own that is imported when asked for.

A command is a function `main(argv) -> int`: the arguments after its name in, the exit status out.
"""

from __future__ import annotations

import sys
from importlib import import_module

# name: ("module:function", what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "grade": ("manyranks.grading.grade:main", "grade a folder of submissions of a lab, in a sandbox"),
    "release": ("manyranks.grading.release:main", "make a lab's zip file for students, without its solution"),
    "gradescope": ("manyranks.grading.gradescope:main", "make a lab's autograder for Gradescope"),
    "plan": (
        "manyranks.plan_command:main",
        "lay out a training job on a cluster, and predict its step and memory",
    ),
}


def usage() -> str:
    """What `--help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m manyranks COMMAND ...", "", *lines, "", "COMMAND --help tells its options."]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"{usage()}\n\nerror: there is no command {name!r}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][0].split(":")
    return getattr(import_module(module), function)(rest)


if __name__ == "__main__":
    sys.exit(main())
