"""A real Chromium without a window, spoken to over a pipe in the DevTools protocol: no driver, no library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 20_000


def find() -> str | None:
    """The browser that $CHROMIUM or the path names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab of a browser, with what it has asked for and what its console said."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = os.fdopen(to_browser, "wb", buffering=0), os.fdopen(from_browser, "rb")
        self._last, self._session = 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = 0
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Close both pipes, after the browser's end."""
        self._to.close()
        self._from.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while (found := self._receive()).get("id") != self._last:
            pass
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    def open(self, url: str, width: int = 1000, scripts: bool = True) -> Self:
        """Open a page and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500
        )
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.requests.clear()
        self._loaded = 0
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()
        return self

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def becomes(self, condition: str) -> bool:
        """Whether a condition comes true in the page."""
        waits = f"const look = setInterval(() => {{ if ({condition}) {{ clearInterval(look); done(true); }} }}, 50)"
        return bool(self.value(f"new Promise(done => {{ {waits}; setTimeout(() => done(false), {_PATIENCE_MS}); }})"))

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        while (one := self._from.read(1)) != b"\0":
            assert one, "the browser has ended"
            data += one
        found: dict[str, Any] = json.loads(data)
        told = found.get("params", {})
        match found.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.errors.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(told["entry"]))
            case "Page.loadEventFired":
                self._loaded += 1
        return found


@contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser that ends with the block. ``profile``: a folder for what it writes."""
    (its_input, to_browser), (from_browser, its_output) = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    options += [
        "--no-first-run",
        "--disable-background-networking",
        "--disable-extensions",
        f"--user-data-dir={profile}",
    ]
    script = f'exec "$@" 3<&{its_input} 4>&{its_output}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *options],
        pass_fds=(its_input, its_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    tab = None
    try:
        tab = Tab(to_browser, from_browser)
        yield tab
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if tab is not None:
            tab.close()
