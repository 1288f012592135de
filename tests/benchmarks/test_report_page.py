"""The page of the benchmark report, looked at in a real browser."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import ROOT


def _module(path: Path) -> ModuleType:
    """A script's module, without its folder on the path, where names such as `triton` would hide packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report_page = _module(ROOT / "benchmarks" / "report_page.py")
_SPEEDS = {"null": 4000.0, "hotrow": 3000.0, "plain": 1500.0}


@pytest.fixture
def results() -> dict[str, Any]:
    """As report.py gathers them; names hold what HTML gives a meaning."""
    figures = [
        {
            "network": network,
            "samples": samples,
            "concurrency": concurrency,
            "model": model,
            "requests_per_s": speed * concurrency**0.3 / samples**0.2,
            "p50_us": 1e6 * concurrency**0.7 / speed,
            "p99_us": 3e6 * concurrency**0.7 / speed,
        }
        for network, samples, concurrency, (model, speed) in product(
            ("a <small> & plain", "large"), (1, 64), (1, 16, 64), _SPEEDS.items()
        )
    ]
    return {"machine": {"processor": "2 < 3 cores", "memory": "1 GiB"}, "figures": figures}


@pytest.fixture(scope="session")
def browser() -> list[str]:
    """The command line of a Chromium that draws nowhere."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on PATH; Debian: apt-get install chromium")
    # Its sandbox needs what containers do not have; the page is our own.
    return [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


def _screenshot(browser: list[str], page: Path) -> NDArray[np.float32]:
    picture = page.with_suffix(".png")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    size = "--window-size=1200,2600"
    command = [*browser, profile, size, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels: NDArray[np.float32] = matplotlib.image.imread(picture)[..., :3]
    return pixels


def _share(pixels: NDArray[np.float32], color: str) -> float:
    wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float((np.abs(pixels - wanted).max(axis=-1) < 0.02).mean())


def test_a_browser_draws_the_page(browser: list[str], results: dict[str, Any], tmp_path: Path) -> None:
    """Bars and lines of every model are to be seen, in the proportion of their figures."""
    page = tmp_path / "report.html"
    report_page.write_page(results, page)

    pixels = _screenshot(browser, page)

    shares = {model: _share(pixels, color) for model, color in report_page.COLORS.items()}
    assert pixels.shape[:2] == (2600, 1200)
    assert shares["null"] > shares["hotrow"] > shares["plain"] > 0.005
    assert _share(pixels, "#ffffff") > 0.5


def test_the_page_needs_nothing_else(results: dict[str, Any], tmp_path: Path) -> None:
    """No script, no other file, and no name that is taken for markup."""
    page = tmp_path / "report.html"
    report_page.write_page(results, page)

    text = page.read_text()
    assert not re.search(r"<script|<link|<img|\bsrc=|url\(http", text)
    assert "a &lt;small&gt; &amp; plain" in text
    assert "2 &lt; 3 cores" in text
    assert text.count("<svg") == 3


def test_the_headline_has_the_ratios(results: dict[str, Any]) -> None:
    """Smallest and largest over all networks and batch sizes, at 16 requests at once."""
    assert report_page.headline(results["figures"]) == (
        "With 16 requests at once hotrow answers 2.00 to 2.00 times as many requests per second as plain ONNX Runtime,"
        " and 0.75 to 0.75 of what a model does that only answers zeros."
    )


def test_the_main_figure_is_a_picture(results: dict[str, Any], tmp_path: Path) -> None:
    """For the README."""
    report_page.write_figure(results, tmp_path / "figure.png")

    assert matplotlib.image.imread(tmp_path / "figure.png").shape[1] == 1200
