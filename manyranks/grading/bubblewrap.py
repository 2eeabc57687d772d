"""Bubblewrap's command line: what a sandbox shows, and what this machine needs for one."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from pathlib import Path

__all__ = ["INSTALL", "SandboxUnavailable", "command", "environment"]


class SandboxUnavailable(RuntimeError):
    """This machine can't hold hostile code. The message says what is missing and how to get it."""


INSTALL = (
    "Install bubblewrap (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap; Arch: pacman -S "
    "bubblewrap). In a container it needs the right to make namespaces: docker run --privileged, or --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined --cap-add SYS_ADMIN. On Ubuntu 24.04 and later, where "
    "AppArmor keeps user namespaces from ordinary users, run the grader with sudo or allow them: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0. macOS and Windows: use a Linux virtual machine, or WSL 2."
)

PACKAGES = ("manyranks", "numpy", "greenlet", "array_api_compat")  # what the zygote imports


def _homes() -> list[str]:
    """The folders that those packages are imported from."""
    found = [
        os.path.dirname(os.path.abspath(next(iter(importlib.import_module(name).__path__))))
        for name in PACKAGES
    ]
    return list(dict.fromkeys(found))


def _readable() -> list[str]:
    """The folders that Python and its packages need."""
    folders = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for home in _homes():
        if os.path.basename(home) in ("site-packages", "dist-packages"):
            folders.append(home)
        else:  # a checkout, in which other things lie: the packages only
            folders += [os.path.join(home, f"{name}{libs}") for name in PACKAGES for libs in ("", ".libs")]
    kept: list[str] = []
    for folder in sorted({os.path.abspath(f) for f in folders if f and os.path.isdir(f)}, key=len):
        if folder == "/":
            raise SandboxUnavailable("Python's prefix is /: there would be nothing to hide")
        if not any(folder == k or folder.startswith(k + "/") for k in [*kept, "/usr"]):
            kept.append(folder)
    return kept


def command(mode: str, staged: str, config: str) -> list[str]:
    """What starts a zygote with `config`, in a sandbox that shows the folder `staged` as /lab.

    Bubblewrap leaves the zygote some rights over the sandbox itself (as root: to make namespaces and to become other
    users; as an ordinary user: the first, in a user namespace). Each child gives them all up before any code of a
    submission runs. There is no /proc.
    """
    python = [sys.executable, "-s", "-m", "manyranks.grading.zygote", config]
    if mode == "uid":
        return python
    line = ["bwrap", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if mode == "root":
        line += [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        line += ["--cap-drop", "ALL"]
        for capability in ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL", "SYS_RESOURCE"):
            line += ["--cap-add", f"CAP_{capability}"]
    else:
        line += [
            "--unshare-all",
            "--unshare-user",
            "--cap-add",
            "CAP_SYS_ADMIN",
            "--cap-add",
            "CAP_SETPCAP",
        ]
    line += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            line += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            line += ["--ro-bind-try", f"/{name}", f"/{name}"]
    for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime"):
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for folder in _readable():
        if folder.startswith(("/tmp/", "/dev/shm/")):
            raise SandboxUnavailable(
                f"{folder} lies where the sandbox puts a /tmp of its own; move it elsewhere"
            )
        if mode == "root":  # bubblewrap makes what lies above for root alone, and children are other users
            for above in list(reversed(Path(folder).parents))[1:]:
                line += ["--perms", "0755", "--dir", str(above)]
        line += ["--ro-bind", folder, folder]
    line += ["--dev", "/dev", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--ro-bind", staged, "/lab"]
    line += ["--remount-ro", "/", "--chdir", "/"]
    for name, value in environment().items():
        line += ["--setenv", name, value]
    return [*line, "--", *python]


def environment() -> dict[str, str]:
    """All that the sandbox knows of the environment."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONPATH": os.pathsep.join(_homes()),  # also where a package was not installed, or for one user
        **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")},
    }
