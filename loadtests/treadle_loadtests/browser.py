"""A headless Chromium that is told what to do over two pipes: no driver, no port, no package.

Owns the process and the protocol (Chrome DevTools, one JSON message before each zero byte). What is looked at is the caller's.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WAIT_SECONDS = 30.0
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions", "--no-proxy-server",
    "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en",
)  # fmt: skip
_READ, _WRITE = 3, 4  # where Chromium looks for its pipes
MISSING = "there is no Chromium to look at the page with: apt-get install chromium"


def chromium() -> str | None:
    """Path of the browser, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One browser with one tab. Use as a context; closing it ends the process and removes its folder.

    errors: what the page's console said at level error, exceptions that nobody caught, and violations of its policy
    urls:   what the page asked for
    """

    def __init__(self, path: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-browser-", ignore_cleanup_errors=True)
        self._calls, self._pending, self._session = 0, b"", ""
        theirs_read, self._to = _pipe()
        self._from, theirs_write = _pipe()
        quiet = os.open(os.devnull, os.O_RDWR)
        argv = [path, *_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={self._folder.name}", "about:blank"]
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs_read, _READ), (os.POSIX_SPAWN_DUP2, theirs_write, _WRITE),
            (os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2),
        ]  # fmt: skip
        home = os.environ | {"HOME": self._folder.name}  # nothing of it stays in the caller's own
        self._pid = os.posix_spawn(path, argv, home, file_actions=actions, setpgroup=0)
        for fd in (theirs_read, theirs_write, quiet):
            os.close(fd)
        self._attach(width, height, dark)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", f"{url} is loaded")

    def value(self, script: str) -> Any:
        """What an expression is in the page; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Text of the first element that fits; empty if there is none."""
        return str(self.value(f"(document.querySelector({json.dumps(selector)}) || {{textContent: ''}}).textContent"))

    def wait(self, script: str, what: str, seconds: float = WAIT_SECONDS) -> Any:
        """Wait until an expression is true in the page; its value, or True where that is an element."""
        seen = f"((found) => found instanceof Node || found)({script})"
        return self.until(lambda: self.value(seen), what, seconds)

    def until(self, holds: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
        """Wait until `holds` gives something true; that."""
        end = time.monotonic() + seconds
        while not (found := holds()):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {what}; errors of the page: {self.errors}")
            time.sleep(0.05)
        return found

    def write(self, selector: str, text: str) -> None:
        """Focus an element and type into it as a keyboard does."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press a key: its name and its Windows code, `Enter` 13."""
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)
            more = {}

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        place = self.value(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)}); at.scrollIntoView({{block: 'nearest'}});"
            " const box = at.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Make one call of the protocol; its result."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        _write_all(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_SECONDS
        while True:
            answer = self._message(end)
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def close(self) -> None:
        """End it, and all its processes."""
        for fd in (self._to, self._from):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _attach(self, width: int, height: int, dark: bool) -> None:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
            features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            self.call("Emulation.setEmulatedMedia", features=features)
        except BaseException:
            self.close()
            raise

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            readable, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 20) if readable else b""
            if not data:
                raise AssertionError("Chromium " + ("ended" if readable else f"did not answer within {WAIT_SECONDS:g} s"))
            self._pending += data
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(f"console: {params['args']}")


def _pipe() -> tuple[int, int]:
    """A pipe whose ends lie above the two that Chromium gets, so that none of these is overwritten before it is used."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
