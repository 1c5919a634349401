"""A headless Chromium, driven through ChromeDriver's HTTP interface (W3C WebDriver). No Python package is needed.

Tests skip where there is no ``chromium`` and ``chromedriver``: on Debian they are in the packages ``chromium`` and
``chromium-driver``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


class Browser:
    """One window.

    Attributes:
        errors: messages of the browser's console at level SEVERE since the last ``errors`` call.
    """

    def __init__(self, address: str) -> None:
        self._address = f"{address}/session"
        options = {
            "binary": CHROMIUM,
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--disable-dev-shm-usage",
            ],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{made['sessionId']}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._call("", method="DELETE")

    def open(
        self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        """Load a file or an address in a window of this size and colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body of JavaScript returns."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, seconds: float = 10.0) -> Any:
        """The first true value of a script. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.05)
        raise TimeoutError(script)

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chrome's DevTools protocol."""
        return self._call("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed or mouseReleased."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG, also written to ``path``."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        content = base64.b64decode(taken["data"])
        path.write_bytes(content)
        return content

    def errors(self) -> list[str]:
        entries = self._call("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _call(self, path: str, values: Any = None, method: str | None = None) -> Any:
        data = None if values is None else json.dumps(values).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data, kind, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode(errors="replace")[:2000]) from None


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as driver:
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address)
            opened = Browser(address)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.terminate()


def _wait(address: str) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/status", timeout=2):
            return
        time.sleep(0.05)
    raise TimeoutError("chromedriver does not answer")
