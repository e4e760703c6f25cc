"""A process that may crash, hang, run out of memory or lie, and what is known of it from outside.

It is started with two file descriptors, reads requests from the one and writes replies to the other, one JSON object a
line; `serve` is its side. Its stdout and stderr, where a kernel may print, go to a log of limited size
(`minfer.process.output`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from minfer.process import fork_server
from minfer.process.death import Died
from minfer.process.freezing import STOPPING_S, Freezer
from minfer.process.orphans import orphans, running, sweeping
from minfer.process.output import MOST_PRINTED, Output, tail_of
from minfer.process.text import make_all_printable, make_printable
from minfer.sandbox import Sandbox

Message = dict[str, Any]
Start = Callable[[str, Sequence[str], Sequence[int], int], "fork_server.Forked | subprocess.Popen[bytes]"]


STOPPED_S = (
    5.0  # a longer gap between two looks at the pipe, which are 0.5 s apart, means that this process was stopped
)
# Limits of a reply, so that reading it takes less than half a GB whatever it contains. The longest honest reply has the samples
# of four steady blocks on a CPU: a million numbers of 22 bytes.
MOST_BYTES, MOST_VALUES, MOST_CONTAINERS = 64 << 20, 4 << 20, 1 << 16


class Process:
    """A running module that answers requests. It has a session of its own, so that all of it can be stopped or killed.

    The fork server starts it, and its log is limited. Without a sandbox a caller may pass its own `start`; the log then has no
    limit. Raises Died if it cannot be started, and OSError if that is because a disk is full."""

    _output: Output | None = None
    _searched = 0  # how many bytes of the buffer were searched and have no newline

    def __init__(
        self,
        module: str,
        log: Path,
        pass_fds: Sequence[int] = (),
        sandbox: Sandbox | None = None,
        start: Start | None = None,
    ) -> None:
        self.log = log
        self._scratch = ""
        if sandbox and sandbox.level != "namespaces":  # which have one in memory
            self._scratch = tempfile.mkdtemp(prefix="minfer-")
            sandbox = replace(sandbox, scratch=os.path.realpath(self._scratch))
        self.phase = "start"  # the last that it said, or that it was asked for
        self.log.parent.mkdir(parents=True, exist_ok=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._oom_kills = _oom_kills()
        self._requests, self._replies = os.fdopen(ours_out, "w", buffering=1), os.fdopen(ours_in, "rb", buffering=0)
        try:
            with open(self.log, "ab") as file, sweeping:
                fds = theirs_in, theirs_out, *pass_fds
                if sandbox or start is None:
                    self._output = Output(self.log)
                    start = partial(fork_server.start, sandbox=sandbox, output=self._output.fd)
                try:
                    self.process = start(module, [str(theirs_in), str(theirs_out)], fds, file.fileno())
                finally:
                    if self._output:
                        os.close(self._output.fd)
                running.add(self.process.pid)
        except OSError as error:
            self._close()
            self._clean()
            if self._output:
                self._output.tail()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            why = _last_line(tail_of(self.log))  # of the fork server
            raise Died("crashed", f"no process could be started: {why or error}") from error
        finally:
            for fd in (theirs_in, theirs_out):
                os.close(fd)
        self._buffer = bytearray()
        self._nonce = ""
        self.freezer = Freezer(self.process.pid, cgroup=sandbox is not None)

    def send(self, **message: Any) -> None:
        """Send a request. Its reply must repeat the nonce, which what runs there has no business to know."""
        self._nonce = secrets.token_hex(16)
        try:
            self._requests.write(json.dumps(message | {"nonce": self._nonce}) + "\n")
        except BrokenPipeError:
            pass  # it died; receive says how

    def receive(self, seconds: float) -> Message:
        """The next reply that is not about progress. Raises Died, and then has killed it.

        The deadline grows by as long as this process was stopped itself, as by `scontrol suspend`."""
        last = time.monotonic()
        deadline = last + seconds
        while True:
            now = time.monotonic()
            if now - last > STOPPED_S:
                deadline += now - last
            last = now
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                message = self._parse(line)
                if "phase" not in message:
                    return message
                self.phase = str(message["phase"])[:40]
            left = deadline - time.monotonic()
            if left <= 0 and self.process.poll() is None:
                self.kill()
                noisy = f"; it printed more than {MOST_PRINTED >> 20} MiB" if self._too_much() else ""
                raise Died("timeout", f"killed after {seconds:g} s, in the phase {self.phase!r}{noisy}")
            if end >= 0:
                continue
            # Not the whole time at once: what a dead process left behind may keep the pipe open.
            if not select.select([self._replies], [], [], max(0.0, min(left, 0.5)))[0]:
                if self.process.poll() is not None:
                    raise self._post_mortem()
                continue
            chunk = self._replies.read(1 << 20)
            if not chunk:
                raise self._post_mortem()
            self._searched = len(self._buffer)
            self._buffer += chunk
            if len(self._buffer) > MOST_BYTES:
                raise self._end_garbled(f": a reply has more than {MOST_BYTES:,} bytes")

    def ask(self, seconds: float, **message: Any) -> Message:
        """Send a request and receive its reply. Raises Died."""
        self.send(**message)
        return self.receive(seconds)

    def check_log(self) -> None:
        """Raises the OSError that occurred when its output was written to the log."""
        if self._output and self._output.failed:
            raise self._output.failed

    def allow_output(self) -> None:
        """Let it print up to the limit again, as for another kernel."""
        if self._output:
            self._output.allow()

    def _too_much(self) -> bool:
        return self._output is not None and self._output.too_much

    def _parse(self, line: bytes) -> Message:
        """Parse a reply. The counts limit its memory and its depth before it is parsed: `serve` writes ASCII, and a comma or a
        colon follows each value but the last of its container. A container takes more memory than any other value."""
        for what, count, most in (
            ("values", line.count(b",") + line.count(b":"), MOST_VALUES),
            ("containers", line.count(b"[") + line.count(b"{"), MOST_CONTAINERS),
        ):
            if count > most:
                raise self._end_garbled(f": a reply has {count:,} {what}, and may have {most:,}")
        try:
            if not line.isascii():
                raise ValueError
            message = json.loads(line)
            if message.pop("nonce") == self._nonce:
                return make_all_printable(message)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise self._end_garbled()

    def _end_garbled(self, why: str = "") -> Died:
        self.kill()
        return Died("dishonest", f"wrote to the result pipe, where only the harness answers{why}")

    def _post_mortem(self) -> Died:
        code = self.process.wait()
        self.kill()  # what it may have started
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return Died(
                "oom", f"the host ran out of memory in the phase {self.phase!r}, and the kernel killed the process"
            )
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        tail = self._output.tail() if self._output else tail_of(self.log)
        said = f": {last}" if code > 0 and (last := _last_line(tail)) else ""
        if how == "SIGSEGV" and self.phase == "verify":
            how += "; it may have read or written beyond an operand"
        return Died("crashed", f"the process died in the phase {self.phase!r} by {how}{said}")

    def kill(self) -> None:
        """End it and everything that it started; in another session, too, where it has a cgroup or this process adopts
        orphans."""
        self.freezer.kill()
        self.process.wait()
        running.discard(self.process.pid)
        self._close()
        deadline = time.monotonic() + STOPPING_S
        with sweeping:
            while (strays := orphans()) and time.monotonic() < deadline:  # their own children come next
                for pid in strays:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            self._clean()
        if self._output:
            self._output.tail()  # all that it printed is in the log now

    def _clean(self) -> None:
        """Remove what it wrote, whatever it made of the permissions."""
        if self._scratch and not Path(self._scratch).is_symlink():
            subprocess.run(["chmod", "-R", "u+rwX", self._scratch], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", "--one-file-system", self._scratch], stderr=subprocess.DEVNULL)
        self._scratch = ""

    def _close(self) -> None:
        self._replies.close()
        with contextlib.suppress(OSError):  # it may not have read the last request
            self._requests.close()


def _oom_kills() -> int:
    try:
        found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return make_printable(lines[-1]) if lines else ""


def serve(answer: Callable[[Message, Callable[..., None]], Message]) -> None:
    """The process's side: answer requests until there are no more. `answer` gets each one, and a function `say` that
    reports progress before the reply."""
    requests, replies = os.fdopen(int(sys.argv[1]), "r"), os.fdopen(int(sys.argv[2]), "w", buffering=1)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the one who asks
    faulthandler.enable()
    for line in requests:
        request = json.loads(line)
        nonce = request.pop("nonce")

        def say(nonce: str = nonce, **message: Any) -> None:
            replies.write(json.dumps(message | {"nonce": nonce}) + "\n")

        say(**answer(request, say))
