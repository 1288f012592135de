"""Serves the example model on a real Triton, asks it about real people, and prints what a person can judge.

python -m demo [--user ID …] [--keep]
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing

import click
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from demo import report
from demo.client import MODEL, Client
from demo.movielens import NUM_USERS, MovieLens, fetch
from demo.report import REPOSITORY, console
from inference_session.errors import HotrowError, UnavailableError
from triton_backend.launcher.server import ServerOptions, TritonServer


def read_movielens() -> MovieLens:
    """The data set; an empty one with a message if it is unavailable."""
    try:
        return MovieLens.read(fetch())
    except UnavailableError as error:
        console.print(f"[yellow]{error}[/]\nThe demo goes on with numbers for names, and with users of unknown tastes.")
        return MovieLens()


def active_users(data: MovieLens, count: int = 3) -> list[int]:
    """Users in the training data, one per occupation, with the most ratings after training."""
    before, after = (
        np.bincount(part.users, minlength=NUM_USERS + 1)
        for part in (data.ratings[slice(data.num_train)], data.ratings[slice(data.num_train, None)])
    )
    chosen: dict[str, int] = {}
    for user in np.argsort(-np.where(before >= 20, after, 0), kind="stable").tolist():
        if before[user] >= 20:
            chosen.setdefault(data.user(user).occupation, user)
    return list(chosen.values())[:count]


def ask(data: MovieLens, users: list[int], server: TritonServer) -> None:
    """Send all of the demo's requests, and print what comes back."""
    http_url, grpc_url = server.endpoints["HTTP"].removeprefix("http://"), server.endpoints["gRPC"]
    with closing(Client(grpc_client, grpc_url)) as over_grpc, closing(Client(http_client, http_url)) as over_http:
        report.show_recommendations(data, users, over_grpc)
        report.show_agreement(data, users[0], over_grpc, over_http)
        if len(data.ratings):
            report.show_auc(data, over_grpc)
        report.show_latency(over_grpc)


def keep_serving(server: TritonServer) -> None:
    """Return on Ctrl-C only, or when the server ends."""
    url = server.endpoints["HTTP"]
    console.print("\nThe server keeps running; Ctrl-C stops it.")
    for name, endpoint in server.endpoints.items():
        console.print(f"  {name:<8} {endpoint}")
    console.print(f"Try:\n  curl {url}/v2/models/{MODEL}\n  client_examples/json_curl.sh {url}", soft_wrap=True)
    server.wait()


@click.command()
@click.option(
    "--user", "users", type=click.IntRange(1, NUM_USERS), multiple=True, help="Ask about this user; may be repeated."
)
@click.option("--keep", is_flag=True, help="Leave the server running, until Ctrl-C.")
def main(users: tuple[int, ...], keep: bool) -> None:
    """Serve the example model, ask it about real people, and show the answers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server keeps running
    try:
        data = read_movielens()
        with console.status("Starting Triton …"):
            server = TritonServer.start(ServerOptions(REPOSITORY, (MODEL,), http_port=0, grpc_port=0, metrics_port=0))
        with server:
            ask(data, list(users) or active_users(data) or [1, 2, 3], server)
            if keep:
                keep_serving(server)
    except HotrowError as error:
        console.print(f"[red]demo: {error}[/]")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
