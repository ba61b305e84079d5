"""A headless Chromium for tests of pages, driven over the W3C protocol of its driver."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """An open window."""

    def __init__(self, session: str) -> None:
        self.session = session

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(self.session + path, json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a page from disk in a window of this size, and waits until it has drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)
        self.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": [scheme]})
        self.ask("/url", url=file.as_uri())
        self.settle()

    def settle(self) -> None:
        """Waits for two frames, in which the page draws what has appeared."""
        frames = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.ask("/execute/async", script=frames, args=[])

    def run(self, script: str, *args: Any) -> Any:
        """Runs the body of a function in the page, waits until the page has drawn, and returns the function's value."""
        value = self.ask("/execute/sync", script=script, args=args)
        self.settle()
        return value

    def texts(self, selector: str) -> list[str]:
        """Returns the text of each element, shown or not."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)", selector)

    def errors(self) -> list[str]:
        """Returns the console's messages since the last call."""
        return [entry["message"] for entry in self.ask("/se/log", type="browser")]


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Yields a browser. There must be a Chromium and its driver."""
    assert DRIVER
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout
        started = next(line for line in driver.stdout if "started successfully" in line)
        port = re.findall(r"port (\d+)", started)[0]
        root = f"http://127.0.0.1:{port}/session"
        options = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": ARGUMENTS},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        browser = Browser(root)
        browser.session += "/" + browser.ask("", capabilities={"alwaysMatch": options})["sessionId"]
        yield browser
        request = urllib.request.Request(browser.session, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
