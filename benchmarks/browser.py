"""Chromium without a window, driven through its DevTools protocol over a pipe: no network, no port, no driver to install.

The protocol is Chromium's own (https://chromedevtools.github.io/devtools-protocol): JSON messages, each ended by a zero byte,
on the file descriptors 3 and 4 of `--remote-debugging-pipe`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "End": 35, "Enter": 13, "Escape": 27, "Home": 36, "PageDown": 34, "Tab": 9}
ENDING_S = 10.0


def chromium() -> str | None:
    """The path of a Chromium, or None: Debian's package is `chromium`."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _above_the_first(descriptor: int) -> int:
    """The same under a number that is not one of those that Chromium's ends get."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return found


class BrowserError(Exception):
    """The browser did not do what it was asked, or a page's script failed."""


class Browser:
    """One page. `errors` gathers what the page wrote to the console as an error, and its uncaught exceptions; `requests` the
    addresses that it asked for."""

    def __init__(self, width: int = 1440, height: int = 900, timeout_s: float = 60.0) -> None:
        path = chromium()
        if path is None:
            raise BrowserError("there is no Chromium here; install Debian's package chromium")
        self.timeout_s, self.size = timeout_s, (width, height)
        self.folder = tempfile.TemporaryDirectory(prefix="minfer-browser-", ignore_cleanup_errors=True)
        theirs_in, self.out = (_above_the_first(end) for end in os.pipe())
        self.into, theirs_out = (_above_the_first(end) for end in os.pipe())
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--remote-debugging-pipe", "--disable-background-networking", "--hide-scrollbars", "--mute-audio"]
        command += [f"--user-data-dir={self.folder.name}", f"--window-size={width},{height}", "about:blank"]
        quiet = os.open(os.devnull, os.O_RDWR)
        places = {0: quiet, 1: quiet, 2: quiet, 3: theirs_in, 4: theirs_out}
        moves = [(os.POSIX_SPAWN_DUP2, ours, place) for place, ours in places.items()]
        self.process = os.posix_spawn(path, command, os.environ, file_actions=moves)
        os.close(quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.buffer, self.session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        about = {"targetId": target["targetId"], "flatten": True}
        self.session = self.send("Target.attachToTarget", **about)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.out)  # at the end of its pipe it ends by itself
        os.close(self.into)
        deadline = time.monotonic() + ENDING_S
        while os.waitpid(self.process, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
                break
            time.sleep(0.02)
        self.folder.cleanup()

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result. Raises BrowserError."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.timeout_s
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self.into, 1 << 20) if ready else b""
            if not piece:
                raise BrowserError(
                    f"{method}: {'the browser ended' if ready else f'no answer in {self.timeout_s:g} s'}"
                )
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        name, params = event.get("method", ""), event.get("params", {})
        self.events.append(name)
        if name == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("data:", "blob:")):
            self.requests.append(params["request"]["url"])

    def open(self, file: Path, fragment: str = "") -> None:
        """Show a file, and wait until it is loaded and says that it is ready (`data-ready` of its root)."""
        self.events.clear()
        self.send("Page.navigate", url=file.absolute().as_uri() + fragment)
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited where it is a promise. Raises BrowserError."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(f"{expression}: {details.get('exception', {}).get('description') or details['text']}")
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true. Raises BrowserError."""
        deadline = time.monotonic() + self.timeout_s
        while not self.js(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"{expression} did not come true in {self.timeout_s:g} s: {self.errors}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, as a user presses it: a character, or one of KEYS."""
        code = KEYS.get(key, 0)
        about: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if not code else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """The middle of an element, with the mouse. Raises BrowserError where there is none."""
        middle = f"""(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;
            e.scrollIntoView({{block: "nearest"}}); const b = e.getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2]; }})()"""
        place = self.js(middle)
        if place is None:
            raise BrowserError(f"there is no {selector}")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def prefers(self, theme: str) -> None:
        """Make pages believe that the user prefers "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))
