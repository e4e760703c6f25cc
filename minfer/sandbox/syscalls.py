"""System calls that Python has no function for, by number, on x86-64 and aarch64."""

from __future__ import annotations

import ctypes
import os
import platform

libc = ctypes.CDLL(None, use_errno=True)

# Name: its number on x86-64 and on aarch64. From 424 on, all architectures have the same.
_TABLE = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bind": (49, 200), "bpf": (321, 280),
    "capset": (126, 91), "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "clone": (56, 220), "connect": (42, 203), "delete_module": (176, 106), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25), "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "lremovexattr": (198, 15), "lsetxattr": (189, 6), "removexattr": (197, 14), "setxattr": (188, 5),
    "utimensat": (280, 88),
    "finit_module": (313, 273), "init_module": (175, 105), "ioctl": (16, 29), "ioprio_set": (251, 30),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "kill": (62, 129), "migrate_pages": (256, 238), "mount": (165, 40), "move_pages": (279, 239),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188),
    "msgsnd": (69, 189), "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "pivot_root": (155, 41),
    "prctl": (157, 167), "prlimit64": (302, 261), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "seccomp": (317, 277), "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "sendto": (44, 206), "sethostname": (170, 161), "setns": (308, 268), "setpriority": (141, 140),
    "settimeofday": (164, 170), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198),
    "socketpair": (53, 199), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131),
    "fanotify_init": (300, 262), "flock": (73, 32), "inotify_init1": (294, 26), "io_setup": (206, 0), "mbind": (237, 235),
    "name_to_handle_at": (303, 264), "set_mempolicy": (238, 237), "sync": (162, 81), "syncfs": (306, 267),
    "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
_TABLE |= {
    name: (number, number)
    for name, number in {
        "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
        "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
        "quotactl_fd": 443, "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
        "set_mempolicy_home_node": 450, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
    }.items()
}  # fmt: skip

# Those that aarch64 never had.
_OLDER = {"inotify_init": 253, "chmod": 90, "chown": 92, "lchown": 94, "utime": 132, "utimes": 235, "futimesat": 261}

MACHINE = platform.machine()
KNOWN = MACHINE in ("x86_64", "aarch64")
if MACHINE == "x86_64":
    _TABLE |= {name: (number, number) for name, number in _OLDER.items()}


def number(name: str) -> int:
    """The number of a system call on this machine. Raises OSError where it is none that we have a table of."""
    if not KNOWN:
        raise OSError(f"no table of system calls for {MACHINE}")
    return _TABLE[name][MACHINE == "aarch64"]


def exists(name: str) -> bool:
    """Whether this machine has a system call."""
    return name in _TABLE


def call(name: str, *arguments: object) -> int:
    """Make a system call. Raises OSError."""
    return _check(name, libc.syscall(number(name), *(_word(a) for a in arguments)))


def prctl(option: int, *arguments: int) -> int:
    """Raises OSError."""
    return _check("prctl", libc.prctl(option, *(ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4])))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Raises OSError."""
    words = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(f"mount {target}", libc.mount(*words, ctypes.c_ulong(flags), options.encode()))


def _word(argument: object) -> object:
    """A number as a whole register: the upper half of one that is passed as an int is not defined."""
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _check(what: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
