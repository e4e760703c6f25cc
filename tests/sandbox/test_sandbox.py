"""What code in a sandbox can reach, at each level that this machine has, as root and as an ordinary user.

A trick runs in a sandbox beside a bystander of the same user, with a folder that is hidden and one that can be read. It
must fail with an error of the system, or leave no trace. Each has an honest twin that must work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minfer import ops
from minfer.build.cache import find
from minfer.build.errors import BuildError
from minfer.process.threads import states
from minfer.sandbox import LEVELS, Sandbox, available, strongest
from minfer.worker import sandboxed
from tests.conftest import ROOT

# A copied Python may need LD_LIBRARY_PATH to find its library.
KEPT = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
ENVIRONMENT = {"PYTHONPATH": str(ROOT)} | KEPT
NOBODY, NAMELESS = 65534, 61234  # the second is in no table of users, as in a container, and has no home folder
USERS = (0, NOBODY)
CONFINED = LEVELS[:2]

# Enters the sandbox and tries: prints the error, or what came of it.
ENTER = """
import ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from minfer.sandbox import Sandbox
from minfer.sandbox.syscalls import call
about = json.loads(sys.argv[1])
bystander, hidden, seen = about["bystander"], Path(about["hidden"]), Path(about["seen"])
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
sandbox = Sandbox(**about["sandbox"])
sandbox.separate()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
sandbox.enter()
scratch = Path(sandbox.scratch)
said = {}
for name, code in about["tricks"].items():
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            exec(code)
            answer = "did it"
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            answer = f"refused: {error}"
        os.write(writable, answer.encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as file:
        said[name] = file.read() or "died"
    os.waitpid(pid, 0)
print(json.dumps(said), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Place:
    """A sandbox to try things in, and what is beside it."""

    level: str
    user: int
    folder: Path
    bystander: int

    def attempt(self, tricks: dict[str, str], **changes: Any) -> dict[str, str]:
        """What each of some pieces of code comes to, each in a process of its own, in one sandbox."""
        sandbox = Sandbox(self.level, [str(self.folder)], [str(self.folder / "seen"), *needed()], **changes)
        confined = vars(sandbox)
        if self.level != "namespaces":
            confined |= {"scratch": str(self.folder / "scratch")}
        about = {"sandbox": confined, "tricks": {name: textwrap.dedent(code) for name, code in tricks.items()}}
        about |= {"bystander": self.bystander, "seen": str(self.folder / "seen")}
        done = self.run("-c", ENTER, json.dumps(about | {"hidden": str(self.folder / "results")}))
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}
        command = [python(self.user), *words]
        return subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, **as_user(self.user)
        )


def needed() -> list[str]:
    return [str(ROOT), sys.prefix, sys.base_prefix]


def as_user(user: int) -> dict[str, Any]:
    return {"user": user, "group": user, "extra_groups": []} if user != os.getuid() else {}


@cache
def python(user: int) -> str:
    """An interpreter that a user can run: ours may be in a home folder. The sandbox needs the standard library alone."""
    for found in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            code = "import sys; assert sys.version_info >= (3, 11)"
            subprocess.run([found, "-c", code], check=True, capture_output=True, **as_user(user))
            return found
    return ""


@cache
def here(level: str, user: int) -> str:
    """Why a level cannot be tried as some user, or nothing."""
    if user != os.getuid() and os.getuid() != 0:
        return "only root can become another user"
    if user == os.getuid():
        return "" if available(level) else f"this machine has no {level}"
    if not python(user):
        return f"no Python that user {user} can run"
    words = [python(user), "-m", "minfer.sandbox", level]
    done = subprocess.run(words, env=ENVIRONMENT, cwd="/", capture_output=True, text=True, **as_user(user))
    return f"this machine has no {level} for user {user}: {done.stderr[-200:]}" if done.returncode else ""


PLACES = [(level, user) for level in CONFINED for user in USERS]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    level, user = request.param
    if os.getuid() != 0 and user == 0:
        pytest.skip("not root")
    user = user if os.getuid() == 0 else os.getuid()
    if why := here(level, user):
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp())  # which no other user may enter, unlike pytest's
    for name in ("results", "seen", "scratch"):
        (folder / name).mkdir()
    for name in ("results", "seen"):
        (folder / name / "file").write_text("as it was")
    if os.getuid() == 0:  # only root may change owners; else the files are our own already
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
    found = {name: (folder / name / "file").stat() for name in ("results", "seen")}
    before = {name: (about.st_mode, about.st_mtime, about.st_uid) for name, about in found.items()}
    code = "import time; secret = bytearray(b'as it was'); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([python(user), "-c", code], stdout=subprocess.PIPE, **as_user(user))
    assert process.stdout
    process.stdout.readline()
    yield Place(level, user, folder, process.pid)
    assert process.poll() is None, "the bystander was killed"
    assert states(process.pid)[0] == "S", "the bystander was stopped"
    assert len(os.sched_getaffinity(process.pid)) == len(os.sched_getaffinity(0)), "the bystander was moved"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    process.kill()
    process.wait()
    process.stdout.close()
    for name in ("results", "seen"):
        assert [path.name for path in (folder / name).iterdir()] == ["file"]
        assert (folder / name / "file").read_text() == "as it was"
        about = (folder / name / "file").stat()
        assert (about.st_mode, about.st_mtime, about.st_uid) == before[name]
    subprocess.run(["rm", "-rf", str(folder)], check=True)


# Each must be refused.
TRICKS = {
    "forges_a_row": "(hidden / 'forged.parquet').write_bytes(b'PAR1')",
    "reads_the_results": "(hidden / 'file').read_text()",
    "overwrites_progress": "(hidden / 'file').write_text('other')",
    "poisons_what_it_may_read": "(seen / 'file').write_text('other')",
    "truncates_what_it_may_read": "os.truncate(seen / 'file', 0)",
    "moves_what_it_may_read": "os.rename(seen / 'file', scratch / 'file')",
    "links_what_it_may_read": "os.link(seen / 'file', scratch / 'link'); (scratch / 'link').write_text('other')",
    "opens_again_by_proc": "fd = os.open(seen / 'file', os.O_RDONLY); os.open(f'/proc/self/fd/{fd}', os.O_RDWR)",
    "owns_a_row": "os.chown(hidden / 'file', os.getuid(), os.getgid())",
    "notes_on_a_row": "os.setxattr(hidden / 'file', 'user.x', b'1')",
    "notes_on_what_it_may_read": "os.setxattr(seen / 'file', 'user.x', b'1')",
    "makes_it_unchangeable": """
        import fcntl
        fcntl.ioctl(os.open(seen / 'file', os.O_RDONLY), 0x40086602, b'\\0' * 8)
        """,
    "holds_a_lock": """
        import fcntl
        one, other = open(seen / 'file'), open(seen / 'file')
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        else:
            raise OSError('nothing is held')
        """,
    "holds_a_lock_of_fcntl": """
        import fcntl, struct
        one, other = open(scratch / 'locked', 'w'), open(scratch / 'locked', 'w')
        lock = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)
        fcntl.fcntl(one, 37, lock)
        try:
            fcntl.fcntl(other, 37, lock)
        except BlockingIOError:
            held = True
        else:
            raise OSError('nothing is held')
        """,
    "holds_up_who_opens_it": "import fcntl; fcntl.fcntl(open(scratch / 'leased', 'w'), 1024, fcntl.F_WRLCK)",
    "watches_files": "call('inotify_init1', 0)",
    "watches_all_files": "call('fanotify_init', 0x200, 0)",
    "chooses_where_memory_lies": "call('set_mempolicy', 0, None, 0)",
    "binds_memory": "call('mbind', None, 0, 0, None, 0, 0)",
    "begins_asynchronous_io": "call('io_setup', 1, ctypes.byref(ctypes.c_ulong()))",
    "leaves_a_pth_file": "Path(os.__file__).with_name('left.pth').touch()",
    "edits_the_harness": "Path(sys.modules['minfer.sandbox'].__file__).open('a')",
    "writes_memory": "open(f'/proc/{bystander}/mem', 'r+b')",
    "reads_memory": "open(f'/proc/{bystander}/mem', 'rb')",
    "reads_its_environment": "open(f'/proc/{bystander}/environ').read()",
    "traces": "call('ptrace', 16, bystander, 0, 0)",
    "copies_memory": "call('process_vm_readv', bystander, None, 0, None, 0, 0)",
    "kills": "os.kill(bystander, signal.SIGKILL)",
    "stops": "os.kill(bystander, signal.SIGSTOP)",
    "kills_by_descriptor": "signal.pidfd_send_signal(os.pidfd_open(bystander), signal.SIGKILL)",
    "kills_a_thread": "call('tgkill', bystander, bystander, signal.SIGKILL)",
    "kills_by_input": """
        import fcntl
        a, b = socket.socketpair()
        fcntl.fcntl(a, fcntl.F_SETOWN, bystander)
        """,
    "moves_to_another_cpu": "os.sched_setaffinity(bystander, {0})",
    "is_nicer_for_it": "os.setpriority(os.PRIO_PROCESS, bystander, 19)",
    "limits_it": "resource.prlimit(bystander, resource.RLIMIT_CPU, (1, 1))",
    "mounts": "call('mount', b'none', str(scratch).encode(), b'tmpfs', 0, 0)",
    "mounts_writable": "call('mount', 0, b'/', 0, 4096 | 32, 0)",
    "begins_a_namespace": "call('unshare', 0x10020000)",
    "begins_one_by_clone": "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
    "begins_one_by_clone3": "call('clone3', 0, 0)",
    "leaves_its_root": "os.chroot(scratch)",
    "counts_events": "call('perf_event_open', 0, 0, -1, -1, 0)",
    "loads_a_program": "call('bpf', 0, 0, 0)",
    "uses_keys": "call('keyctl', 0, -3, 0, 0, 0)",
    "handles_faults": "call('userfaultfd', 0)",
    "asks_a_ring": "call('io_uring_setup', 8, 0)",
    "connects": "socket.create_connection(('127.0.0.1', 22), timeout=5)",
    "listens": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "asks_the_kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "connects_by_file": "socket.socket(socket.AF_UNIX).connect(str(seen / 'socket'))",
    "writes_to_the_system": "Path('/proc/sys/kernel/core_pattern').write_text('|/bin/true')",
    "asks_for_a_file_of_the_system": "open('/etc/hostname', 'a')",
    "reads_a_disk": "os.open(next(map(str, Path('/dev').glob('[sv]da')), '/dev/vda'), os.O_RDONLY)",
    "outlives_who_started_it": "checked(libc.prctl(1, 0))",
    "raises_its_limits": "resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))",
    "fills_the_disk": """
        with open(scratch / 'large', 'wb') as file:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            for _ in range(17):
                file.write(bytes(1 << 20)); file.flush()
        """,
}
# Each may look as if it worked: the file must be as it was, which `place` sees.
TRACELESS = {
    "makes_a_row_writable": "os.chmod(hidden / 'file', 0o4777)",
    "makes_what_it_may_read_writable": "os.chmod(seen / 'file', 0o4777)",
    "does_so_by_descriptor": "os.fchmod(os.open(seen / 'file', os.O_RDONLY), 0o4777)",
    "dates_a_row_back": "os.utime(hidden / 'file', (1, 1))",
    "dates_back_what_it_may_read": "os.utime(seen / 'file', (1, 1))",
}
# Each must work.
TWINS = {
    "writes_in_its_scratch": "(scratch / 'own').write_text('own'); assert (scratch / 'own').read_text() == 'own'",
    "removes_what_it_wrote": "(scratch / 'own').touch(); (scratch / 'own').unlink()",
    "makes_folders": "(scratch / 'a' / 'b').mkdir(parents=True)",
    "reads_what_it_may": "assert (seen / 'file').read_text() == 'as it was'",
    "imports": "import decimal, sqlite3",
    "reads_its_own_memory": "assert open('/proc/self/maps').read()",
    "reads_the_processor": "assert open('/proc/cpuinfo').read()",
    "touches": "(scratch / 'new').touch(); (scratch / 'new').touch(); (scratch / 'new').unlink()",
    "sets_the_mode_of_its_own": "(scratch / 'mode').touch(); os.chmod(scratch / 'mode', 0o755)",
    "copies_with_mode_and_time": """
        import shutil
        shutil.copy2(seen / 'file', scratch / 'copy')
        """,
    "locks_its_own": """
        import fcntl
        file = open(scratch / 'locked', 'w')
        fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX); os.fsync(file.fileno())
        """,
    "asks_for_flags": "import fcntl; assert fcntl.fcntl(0, fcntl.F_GETFL) >= 0; os.dup(0); os.set_inheritable(os.dup(0), True)",
    "writes_everything_out": "os.sync()",
    "starts_threads": "t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join()",
    "starts_a_program": "subprocess.run(['true'], check=True)",
    "starts_a_python": "subprocess.run([sys.executable, '-c', ''], check=True)",
    "signals_itself": "signal.signal(signal.SIGUSR1, lambda *_: None); os.kill(os.getpid(), signal.SIGUSR1)",
    "chooses_its_cpu": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "asks_for_its_limits": "resource.getrlimit(resource.RLIMIT_NPROC)",
    "maps_memory": "m = mmap.mmap(-1, 1 << 20); m[0] = 1",
    "shares_memory": "fd = os.memfd_create('own'); os.ftruncate(fd, 1 << 20); mmap.mmap(fd, 1 << 20)",
    "uses_pipes": "r, w = os.pipe(); os.write(w, b'x'); os.read(r, 1)",
    "uses_socket_pairs": "a, b = socket.socketpair(); a.send(b'x'); b.recv(1)",
    "dies_with_who_started_it": "checked(libc.prctl(1, signal.SIGKILL))",
    "compiles": """
        (scratch / 'one.cpp').write_text('int one() { return 1; }')
        words = ['c++', '-shared', '-fPIC', '-o', str(scratch / 'one.so'), str(scratch / 'one.cpp')]
        subprocess.run(words, check=True, env={'PATH': os.environ['PATH'], 'TMPDIR': str(scratch)})
        ctypes.CDLL(str(scratch / 'one.so'))
        """,
    "writes_nowhere": "open('/dev/null', 'w').write('x')",
}


@pytest.fixture(scope="module")
def outcomes(place: Place) -> dict[str, str]:
    return place.attempt(TRICKS | TRACELESS, scratch_bytes=16 << 20)


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_refused(outcomes: dict[str, str], trick: str) -> None:
    assert outcomes[trick].startswith("refused")


@pytest.mark.parametrize("trick", TRACELESS)
def test_a_trick_leaves_no_trace(outcomes: dict[str, str], place: Place, trick: str) -> None:
    for name in ("results", "seen"):
        about = (place.folder / name / "file").stat()
        assert about.st_mode & 0o7777 in (0o644, 0o600, 0o664) and about.st_mtime > 1
    assert outcomes[trick] == "did it" or outcomes[trick].startswith("refused")


OPEN = ("reads_the_results", "listens", "asks_the_kernel", "outlives_who_started_it")


def test_the_same_tricks_work_where_nothing_confines_them(place: Place) -> None:
    """Those that harm nobody: what refuses them elsewhere is the sandbox."""
    tricks = {name: TRICKS[name] for name in OPEN}
    assert replace(place, level="limits").attempt(tricks) == dict.fromkeys(tricks, "did it")


@pytest.fixture(scope="module")
def twins(place: Place) -> dict[str, str]:
    return place.attempt(TWINS)


@pytest.mark.parametrize("twin", TWINS)
def test_an_honest_program_is_not_refused(twins: dict[str, str], twin: str) -> None:
    assert twins[twin] == "did it"


NAMES = """
import ctypes, json, os, sys, threading
from pathlib import Path
from minfer.sandbox import Sandbox
scratch, bystander, *devices = sys.argv[1:]
Sandbox("landlock", scratch=scratch, devices=devices).enter()
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
libc = ctypes.CDLL(None)
libc.pthread_setname_np.argtypes = ctypes.c_ulong, ctypes.c_char_p
said = {"its own thread": os.strerror(libc.pthread_setname_np(thread.ident, b"named"))}
others = {"the process": "/proc/self/comm", "another process's thread": f"/proc/{bystander}/task/{bystander}/comm"}
for name, file in others.items():
    try:
        Path(file).write_text("named")
        said[name] = "Success"
    except OSError as error:
        said[name] = error.strerror
ended.set()
print(json.dumps(said))
"""


@pytest.mark.parametrize(("devices", "own"), [((), "Permission denied"), (("/dev/null",), "Success")])
def test_where_there_is_a_gpu_a_process_may_name_its_threads_and_no_others(
    place: Place, devices: tuple[str, ...], own: str
) -> None:
    """cuInit fails if it cannot name its threads. No other file of /proc becomes writable."""
    if place.level != "landlock":
        pytest.skip("no kernel for a GPU runs in namespaces")
    done = place.run("-c", NAMES, str(place.folder / "scratch"), str(place.bystander), *devices)
    assert done.stdout, done.stderr
    refused = dict.fromkeys(["the process", "another process's thread"], "Permission denied")
    assert json.loads(done.stdout) == {"its own thread": own} | refused


def test_a_level_in_which_cuda_does_not_start_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def no_cuda(level: str, devices: tuple[str, ...]) -> bool:
        tried.append((level, devices))
        return not devices

    monkeypatch.setattr("minfer.sandbox.available", no_cuda)
    assert strongest(LEVELS) == "namespaces"
    assert strongest(LEVELS[1:], ["/dev/nvidia0"]) == "limits"
    assert tried == [("namespaces", ()), ("landlock", ("/dev/nvidia0",))]


def test_a_level_is_not_available_with_devices_where_cuda_does_not_start() -> None:
    """libcuda.so.1 is missing, where there is no GPU."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    assert available("limits") and not available("limits", ("/dev/null",))


@pytest.mark.parametrize("level", LEVELS)
def test_a_user_without_a_name_is_confined(level: str) -> None:
    if why := here(level, NOBODY):
        pytest.skip(why)
    assert not here(level, NAMELESS)


def test_a_build_is_kept_under_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trusts its kernels does not find it, and nobody finds one that was changed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    kernel = ops.get("hgemm").kernels["cpu_naive"]
    said = {"library": "/elsewhere", "seconds": 1.5, "registers": None, "shared_bytes": None, "local_bytes": None}
    built = sandboxed.store(kernel, "", said, b"a library")
    assert Path(built.library).stem == hashlib.sha256(b"a library").hexdigest()
    assert sandboxed.find(kernel, "") == built and find(kernel) is None
    Path(built.library).write_bytes(b"another")
    assert sandboxed.find(kernel, "") is None


@pytest.mark.parametrize(
    "changed",
    [
        *({"seconds": "1"}, {"registers": -1}, {"registers": True}, {"local_bytes": 1.5}, {"shared_bytes": [1]}),
        *({"seconds": float("nan")}, {"shared_bytes": 1 << 31}),
    ],
)
def test_a_build_that_is_malformed_is_refused(changed: dict[str, Any]) -> None:
    said = {"seconds": 1.5, "registers": None, "shared_bytes": None, "local_bytes": None}
    with pytest.raises(BuildError, match="malformed"):
        sandboxed.store(ops.get("hgemm").kernels["cpu_naive"], "", said | changed, b"a library")
    with pytest.raises(BuildError, match="malformed"):
        sandboxed.store(ops.get("hgemm").kernels["cpu_naive"], "", said, b"")
