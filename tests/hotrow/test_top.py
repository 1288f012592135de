"""`hotrow top`: metrics pages are read, compared and drawn; a missing server is reported."""

from __future__ import annotations

import io
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hotrow.commands.top import command
from hotrow.metrics.page import MetricsPage, Window, page_url
from hotrow.metrics.top_view import IndexEntry, TopView
from inference_session.errors import UnavailableError
from tests.testing.servers import free_port

_PAGE = """
# HELP hotrow_requests_total Requests
# TYPE hotrow_requests_total counter
nv_inference_request_success{{model="ctr",version="{version}"}} {requests}
nv_inference_request_failure{{model="ctr",reason="OTHER",version="{version}"}} {failed}
nv_inference_request_duration_us{{model="ctr",version="{version}"}} {duration}
nv_inference_request_summary_us{{model="ctr",version="{version}",quantile="0.99"}} Nan
hotrow_failed_requests_total{{model="ctr",version="{version}"}} {failed}
hotrow_model_version_info{{model="ctr",version="{version}"}} 1
hotrow_load_seconds{{model="ctr",version="{version}"}} 0.25
hotrow_lookup_keys_total{{model="ctr",version="{version}",table="user \\"x\\""}} {requests}
hotrow_cache_hits_total{{model="ctr",version="{version}",table="user \\"x\\""}} {hits}
hotrow_cache_misses_total{{model="ctr",version="{version}",table="user \\"x\\""}} {misses}
hotrow_tier_up{{model="ctr",version="{version}",tier="volatile"}} {up}
hotrow_backend_restarts_total{{model="ctr"}} {restarts}
hotrow_update_lag_messages{{model="ctr",version="{version}"}} 7
"""


def _page(
    time_s: float, *, version: int = 1, requests: int = 0, up: int = 1, hits: int = 0, restarts: int = 0
) -> MetricsPage:
    derived = {"failed": requests // 10, "duration": requests * 1500, "misses": hits}
    text = _PAGE.format(version=version, requests=requests, up=up, hits=hits, restarts=restarts, **derived)
    return MetricsPage.parse(text, time_s)


def _drawn(view: TopView, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.render(width))
    return console.export_text()


def test_labels_are_unescaped() -> None:
    """A table's name may hold quotes, backslashes, commas and braces."""
    page = MetricsPage.parse('a{b="x\\"y\\\\z,\\n}",c="2"} 3 1700000000\na 4\n')

    assert list(page.values("a", c="2")) == [({"b": 'x"y\\z,\n}', "c": "2"}, 3.0)]
    assert page.total("a") == 7
    assert page.total("nothing") is None


@pytest.mark.parametrize("text", ["<html>", "a{b} x", "a 1 2 3"])
def test_another_page_is_no_metrics_page(text: str) -> None:
    """What is not Prometheus's format is a ValueError."""
    with pytest.raises(ValueError, match=r"not a line of Prometheus|could not convert"):
        MetricsPage.parse(text)


@given(st.text(max_size=100))
def test_any_text_is_a_page_or_a_value_error(text: str) -> None:
    """No other exception is raised for any answer."""
    try:
        MetricsPage.parse(text)
    except ValueError:
        return


def test_a_page_of_oddities_is_drawn() -> None:
    """Labels that are missing, numbers that are none, and names that would command a terminal."""
    text = (
        'nv_inference_request_success{model="\x1b[31mred",version="1"} 5\n'
        "nv_inference_request_success 1\nhotrow_model_version_info 1\nhotrow_lookup_keys_total 5\n"
        'hotrow_lookup_keys_total{model="\x1b[31mred",version="1"} NaN\nhotrow_tier_up{model="a",version="1"} 1\n'
        'hotrow_resident_memory_bytes{model="\x1b[31mred",version="1"} NaN\nnv_cpu_memory_total_bytes +Inf\n'
        "hotrow_backend_restarts_total 3\n"
    )
    view = TopView("here")
    view.add(MetricsPage.parse(text, 1.0), [])
    view.add(MetricsPage.parse(text.replace(" 5", " 6"), 2.0), [])

    drawn = _drawn(view)

    assert "\N{REPLACEMENT CHARACTER}[31mred" in drawn
    assert "\x1b" not in drawn


def test_counters_that_fell_began_anew() -> None:
    """A server that was restarted between two pages gives no negative rate."""
    before, after = MetricsPage.parse('n{a="1"} 100\nn{a="2"} 5', 1.0), MetricsPage.parse('n{a="1"} 8\nn{a="2"} 6', 3.0)

    assert Window(before, after).per_second("n") == (8 + 1) / 2
    assert Window(before, after).per_second("n", a="2") == 0.5
    assert Window(before, after).per_second("m") is None


def test_rates_latency_and_hit_rates_are_drawn() -> None:
    """What happened between two pages, per second."""
    view = TopView("here")
    view.add(_page(10.0), [])
    view.add(_page(12.0, requests=500, hits=30), [])

    models = re.search(r"^ *ctr +1 +(.*)$", text := _drawn(view), re.MULTILINE)
    assert models is not None
    assert models[1].split()[:2] == ["250", "50"]
    assert "1.50 ms" in models[1]
    assert 'user "x"' in text
    assert "50.00%" in text
    assert "up" in text
    assert "messages behind" in text
    assert "publish to serve" in text


def test_packed_requests_count_with_all_their_samples() -> None:
    """Triton counts one as one sample; hotrow's own counter is exact."""
    counters = "nv_inference_request_success{{{0}}} {1}\nnv_inference_count{{{0}}} {1}\nhotrow_samples_total{{{0}}} {2}"
    labels = 'model="wdl",version="1"'
    view = TopView("here")
    view.add(MetricsPage.parse(counters.format(labels, 0, 0), 1.0), [])
    view.add(MetricsPage.parse(counters.format(labels, 10, 640), 2.0), [])

    row = re.search(r"^ *wdl +1 +10 +0 +640 ", _drawn(view), re.MULTILINE)
    assert row is not None


def test_rates_are_those_of_the_last_looks() -> None:
    """Counters that move once a second give steady rates, and old values are dropped."""
    view = TopView("here")
    for second, requests in enumerate([0, 1000, 1000, 1020, 1020, 1040, 1040]):
        view.add(_page(10.0 + second, requests=requests), [])

    row = re.search(r"^ *ctr +1 +(\S+) ", _drawn(view), re.MULTILINE)
    assert row is not None
    assert float(row[1]) == 40 / 4


def test_what_may_be_long_comes_last() -> None:
    """A terminal that has no lines left cuts tables, not events."""
    view = TopView("here")
    view.add(_page(10.0), [])
    view.add(_page(11.0, up=0), [])

    text = _drawn(view)

    places = [text.index(heading) for heading in ("Models", "Tiers", "Updates", "Events", "Tables")]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [80, 100, 120, 150, 170])
def test_narrow_terminals_cut_no_name_short(width: int) -> None:
    """Columns of less worth are left out rather than squeezed, however long it has been watched."""
    view = TopView("here")
    for second in range(50):
        view.add(_page(10.0 + second, requests=123_456 * second, hits=61_728 * second), [])

    text = _drawn(view, width)

    assert "…" not in text
    assert "123,456" in text
    assert "50.00%" in text


@pytest.mark.parametrize("width", [20, 40])
def test_the_narrowest_terminal_shows_names(width: int) -> None:
    """Shortened, but never gone."""
    view = TopView("here")
    view.add(_page(10.0), [])
    view.add(_page(11.0, requests=123_456, hits=61_728), [])

    assert re.search(r"^ *ctr ", _drawn(view, width), re.MULTILINE)


def test_events_are_remembered() -> None:
    """Versions that come, tiers that go down and return, a server that does not answer."""
    view = TopView("here")
    view.add(_page(10.0), [])
    view.add(_page(11.0, version=2), [])
    view.add(_page(12.0, version=2, up=0), [])
    assert "DOWN" in _drawn(view)
    view.lose("refused")
    assert "no answer, trying again: refused" in _drawn(view)
    view.add(_page(14.0, version=2, restarts=1), [])

    text = _drawn(view)
    for event in (
        "ctr version 2 loaded in 0.25 s",
        "ctr version 2: tier volatile is down",
        "the server does not answer: refused",
        "the server answers again",
        "ctr version 2: tier volatile answers again",
        "ctr: its process died and was restarted",
    ):
        assert event in text
    assert "trying again" not in text


def test_versions_that_do_not_serve_are_shown_with_their_reason() -> None:
    """The repository index shows failed loads; versions unloaded on purpose are not reported."""
    view = TopView("here")
    states = [
        IndexEntry("ctr", "1", "READY", ""),
        IndexEntry("ctr", "2", "UNAVAILABLE", "[checksum] differs"),
        IndexEntry("old", "1", "UNAVAILABLE", "unloaded"),
    ]
    view.add(_page(10.0), states)

    text = _drawn(view)
    assert "[checksum] differs" in text
    assert "old" not in text


def test_what_speaks_no_http_is_said() -> None:
    """Such as the gRPC port, given by mistake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x00\x00\x06\x04\x00 not http\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        result = CliRunner().invoke(command, ["--metrics-url", url, "--once"])
        thread.join()

    assert isinstance(result.exception, UnavailableError)
    assert "no HTTP answer" in str(result.exception)


class _Endings(BaseHTTPRequestHandler):
    """Answers once with metrics, then with an error, then with metrics again."""

    num_answers = 0

    def do_GET(self) -> None:
        type(self).num_answers += 1
        self.send_response(503 if self.num_answers == 2 else 200)
        self.end_headers()
        if self.num_answers != 2:
            self.wfile.write(b'hotrow_model_version_info{model="ctr",version="1"} 1\n')

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def failing_server() -> Iterator[str]:
    """A metrics page that is not always available."""
    _Endings.num_answers = 0
    with HTTPServer(("127.0.0.1", 0), _Endings) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_once_fails_where_no_server_answers(failing_server: str) -> None:
    """The second look finds an error; the command says so rather than print half a picture."""
    result = CliRunner().invoke(command, ["--metrics-url", failing_server, "--once", "--interval", "0.1"])

    assert isinstance(result.exception, UnavailableError)
    assert "cannot read the metrics of a server: HTTP Error 503" in str(result.exception)


def test_a_grpc_port_that_does_not_answer_is_named(failing_server: str) -> None:
    """The metrics of the server can be read."""
    _Endings.num_answers = 2
    address = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(command, ["--metrics-url", failing_server, "--once", "--url", address])

    assert isinstance(result.exception, UnavailableError)
    assert str(result.exception).startswith(address)


@pytest.mark.parametrize("address", ["h:8002", "http://h:8002", "http://h:8002/", "h:8002/metrics"])
def test_the_page_follows_from_the_address_of_its_server(address: str) -> None:
    """The server answers an empty page at `/`, which looked like a server without models."""
    assert page_url(address) == "http://h:8002/metrics"
    assert page_url("https://proxy/triton") == "https://proxy/triton"


def test_the_reason_is_in_words() -> None:
    """Not as Python writes it."""
    address = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(command, ["--metrics-url", address, "--once"])
    assert str(result.exception) == (
        f"http://{address}/metrics: cannot read the metrics of a server: Connection refused; `hotrow serve` prints "
        "their URL, --metrics-url takes it"
    )


def test_a_pipe_learns_that_no_server_answers() -> None:
    """A report says so at once, although there are no figures yet."""
    command = [sys.executable, "-m", "hotrow", "top", "--metrics-url", f"http://127.0.0.1:{free_port()}/metrics"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "no answer, trying again" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
