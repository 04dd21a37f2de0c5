"""Takes pictures of a page with a headless Chromium.

It is driven over a pipe (Chrome DevTools Protocol), and so needs no port.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import RequestError, ToolkitError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: A start on a busy login node with a slow home folder takes several seconds.
LIMIT_S = 60.0
#: Chromium paints no larger pictures.
_TALLEST_PX = 16_000
#: As a shell sees them: the browser reads commands from 3 and writes answers to 4.
_START = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'


def find() -> str:
    """Return the path of a browser. Raises RequestError if there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        names = ", ".join(PROGRAMS)
        raise RequestError(
            f"--png needs Chromium or Chrome, and none of {names} is on the PATH; open the HTML file instead"
        )
    return found


def picture(program: str, page: Path, width: int = 1280, scale: float = 1.5) -> bytes:
    """Return a PNG of the whole page in light colours, which fit on most slides."""
    with opened(program) as tab:
        tab.show(page, width, "light")
        return tab.picture(scale)


class Tab:
    """A page in a browser, and what the browser has reported about it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, page: Path, width: int, scheme: str) -> None:
        """Load ``page`` in a window of ``width`` pixels, in ``light`` or ``dark`` colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read(time.monotonic() + LIMIT_S)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, scale: float = 1.0) -> bytes:
        """Return a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        height = min(size["height"], _TALLEST_PX / scale)
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": scale}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises ToolkitError if there is none."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        message |= {} if self._session is None else {"sessionId": self._session}
        assert self._process.stdin is not None
        try:
            # In a pipe a zero byte ends each message.
            self._process.stdin.write(json.dumps(message).encode() + b"\0")
            self._process.stdin.flush()
        except OSError:
            raise _failed("it has ended") from None
        deadline = time.monotonic() + LIMIT_S
        # Events may come before the answer.
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise _failed(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next message; events are noted as well."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\0" not in self._unread:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _failed(f"it has not answered within {LIMIT_S:.0f} s")
            data = os.read(fd, 1 << 20)
            if not data:
                raise _failed("it has ended")
            self._unread += data
        raw, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message


def _failed(why: str) -> ToolkitError:
    return ToolkitError(f"the browser cannot draw the page: {why}; the HTML file is there, open it instead")


@contextlib.contextmanager
def opened(program: str) -> Iterator[Tab]:
    """Yield a tab of a browser that ends with the block, and leaves nothing behind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        # Chromium refuses to run as root with its sandbox. The page is ours, and runs no script.
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        process = subprocess.Popen(
            ["sh", "-c", _START, "sh", program, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            yield Tab(process)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
