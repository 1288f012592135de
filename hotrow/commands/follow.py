"""`hotrow follow`: runs next to a server, and fetches and loads the versions that are announced."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.options.types import FOLDER, FOLDER_OR_URL
from hotrow.output.formatting import in_words
from hotrow.output.progress import byte_progress
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_source import Copy
from inference_session.urls.kafka_url import KafkaUrl
from triton_backend.client.server import RemoteError

if TYPE_CHECKING:
    from inference_session.update_stream.announcements import Announcements

_WAIT_S = 1.0
_RETRY_S = 5.0


@click.command()
@click.argument("model", shell_complete=completion.models)
@click.option("--from", "brokers", required=True, metavar="KAFKA_URL", help="kafka://HOST:PORT[,HOST:PORT]")
@click.option(
    "--source",
    required=True,
    type=FOLDER_OR_URL,
    metavar="DIR|URL",
    help="Where to copy versions from: a folder, local or hdfs://HOST:PORT/path, with a subfolder per version number.",
)
@click.option(
    "--repository", required=True, type=FOLDER, help="The server's model repository, which contains the model."
)
@server_options
def command(model: str, brokers: str, source: str, repository: Path, address: ServerAddress) -> None:
    """Load the versions of MODEL that `hotrow announce` announces into a running server, until SIGTERM or Ctrl-C.

    A version that the repository lacks is first copied from --source and verified; it appears completely or not at
    all. Then it is loaded as by `hotrow load`. An announcement contains only a version number, so it cannot name
    another place. The last announcement counts, even if it was made before this command started. If a version
    cannot be fetched or the server cannot be reached, the command tries again. If the server rejects a version,
    the old version stays active.

    \b
    Example:
      hotrow follow ctr --from kafka://127.0.0.1:9092 --source hdfs://nn/models/ctr --repository model_repository
    """
    from inference_session.update_stream.announcements import Announcements  # needs the Kafka client

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if not (repository / model).is_dir():
        raise ConfigurationError(f"{repository}: no model {model!r}; the repository must contain its config.pbtxt")
    with Announcements(KafkaUrl.parse(brokers), model) as announcements:
        click.echo(f"{model}: following {announcements.topic}")
        follower = _Follower(announcements, lambda version: _serve(model, version, source, repository, address))
        while True:
            follower.step()


class _Follower:
    """Loads announced versions into the server, one after the other."""

    def __init__(self, announcements: Announcements, serve: Callable[[int], None]) -> None:
        self._announcements = announcements
        self._serve = serve
        self._announced: int | None = None
        """Versions still to be served."""
        self._failure = ""

    def step(self) -> None:
        """Serve what has been announced. Each error is reported once."""
        try:
            self._announced = self._announcements.newest(_WAIT_S) or self._announced
            if self._announced is not None:
                self._serve(self._announced)
            self._announced, self._failure = None, ""
        except (HotrowError, OSError) as error:
            is_rejected = isinstance(error, RemoteError)  # by the server, which would reject it again
            reason = in_words(error)
            if reason != self._failure:
                then = "waiting for another version" if is_rejected else f"trying again every {_RETRY_S:g} s"
                click.echo(f"hotrow: {reason}; {then}", err=True)
            self._failure = reason
            if is_rejected:
                self._announced = None
            time.sleep(_RETRY_S)


def _serve(model: str, version: int, source: str, repository: Path, address: ServerAddress) -> None:
    """Load a version into the server; fetch it first if the repository lacks it."""
    begin = time.perf_counter()
    target = repository / model / str(version)
    if not target.exists():
        with byte_progress(f"Copying {source}/{version}") as progress, Copy(f"{source}/{version}", target) as copy:
            copy.run(progress)
    with address.connect() as server:
        if server.has_model(model) and server.ready_versions(model) == [version]:
            click.echo(f"{model}: version {version} already serves")
            return
        server.load_versions(model, [version])
        if version not in server.ready_versions(model):
            raise RemoteError(f"{model}: version {version} was loaded, but does not serve")
    click.echo(
        f"{model}: version {version} serves, {time.perf_counter() - begin:.1f} s after its announcement was read"
    )
