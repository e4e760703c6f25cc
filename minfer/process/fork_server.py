"""Starts processes that have PyTorch imported already: each is a copy of one that has (a fork).

Importing PyTorch takes seconds, and a run starts many processes: one after each crash, several for each judged case.
The fork server imports, waits and forks. It runs no kernel and never touches a device, because nothing of CUDA survives a
fork. What it starts is no child of its own but of the process that asked, which waits for it and dies with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from minfer.sandbox import Sandbox, keep_to_itself
from minfer.sandbox.environment import allowed, is_allowed

PRELOADED = tuple(f"minfer.worker.{name}" for name in ("child", "judge", "isolated", "builder"))
PRELOADED += ("minfer.profilers.host",)
STARTS_OTHERS = (
    "minfer.worker.judge",
)  # gets a fork server of its own, before it has used PyTorch and can no longer be one
MAIN = (
    "from minfer.process import fork_server; fork_server.main()"  # with -m it would be two modules, and each know half
)
MOST_FDS = 1 << 16  # that a process may have open
# Variables that no module reads during its import: a fork gets them, and the working directory, from its caller. A fork without
# a sandbox also gets from its caller the variables that `minfer.sandbox.environment` does not allow in a sandbox.
READ_LATE = (
    *("CXX", "HYDRA_FULL_ERROR", "MINFER_EXPLAIN", "OLDPWD", "PATH", "PWD", "PYTEST_CURRENT_TEST"),
    *("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
)


class Forked:
    """A process that a fork server started; as much of `subprocess.Popen` as is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative for a signal

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The side that asks."""

    def __init__(self, connection: socket.socket, process: Forked | subprocess.Popen[bytes]) -> None:
        self.connection, self.process = connection, process
        self.place = _place()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        fds: Sequence[int],
        output: int,
        sandbox: Sandbox | None,
        starts_others: bool,
    ) -> Forked:
        """Raises OSError when the fork server is gone."""
        environment = {name: os.environ.get(name) for name in READ_LATE}
        if sandbox is None and module not in STARTS_OTHERS:  # the judge starts processes in sandboxes
            environment |= {name: value for name, value in os.environ.items() if not is_allowed(name)}
        about = {
            "module": module,
            "arguments": arguments,
            "fds": fds,
            "sandbox": sandbox and asdict(sandbox),
            "starts_others": starts_others,
            "cwd": str(Path.cwd()),
            "environment": environment,
        }
        # In a file, because an environment may be longer than a message.
        with _reaping(), open(os.memfd_create("minfer-request"), "w+") as request:
            json.dump(about, request)
            request.flush()
            # The process that the fork server starts is ours as soon as the fork server answers.
            socket.send_fds(self.connection, [b"request"], [request.fileno(), output, *fds])
            answer = self.connection.recv(64)
        if not answer:
            raise ConnectionResetError("the fork server is gone")
        return Forked(int(answer))

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


_server: ForkServer | None = None
_one_at_a_time = threading.Lock()


def start(
    module: str,
    arguments: Sequence[str],
    fds: Sequence[int],
    log: int,
    sandbox: Sandbox | None = None,
    output: int | None = None,
    starts_others: bool = False,
) -> Forked:
    """Run a module as a program in a session of its own. It keeps these open files under the same numbers, prints to
    `output`, or else to `log`, and runs in the sandbox if one is given. With `starts_others` it gets a fork server of its own.
    Raises OSError if there is no fork server and none can be started; `log` then says why."""
    global _server
    output = log if output is None else output
    with _one_at_a_time:
        if _server and _server.place == _place():
            with contextlib.suppress(OSError):  # it has ended already
                return _server.start(module, arguments, fds, output, sandbox, starts_others)
        if _server:
            _server.close()
        _server = _new(log)
        return _server.start(module, arguments, fds, output, sandbox, starts_others)


def prepare() -> None:
    """Have a fork server import beside whatever this process does until it asks for the first process."""
    global _server
    with _one_at_a_time:
        _server = _server or _new(sys.stderr.fileno())


def pid() -> int | None:
    """The process of the fork server, if there is one."""
    return _server.process.pid if _server else None


def _place() -> dict[str, str]:
    """The variables that modules may have read while they were imported. If they differ, a new fork server is needed."""
    return {name: value for name, value in allowed(os.environ).items() if name not in READ_LATE}


def _new(log: int) -> ForkServer:
    """Start a fork server as a program of its own: a fork of this process would have its threads and its state. It gets only
    the variables that code in a sandbox may have, because its forks would keep any others in their memory."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=allowed(os.environ) | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    return ForkServer(ours, process)


def become_reaper(yes: bool = True) -> bool:
    """Whether this process becomes the parent of what its descendants leave behind (PR_SET_CHILD_SUBREAPER). Returns
    whether it did before."""
    before = ctypes.c_int()
    libc = ctypes.CDLL(None)
    libc.prctl(37, ctypes.byref(before))
    libc.prctl(36, int(yes))
    return bool(before.value)


@contextlib.contextmanager
def _reaping() -> Iterator[None]:
    before = become_reaper()
    try:
        yield
    finally:
        become_reaper(before)


def _serve(connection: socket.socket) -> None:
    """The fork server's side: a fork for each request, until every client is gone."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 1 << 16, 100)
        if not message:
            return
        with open(fds.pop(0), "rb") as file:
            file.seek(0)
            request = json.load(file)
        confined = request.pop("sandbox")
        sandbox = Sandbox(**confined) if confined else None
        readable, writable = os.pipe()
        adopted, adopt = os.pipe()
        if (between := os.fork()) == 0:  # what it starts becomes the asking process's when it ends
            connection.close()
            os.close(adopt)
            _start_between(writable, adopted, request, sandbox, fds)
        os.close(writable)
        os.close(adopted)
        os.waitpid(between, 0)
        os.close(adopt)
        answer = os.read(readable, 64)
        os.read(readable, 1)  # returns when it has its session: who asked may kill that at once
        connection.send(answer)
        for fd in (readable, *fds):
            os.close(fd)


def _start_between(
    writable: int, adopted: int, request: dict[str, Any], sandbox: Sandbox | None, fds: list[int]
) -> None:
    """Start what was asked for, say its number, and end. In a namespace it would not know its number itself."""
    if sandbox:
        try:
            sandbox.separate()
        except OSError as error:
            os.write(fds[0], f"no sandbox could be made: {error}\n".encode())
            os._exit(1)
    if pid := os.fork():
        os.write(writable, str(pid).encode())
        os._exit(0)
    os.read(adopted, 1)  # returns when the process between is gone
    os.setsid()
    os.close(writable)
    _become(**request, given=fds, sandbox=sandbox)


def _become(
    module: str,
    arguments: list[str],
    fds: list[int],
    given: list[int],
    sandbox: Sandbox | None,
    starts_others: bool,
    cwd: str,
    environment: dict[str, str | None],
) -> None:
    """Run a module and end."""
    os.chdir(cwd)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    starts_others = starts_others or module in STARTS_OTHERS
    spare = max(fds) + 2  # one number is left for the connection to a fork server of its own
    log, *others = [fcntl.fcntl(fd, fcntl.F_DUPFD, spare) for fd in given]
    os.closerange(3, spare)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if starts_others:
        _leave_server(spare)
    for number, fd in zip(fds, others, strict=True):
        os.dup2(fd, number)
    os.closerange(spare, MOST_FDS)
    _call_it(module)
    if sandbox:
        sandbox.enter()
    elif module not in STARTS_OTHERS:  # the judge's memory stays its own
        keep_to_itself(False)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # as with `python -m`, which runpy would otherwise warn of
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    _end(status)


def _end(status: object) -> NoReturn:
    """End as `sys.exit` does, but free no modules: Python would need half a second to free PyTorch."""
    if isinstance(status, int):
        with contextlib.suppress(Exception):  # else Python tries again, and says what failed
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)  # what kernels print
            os._exit(status & 0xFF)
    sys.exit(status)  # type: ignore[arg-type]


def _call_it(name: str) -> None:
    """What `ps -o comm` and top call this process (PR_SET_NAME), of whose command line nothing can be told."""
    short = f"minfer.{name.rpartition('.')[2]}"
    ctypes.CDLL(None).prctl(15, short.encode()[:15])


def _leave_server(spare: int) -> None:
    """Fork a server for this process, while it is still fit to be one, and without the files from `spare` on."""
    global _server
    near, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours = socket.socket(fileno=fcntl.fcntl(near.fileno(), fcntl.F_DUPFD, spare - 1))  # others get the lower numbers
    near.close()
    if (child := os.fork()) == 0:
        os.setsid()
        ours.close()
        os.closerange(spare, MOST_FDS)
        _call_it("minfer.forksrv")
        _serve(theirs)
        os._exit(0)
    theirs.close()
    _server = ForkServer(ours, Forked(child))


def _keep_registrations() -> None:
    """Keep forks from unregistering PyTorch's operators when they exit, which takes 30 ms."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        about = finalizer.peek()
        if about and about[1].__module__ == "torch.library":
            finalizer.atexit = False


def main() -> None:
    keep_to_itself()  # it also forks after foreign code has run, in a process of the same user
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _call_it("minfer.forksrv")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    # PyTorch's profiler writes a line at each start and end, and one about the driver where there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to the memory that it shares with this process, and so copy it
    _keep_registrations()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)
    _end(0)
