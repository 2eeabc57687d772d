"""System calls that Python has no name for (3.10 is the oldest that we support): namespaces, mounts, no way back.

Used inside the sandbox only, before any code of a submission runs. All take effect on the calling process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

__all__ = [
    "Unsupported",
    "die_with_parent",
    "drop_capabilities",
    "filter_system_calls",
    "mount_tmpfs",
    "private_mounts",
    "unshare",
]

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x4000, 0x40000, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_libc = ctypes.CDLL(None, use_errno=True)


class Unsupported(OSError):
    """This machine can't do it."""


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise Unsupported(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones of one's own."""
    _check(_libc.unshare(flags), "unshare")


def private_mounts() -> None:
    """What is mounted from now on is seen here only."""
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")


def mount_tmpfs(where: str, size: int, files: int) -> None:
    """A file system in memory, empty, of at most `size` bytes and `files` files."""
    options = f"size={size},nr_inodes={files},mode=1777".encode()
    _check(_libc.mount(b"tmpfs", where.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount {where}")


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def drop_capabilities() -> None:
    """No capability is left, and none can come back through a program that one starts."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 and ctypes.get_errno() == errno.EINVAL:
            break
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)  # version 3
    _check(_libc.capset(header, struct.pack("6I", *[0] * 6)), "capset")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


# ---------------------------------------------------------------------------------------------------- seccomp

# What a lab never needs and an attack might: other processes' memory, namespaces, mounts, the kernel's own workings,
# and memory that no limit counts. Numbers: x86_64, then aarch64.
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AF_UNIX = 1


def seccomp_program(machine: str | None = None) -> bytes:
    """The filter, as the kernel wants it: struct sock_filter {u16 code; u8 if_true; u8 if_false; u32 k}[]."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise Unsupported(errno.ENOSYS, f"no system-call filter for {machine}")
    token, column = _ARCHITECTURES[machine]
    number, arch, argument = 0, 4, 16  # offsets in struct seccomp_data

    def line(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    refuse = line(_RETURN, _ERRNO | errno.EPERM)
    program = [line(_LOAD, arch), line(_JUMP_EQUAL, token, 1, 0), line(_RETURN, _KILL), line(_LOAD, number)]
    if machine == "x86_64":  # the x32 numbers are another way to the same calls
        program += [line(_JUMP_AT_LEAST, 0x40000000, 0, 1), refuse]
    for numbers in _REFUSED.values():
        program += [line(_JUMP_EQUAL, numbers[column], 0, 1), refuse]
    # glibc falls back to clone, whose flags can be looked at
    program += [line(_JUMP_EQUAL, _CLONE3[column], 0, 1), line(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [line(_JUMP_EQUAL, _CLONE[column], 0, 3), line(_LOAD, argument)]
    program += [line(_JUMP_ANY_BIT, ALL_NAMESPACES, 0, 1), refuse]
    program += [line(_LOAD, number), line(_JUMP_EQUAL, _SOCKET[column], 0, 3), line(_LOAD, argument)]
    program += [line(_JUMP_EQUAL, AF_UNIX, 1, 0), refuse, line(_RETURN, _ALLOW)]
    return b"".join(program)


def filter_system_calls() -> None:
    """Refuse, from now on and for all children, the calls above; sockets only of the kind that stays on the machine."""
    program = seccomp_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
    _check(_libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "prctl(SECCOMP)")
