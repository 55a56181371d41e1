"""A headless Chromium, driven over a pipe by its DevTools protocol: the standard library is all it takes.

    with Chromium.open() as browser:
        browser.load(path)
        browser.evaluate("document.title")
        browser.click("button.play"); browser.press("ArrowRight"); browser.screenshot(to)

All input is real: mouse and key events go through the browser's own input queue. What the page wrote to its console,
the errors it threw and the addresses it asked for are in `problems` and `requests`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Generous, because machines that test are busy; nothing waits this long unless it hangs.
_LONGEST_S = 60.0
# The browser reads commands from descriptor 3 and writes to descriptor 4; only in the child may these be taken.
_LAUNCH = """
import os, sys
_, commands, answers, *program = sys.argv
os.dup2(int(commands), 3)
os.dup2(int(answers), 4)
os.execv(program[0], program)
"""


def find() -> str | None:
    """The browser's program, from RADIXKV_CHROMIUM or the usual names; None where there is none."""
    named = os.environ.get("RADIXKV_CHROMIUM")
    if named:
        return named
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one tab."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self._is_loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []

    @classmethod
    @contextlib.contextmanager
    def open(cls, width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Chromium]:
        """A browser that ends with the block."""
        program = find()
        assert program is not None, "no Chromium; the caller skips before"
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            options = [
                "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
                "--hide-scrollbars",
                f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
            ]  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(to_read), str(from_write), program, *options],
                pass_fds=(to_read, from_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HOME": profile},
            )
            os.close(to_read)
            os.close(from_write)
            browser = cls(process, to_write, from_read)
            try:
                browser._attach(width, height, dark)
                yield browser
            finally:
                with contextlib.suppress(OSError, AssertionError):
                    browser._session = None
                    browser.command("Browser.close")
                os.close(to_write)
                os.close(from_read)
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _attach(self, width: int, height: int, dark: bool) -> None:
        end = time.monotonic() + _LONGEST_S
        tabs: list[str] = []
        while not tabs:  # the first one may not be open yet
            assert time.monotonic() < end, "the browser opens no tab"
            targets = self.command("Target.getTargets")["targetInfos"]
            tabs = [each["targetId"] for each in targets if each["type"] == "page"]
        target = tabs[0]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        if dark:
            self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def load(self, path: Path, fragment: str = "") -> None:
        """Opens a file, and comes back when it is loaded. fragment: what stands behind its name, such as `#17`."""
        self._is_loaded = False
        self.command("Page.navigate", url=path.resolve().as_uri() + fragment)
        end = time.monotonic() + _LONGEST_S
        while not self._is_loaded:
            self._take(self._receive(end))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; AssertionError if it throws."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Comes back when the expression is true."""
        end = time.monotonic() + _LONGEST_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}\n{self.problems}"
            time.sleep(0.02)
        return value

    def click(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """A click on an element; `at` says where, as shares of its width and height."""
        box = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        x, y = box[0] + at[0] * box[2], box[1] + at[1] * box[3]
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def press(self, key: str) -> None:
        """A key, by the name that events have for it: "ArrowRight", "Enter", " "."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, " ": 32, "Escape": 27, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path, *, whole: bool = False) -> bytes:
        """What is to be seen, or the whole page, as a PNG, also written to `path`."""
        data = base64.b64decode(self.command("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
        path.write_bytes(data)
        return data

    # ---------------------------------------------------------------- the pipe

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; events that come before it are taken in."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _LONGEST_S
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 16)
            assert more, f"the browser has gone, with status {self._process.poll()}"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
