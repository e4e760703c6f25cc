"""A filter of system calls, as the small program that the kernel runs before each of them (seccomp, classic BPF).

A denied call fails with EPERM; a few calls do nothing and return success. The filter sees the numbers in registers, but no
memory, so it cannot tell files or addresses of sockets apart.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from collections.abc import Sequence

from minfer.sandbox import syscalls

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # in the number of a call by the third, forgotten ABI of x86-64

# Other processes' memory and threads; mounts and namespaces; keys, counters, and what has had many holes; the machine.
# fmt: off
DENIED = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "migrate_pages",
    "move_pages",
    "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "move_mount", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "open_by_handle_at",
    "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff",
    "acct", "quotactl", "quotactl_fd", "syslog", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime",
    "sethostname", "fanotify_init", "name_to_handle_at",
)
# Calls that no kernel on a CPU needs, though a GPU's driver may: asynchronous I/O, watching files, choosing where memory lies.
CPU_DENIED = ("io_setup", "inotify_init", "inotify_init1", "mbind", "set_mempolicy", "set_mempolicy_home_node")
# These calls do nothing and return success. A process can lock a file that it may only read, and so would stop another program
# that locks the file; its own files need no locks, because no other program uses their folder. sync and syncfs would write out
# the files of other programs, too.
NOT_DONE = ("flock", "sync", "syncfs")
# What reaches processes and objects that a PID and an IPC namespace would hide.
SHARED = (
    "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl",
    "mq_open", "mq_unlink", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tkill",
)
# Calls that change a file without opening it for writing, which Landlock does not cover. Compilers set modes and times, but do
# not need them: these calls do nothing and return success. The others fail. Setting the time to now fails too, because a
# program that touches a file takes success as a sign that the file exists.
PRETENDED = ("chmod", "fchmod", "fchmodat", "fchmodat2")
TIMES = {"utime": 1, "utimes": 1, "futimesat": 2, "utimensat": 2}  # the argument with the times; none means now
ATTRIBUTES = (
    "chown", "fchown", "lchown", "fchownat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr",
    "lremovexattr", "fremovexattr", "removexattrat", "file_setattr",
)
# fmt: on
OWN_ONLY = ("sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr", "prlimit64")  # process 0
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, and CLONE_NEWCGROUP to CLONE_NEWNET
FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR = 0x40086602, 0x401C5820
F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY = 6, 7, 37, 38, 1024, 1026
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP, TIOCSTI = 8, 15, 0x8901, 0x8902, 0x5412
PR_SET_PDEATHSIG = 1

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06

Program = list[tuple[int, int, int, int]]  # code, jump if true, jump if false, constant


def _deny(error: int = errno.EPERM) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | error)


def _argument(index: int) -> tuple[int, int, int, int]:
    """Load the lower half: the kernel reads no more of a process's number, a flag or a command."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _unless(index: int, *values: int) -> Program:
    """Deny unless an argument is one of these."""
    tests: Program = [(_EQUAL, len(values) - i, 0, value & 0xFFFFFFFF) for i, value in enumerate(values)]
    return [_argument(index), *tests, _deny(), (_RETURN, 0, 0, _ALLOW)]


def _where(index: int, *values: int) -> Program:
    """Deny where an argument is one of these."""
    tests: Program = [(_EQUAL, len(values) - i, 0, value & 0xFFFFFFFF) for i, value in enumerate(values)]
    return [_argument(index), *tests, (_RETURN, 0, 0, _ALLOW), _deny()]


def _fcntl(denied: Sequence[int], not_done: Sequence[int]) -> Program:
    """A filter for fcntl: commands in `denied` fail; those in `not_done` do nothing and return success."""
    tests: Program = []
    for kind, commands in enumerate((denied, not_done)):
        for command in commands:
            left = len(denied) + len(not_done) - len(tests) - 1
            tests.append((_EQUAL, left + 1 + kind, 0, command))
    return [_argument(1), *tests, (_RETURN, 0, 0, _ALLOW), _deny(), _deny(0)]


def rules(own_pids: bool, own_signals: bool, connects: bool) -> dict[str, Program]:
    """What happens at which system call. `own_pids`: a namespace hides all other processes; `own_signals`: something else
    keeps signals among its own; `connects`: a GPU's driver connects to sockets of its own."""
    found: dict[str, Program] = {name: [_deny()] for name in DENIED}
    found |= {name: [_deny(0)] for name in NOT_DONE}
    denied = [F_SETLEASE, F_NOTIFY]  # a lease holds up whoever opens the file
    found["clone3"] = [_deny(errno.ENOSYS)]  # its flags are in memory; the C library then uses clone
    found["clone"] = [_argument(0), (_ANY_BIT, 0, 1, NEW_NAMESPACES), _deny(), (_RETURN, 0, 0, _ALLOW)]
    found["socket"] = _unless(0, socket.AF_UNIX)
    found["ioctl"] = _where(1, TIOCSTI, FIOSETOWN, SIOCSPGRP, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR)
    # It must die with the process that started it: nothing but SIGKILL may be put for that.
    found["prctl"] = [
        _argument(0), (_EQUAL, 0, 3, PR_SET_PDEATHSIG), _argument(1), (_EQUAL, 1, 0, signal.SIGKILL), _deny(),
        (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    if not connects:
        found |= {name: [_deny()] for name in CPU_DENIED if syscalls.exists(name)}
        # To a socket of another program, which has a name in a file system.
        found["connect"] = [_deny()]
        found["socketpair"] = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, socket.SOCK_DGRAM), _deny()]
        found["socketpair"] += [(_RETURN, 0, 0, _ALLOW)]
        found["socket"] = [_deny()]
    if not own_pids:
        found |= {name: [_deny()] for name in SHARED} | {name: _unless(0, 0) for name in OWN_ONLY}
        found |= {name: [_deny(0)] for name in PRETENDED if syscalls.exists(name)}
        now_or_pretended = lambda index: [_argument(index), (_EQUAL, 0, 1, 0), _deny(), _deny(0)]
        found |= {name: now_or_pretended(index) for name, index in TIMES.items() if syscalls.exists(name)}
        found |= {name: [_deny()] for name in ATTRIBUTES if syscalls.exists(name)}
        found["setpriority"] = found["ioprio_set"] = [_deny()]
        denied += [F_SETOWN, F_SETOWN_EX]
        if not own_signals:  # to itself, as abort does, and to its process group
            found["kill"] = _unless(0, 0, os.getpid())
            found["tgkill"] = _unless(0, os.getpid())
    # The driver of a GPU may lock its cache of compiled code.
    found["fcntl"] = _fcntl(denied, [] if connects else [F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW])
    return found


def program(found: dict[str, Program]) -> Program:
    """The filter: the architecture, then one block for each system call with a rule, then all others are allowed."""
    code: Program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT_ARCH[syscalls.MACHINE]), _deny()]
    code.append((_LOAD, 0, 0, _NUMBER))
    if syscalls.MACHINE == "x86_64":
        code += [(_ANY_BIT, 0, 1, X32), _deny(errno.ENOSYS)]
    for name, body in found.items():
        code += [(_EQUAL, 0, len(body), syscalls.number(name)), *body]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("code", ctypes.POINTER(_Instruction))]


def install(code: Program) -> None:
    """Filter the system calls of this process and of all that it starts, from now on. Raises OSError. Its privileges must
    have been given up."""
    instructions = (_Instruction * len(code))(*(_Instruction(*parts) for parts in code))
    syscalls.call("seccomp", 1, 0, ctypes.byref(_Filter(len(code), instructions)))  # SECCOMP_SET_MODE_FILTER
