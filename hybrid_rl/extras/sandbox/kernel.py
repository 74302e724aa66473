"""What Linux offers to confine a process: namespaces, a private root, Landlock, seccomp, and privileges given up.

Each function raises OSError if this machine does not offer it, or does not let this user have it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable, Sequence

from hybrid_rl.extras.sandbox.filter import seccomp_filter

# linux/sched.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
APART = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
# linux/mount.h
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE = 0x1, 0x2, 0x8000
# linux/prctl.h, linux/seccomp.h, linux/capability.h
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
# linux/landlock.h: rights over files by the version of the interface that brought them.
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
LANDLOCK_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read folder
LANDLOCK_READ_FILE = 1 << 0 | 1 << 2
LANDLOCK_SCOPES = 0b11  # abstract sockets, signals; since version 6
# Numbers of system calls that the C library has no function for, alike on x86-64 and aarch64 unless both are named.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# User ids that distributions give to nobody, of which each program that runs gets one.
FIRST_USER, NUM_USERS = 60_706, 400
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def _called(name: str, *arguments: object) -> int:
    """Call a function of the C library. Raises OSError if it is missing or fails."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"the C library of this system has no {name}")
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    return _called("syscall", ctypes.c_long(number), *arguments)


def die_with_parent() -> None:
    """Kill this process when the thread that started it ends."""
    _called("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def live_apart() -> str:
    """Enter namespaces of this process's own, and return how: "as root" or "as user".

    There is no network in it, not even a loopback; mounts, System V objects and host name are private, and the children
    of this process cannot see others. Raises OSError with the last reason.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            _called("unshare", APART)
        except OSError:
            pass  # a container's root: it may be allowed a user namespace
        else:
            return "as root"
    _called("unshare", APART | CLONE_NEWUSER)
    # Until a group map is written, `setgroups` must be given up (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return "as user"


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system."""
    _called("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def scratch_beside(shown: Iterable[str]) -> str:
    """Return where programs write: what is mounted there hides what was below it."""
    return "/scratch" if any(path.startswith("/tmp/") for path in shown) else "/tmp"


def enter_private_root(folder: str, shown: Sequence[str]) -> None:
    """Make a root that has nothing but these files and folders, read-only, and an empty place for scratch files.
    folder: an empty one, to build it in; it is free again afterwards."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("root", folder, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    for path in (*shown, *DEVICES):
        target = folder + path
        if os.path.islink(path):  # such as /lib, of /usr/lib
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w"):
                pass
        else:
            continue
        mount(path, target, "", MS_BIND | MS_REC)
    os.makedirs(folder + scratch_beside(shown), exist_ok=True)
    os.chdir(folder)
    # The old root is then mounted over the new one, and taken away (pivot_root(2)).
    _syscall(_PIVOT_ROOT[platform.machine()], b".", b".")
    _called("umount2", b".", MNT_DETACH)
    os.chdir("/")
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def mount_scratch(folder: str, num_bytes: int, user: int) -> None:
    """Give this process a folder of its own in memory, and go there."""
    _called("unshare", CLONE_NEWNS)
    options = f"size={num_bytes},nr_inodes=4096,mode=700,uid={user},gid={user}"
    mount("scratch", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(folder)


def landlock_version() -> int:
    """Return the version of Landlock."""
    return _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def read_only_these(shown: Sequence[str]) -> None:
    """Let this process and its children read these files and folders, and open no other. Paths that do not exist are
    left out. Metadata of others (names, sizes) can still be seen."""
    version = landlock_version()
    handled = (1 << LANDLOCK_RIGHTS[min(version, max(LANDLOCK_RIGHTS))]) - 1
    rules = struct.pack("=QQQ", handled, 0, LANDLOCK_SCOPES) if version >= 6 else struct.pack("=Q", handled)
    ruleset = _syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    try:
        for path in (*shown, *DEVICES):
            if not os.path.exists(path):
                continue
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = LANDLOCK_READ if os.path.isdir(path) else LANDLOCK_READ_FILE
            try:
                _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0)
            finally:
                os.close(place)
        no_new_privileges()
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def dump_no_memory() -> None:
    """Let a crash of this process write no core file, and start no program that collects them."""
    _called("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def no_new_privileges() -> None:
    """Give up gaining privileges, for good."""
    _called("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def become(user: int) -> None:
    """Become a user without rights, from root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_capabilities() -> None:
    """Give up all that the kernel allows beyond the rights of a user."""
    _called("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def filter_system_calls(*, may_write: bool) -> None:
    """Allow this process the calls of a sandboxed program only, for good (see `filter.py`)."""
    steps = ctypes.create_string_buffer(seccomp_filter(platform.machine(), os.getpid(), may_write=may_write))
    # struct sock_fprog: the number of steps, and where they are.
    program = struct.pack("@HP", (len(steps) - 1) // 8, ctypes.addressof(steps))
    no_new_privileges()
    _called("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
