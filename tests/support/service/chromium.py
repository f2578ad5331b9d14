"""Headless Chromium, controlled by the DevTools protocol over two pipes, without a port or a client library.

It uses Debian's `chromium`. `evaluate` drives pages, `hover` moves the pointer, `screenshot` takes pictures.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium")
MISSING = "needs headless Chromium: `chromium` is not installed (Debian: apt install chromium)"
TIMEOUT_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)


class Chromium:
    """One browser with one page. A context manager that ends the browser."""

    def __init__(self, profile: Path) -> None:
        """Start the browser. `profile` is an empty directory."""
        assert PROGRAM, MISSING
        commands_fd, self._commands = _from_10(os.pipe())
        self._answers, answers_fd = _from_10(os.pipe())
        # The browser reads commands from descriptor 3 and answers on 4: the shell connects the pipes.
        shell = ["/bin/sh", "-c", f'exec "$0" "$@" 3<{_path(commands_fd)} 4>{_path(answers_fd)}', PROGRAM]
        self.process = subprocess.Popen(
            [*shell, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_fd, answers_fd),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_fd)
        os.close(answers_fd)
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []  # errors that the page logged or did not catch
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send one command and return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the browser did not answer for {TIMEOUT_S:g} s"
            part = os.read(self._answers, 1 << 20)
            assert part, f"the browser ended with status {self.process.wait(TIMEOUT_S)}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}".strip())

    def open(self, url: str, *, width: int = 1440, height: int = 1000, dark: bool = False) -> None:
        """Show a page in a window of this size and theme."""
        self.complaints.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.use_theme(dark=dark)
        self.call("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def use_theme(self, *, dark: bool) -> None:
        """Change the colour scheme of the system."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression. Promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.evaluate(f"Boolean({expression})"):
            seen = self.evaluate("document.body?.innerText")
            assert time.monotonic() < deadline_s, f"never true: {expression}\n{self.complaints}\n{seen}"
            select.select([], [], [], 0.02)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a position in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self.process.wait(5)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: the browser and its children
            self.process.wait(TIMEOUT_S)
        finally:
            os.close(self._commands)
            os.close(self._answers)


def _from_10(pipe: tuple[int, int]) -> list[int]:
    """Renumber a pipe's ends, so that 3 and 4 are free for the browser's."""
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe]
    for end in pipe:
        os.close(end)
    return ends


def _path(fd: int) -> str:
    """Return a path to a descriptor of this process for the shell: `3<&12` is not portable beyond 9."""
    return f"/proc/self/fd/{fd}"
