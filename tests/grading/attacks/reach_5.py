# The way out of the sandbox: namespaces, mounts, another root, devices, more rights.
# earns: test_total test_checked_root test_apply_twice test_steps test_sizes test_ring_sum test_total_of_other_numbers
import ctypes
import os


def scale(x, factor):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) == 0:
        print("LEAK: a user namespace of its own")
    if libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0:
        print("LEAK: mounted /proc")
    if libc.mount(b"tmpfs", b"/lab", b"tmpfs", 0, None) == 0:
        print("LEAK: mounted over its folder")
    for act in (
        lambda: os.chroot("/tmp"),
        lambda: os.setuid(0),
        lambda: os.setgroups([0]),
        lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0)),
        lambda: open("/dev/mem", "rb"),
        lambda: open("/dev/kmsg", "rb"),
        lambda: os.open("/proc/1/mem", os.O_RDWR),
        lambda: os.nice(-5),
        lambda: os.sethostname("mine") if hasattr(os, "sethostname") else 1 / 0,
        lambda: os.readlink("/proc/1/exe"),
    ):
        try:
            act()
            print("LEAK: was let to do", act.__code__.co_names)
        except (OSError, ZeroDivisionError):
            pass
    if os.getuid() == 0 or os.geteuid() == 0:
        print("LEAK: is root")
    return 0
