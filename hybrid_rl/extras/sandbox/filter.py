"""The system calls that a sandboxed program may make, as a seccomp filter.

A list of what is allowed, not of what is forbidden: calls that a later kernel brings are denied too. There are no
sockets (but for the pair that asyncio wakes itself with), no processes (but threads), no `exec`, no mounts, no tracing,
and no signals to others.
"""

from __future__ import annotations

import errno
import struct

# Names with their numbers on x86-64 and on aarch64 ("-": it has no such call); asm/unistd_64.h, asm-generic/unistd.h.
_PLAIN = """
    read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24
    flock:73:32 fsync:74:82 fdatasync:75:83 stat:4:- lstat:6:- fstat:5:80 newfstatat:262:79 statfs:137:43
    fstatfs:138:44 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78
    getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 umask:95:166 pipe:22:- pipe2:293:59
    poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
    epoll_wait:232:- epoll_pwait:281:22 eventfd:284:- eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86
    timerfd_gettime:287:87 brk:12:214 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233
    mincore:27:232 msync:26:227 fadvise64:221:223 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
    rt_sigsuspend:130:133 rt_sigpending:127:136 rt_sigtimedwait:128:137 sigaltstack:131:132 restart_syscall:219:128
    nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
    time:201:- times:100:153 getrusage:98:165 getrlimit:97:163 getpid:39:172 gettid:186:178 getppid:110:173
    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
    getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 uname:63:160 sysinfo:99:179 sched_yield:24:124
    sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 getpriority:140:141 getcpu:309:168
    futex:202:98 futex_waitv:449:449 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293
    set_tid_address:218:96 arch_prctl:158:- exit:60:93 exit_group:231:94 getrandom:318:278 membarrier:324:283
    alarm:37:- setitimer:38:103 getitimer:36:102 pause:34:- sendfile:40:71 sendto:44:206 recvfrom:45:207
    shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205
"""
# Allowed where all that can be written to belongs to the program.
_WRITES = """
    truncate:76:45 ftruncate:77:46 fallocate:285:47 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35
    rename:82:- renameat:264:38 renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 chmod:90:-
    fchmod:91:52 fchmodat:268:53 utimensat:280:88 utime:132:- utimes:235:- futimesat:261:-
"""
_CHECKED = """
    clone:56:220 clone3:435:435 fcntl:72:25 ioctl:16:29 kill:62:129 tkill:200:130 tgkill:234:131 prctl:157:167
    prlimit64:302:261 socketpair:53:199 open:2:- openat:257:56
"""
# machine as platform.machine() names it: its place in the tables, and its number in linux/audit.h
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}

_ALL_BITS = 0xFFFFFFFF
CLONE_THREAD, CLONE_NEW_ANY = 0x00010000, 0x7E020080
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
# What changes a file: O_ACCMODE, O_CREAT, O_TRUNC, and the bit of O_TMPFILE.
_OPEN_TO_WRITE = 0o3 | 0o100 | 0o1000 | 0o20000000
# F_DUPFD to F_SETLKW, F_OFD_*, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: none that sends signals.
_FCNTL = (*range(8), 36, 37, 38, 1030, 1032)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_PRCTL = (15, 16)  # PR_SET_NAME, PR_GET_NAME

# Opcodes of linux/bpf_common.h, and answers of linux/seccomp.h.
_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

# Argument, mask, and the values that may be there.
Check = tuple[int, int, tuple[int, ...]]


def seccomp_filter(machine: str, pid: int, *, may_write: bool) -> bytes:
    """Return the filter as an array of struct sock_filter.

    machine: as platform.machine() names it. pid: of the program, as it knows itself: it may signal only itself.
    may_write: whether it may open files to write, and change names and modes.

    Raises OSError for a machine without a table.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}; there are {', '.join(_MACHINES)}")
    column, architecture = _MACHINES[machine]
    itself: Check = (0, _ALL_BITS, (pid,))
    checks: dict[str, list[Check]] = {
        "clone": [(0, CLONE_THREAD | CLONE_NEW_ANY, (CLONE_THREAD,))],
        "fcntl": [(1, _ALL_BITS, _FCNTL)],
        "ioctl": [(1, _ALL_BITS, _IOCTL)],
        "kill": [itself],
        "tkill": [itself],
        "tgkill": [itself],
        "prctl": [(0, _ALL_BITS, _PRCTL)],
        "prlimit64": [(0, _ALL_BITS, (0,))],
        "socketpair": [(0, _ALL_BITS, (AF_UNIX,)), (1, SOCK_TYPES, (SOCK_STREAM,))],
        "open": [] if may_write else [(1, _OPEN_TO_WRITE, (0,))],
        "openat": [] if may_write else [(2, _OPEN_TO_WRITE, (0,))],
    }
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
    code.append(_step(_LOAD, _NUMBER))
    for number in _numbers(_PLAIN + (_WRITES if may_write else ""), column).values():
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    for name, number in _numbers(_CHECKED, column).items():
        # glibc takes "no such call" of clone3 as the request to use clone, whose flags can be read.
        block = [_step(_RETURN, _ERROR | errno.ENOSYS)] if name == "clone3" else _checked(checks[name])
        code += [_step(_EQUAL, number, 0, len(block)), *block]
    code.append(_step(_RETURN, _ERROR | errno.EPERM))
    return b"".join(code)


def _numbers(table: str, column: int) -> dict[str, int]:
    """Return the numbers of system calls by name."""
    fields = [entry.split(":") for entry in table.split()]
    return {field[0]: int(field[column]) for field in fields if field[column] != "-"}


def _checked(checks: list[Check]) -> list[bytes]:
    """Return the steps that allow a call if every check holds."""
    steps = []
    for argument, mask, values in checks:
        steps += [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, mask)]
        for place, value in enumerate(values):
            steps.append(_step(_EQUAL, value, len(values) - place, 0))
        steps.append(_step(_RETURN, _ERROR | errno.EPERM))
    return [*steps, _step(_RETURN, _ALLOW)]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
