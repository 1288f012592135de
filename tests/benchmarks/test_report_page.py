"""The page of the benchmark report, in a real browser."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.testing import ROOT
from tests.testing.browser import Look
from tests.testing.programs import script_module

if TYPE_CHECKING:
    from playwright.sync_api import Browser


_SPEEDS = {"null": 4000.0, "hotrow": 3000.0, "plain": 1500.0}


@pytest.fixture(scope="module")
def report_page() -> ModuleType:
    """The script; it imports Matplotlib, which takes long."""
    return script_module(ROOT / "benchmarks" / "report_page.py")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """As report.py gathers them; names contain characters that HTML gives a meaning."""
    figures = [
        {
            "network": network,
            "samples": samples,
            "concurrency": concurrency,
            "model": model,
            "requests_per_s": (rate := speed * concurrency**0.3 / samples**0.2),
            "range_per_s": (rate * 0.9, rate * 1.1),
            "p50_us": 1e6 * concurrency**0.7 / speed,
            "p99_us": 3e6 * concurrency**0.7 / speed,
        }
        for network, samples, concurrency, (model, speed) in product(
            ("a <img src=https://example.com/x.png> & plain", "large"), (1, 64), (1, 16, 64), _SPEEDS.items()
        )
    ]
    machine = {"processor": "2 < 3", "cores": "2", "memory": "1 GiB", "date": "today"}
    return {"machine": machine | {"load before": "0.1", "load after": "2.0"}, "figures": figures}


@pytest.fixture(scope="module")
def page(report_page: ModuleType, results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of these results."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    report_page.write_page(results, path)
    return path


def _share(pixels: NDArray[np.float32], color: str) -> float:
    wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float((np.abs(pixels - wanted).max(axis=-1) < 0.02).mean())


@pytest.mark.parametrize(("dark", "paper"), [(False, "#ffffff"), (True, "#14171d")])
def test_a_browser_draws_the_page(
    report_page: ModuleType, browser: Browser, page: Path, dark: bool, paper: str
) -> None:
    """In light and dark mode, the bars and lines of every model are visible, in proportion to their figures."""
    look = Look(browser, page, dark=dark)

    pixels = look.pixels()

    shares = {model: _share(pixels, color) for model, color in report_page.COLORS.items()}
    assert shares["null"] > shares["hotrow"] > shares["plain"] > 0.003
    assert _share(pixels, paper) > 0.5
    assert look.tab.locator("svg").count() == 3
    assert look.complaints == []


def test_the_page_needs_nothing_else(browser: Browser, page: Path) -> None:
    """The browser asks for the page and for nothing more; a name that looks like markup is shown as a name."""
    look = Look(browser, page)

    assert look.requests == [page.as_uri()]
    assert look.complaints == []
    assert "a <img src=https://example.com/x.png> & plain" in look.tab.inner_text("h2 >> nth=1")
    assert "2 < 3" in look.tab.inner_text("table >> nth=0")


def test_the_page_fits_a_phone(browser: Browser, page: Path) -> None:
    """Only plots and tables are wider than the screen; each scrolls sideways by itself."""
    look = Look(browser, page, width=390)

    sizes = look.tab.evaluate(
        "({page: document.documentElement.scrollWidth, screen: innerWidth,"
        " plots: [...document.querySelectorAll('svg')].map(plot => plot.getBoundingClientRect().width)})"
    )
    assert sizes["page"] == sizes["screen"] == 390
    assert all(width >= 600 for width in sizes["plots"])


def test_the_headline_has_the_ratios(report_page: ModuleType, results: dict[str, Any]) -> None:
    """Smallest and largest over all networks and batch sizes, at 16 requests at once."""
    assert report_page.headline(results["figures"]) == (
        "With 16 requests at once hotrow answers 2.00 to 2.00 times as many requests per second as plain ONNX Runtime,"
        " and 0.75 to 0.75 of what a model does that only answers zeros."
    )


def test_the_main_figure_is_a_picture(report_page: ModuleType, results: dict[str, Any], tmp_path: Path) -> None:
    """For the README."""
    from matplotlib.image import imread

    report_page.write_figure(results, tmp_path / "figure.png")

    assert imread(tmp_path / "figure.png").shape[1] == 1200
