"""A real browser for pages that we write."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_TIMEOUT_MS = 120_000


@contextmanager
def started_browser() -> Iterator[Browser]:
    """A headless Chromium: the machine's, else Playwright's."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        if program is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium; Debian: apt-get install chromium, elsewhere: playwright install chromium")
        # Its sandbox needs rights that containers lack; the pages are our own.
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        with playwright.chromium.launch(executable_path=program, args=options, timeout=_TIMEOUT_MS) as browser:
            yield browser


class Look:
    """A page in a new tab: its picture, and all errors and requests of the browser."""

    def __init__(self, browser: Browser, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        scheme: Literal["dark", "light"] = "dark" if dark else "light"
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri(), timeout=_TIMEOUT_MS)

    def pixels(self) -> NDArray[np.float32]:
        """Of the whole page, float32 [height, width, 3], from 0 to 1."""
        from matplotlib.image import imread

        picture = io.BytesIO(self.tab.screenshot(full_page=True, timeout=_TIMEOUT_MS))
        return imread(picture)[..., :3]
