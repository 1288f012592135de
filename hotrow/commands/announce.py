"""`hotrow announce`: tell all servers of a model which version to serve."""

from __future__ import annotations

import click

from hotrow.options.versions import VERSION
from inference_session.update_stream.topics import announcement_topic


@click.command()
@click.argument("model")
@click.argument("version", type=VERSION)
@click.option("--to", "url", required=True, metavar="KAFKA_URL", help="kafka://HOST:PORT[,HOST:PORT]")
def command(model: str, version: int, url: str) -> None:
    """Announce VERSION of MODEL, network and rows, to every server for which `hotrow follow` runs.

    Returns when the brokers have confirmed the announcement. The files of the version must be where the followers
    look for them.

    \b
    Example:
      hotrow copy trained/ctr/8 hdfs://nn/models/ctr/8 && hotrow announce ctr 8 --to kafka://127.0.0.1:9092
    """
    from inference_session.update_stream.publisher import Publisher  # needs the Kafka client, which --help does not

    with Publisher(url, model) as publisher:
        publisher.announce(version)
    click.echo(f"{announcement_topic(model)}: version {version} was announced")
