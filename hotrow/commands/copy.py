"""`hotrow copy`: files to HDFS, from HDFS, or from one place of this machine to another."""

from __future__ import annotations

import time

import click

from hotrow.options.types import PATH_OR_URL
from hotrow.output.formatting import counted
from hotrow.output.progress import byte_progress


@click.command()
@click.argument("source", type=PATH_OR_URL)
@click.argument("target", type=PATH_OR_URL)
def command(source: str, target: str) -> None:
    """Copy a version directory, a table folder or any other folder or file: SOURCE becomes TARGET itself.

    Both are paths or hdfs://HOST:PORT/path, where PORT is that of the NameNode's WebHDFS (default 9870) and the
    user is HADOOP_USER_NAME. TARGET must not exist, unless it is identical byte by byte. It appears only when it
    is complete and every byte has been read back and compared. To resume a failed copy, run the same command
    again.

    \b
    Examples:
      hotrow copy hdfs://namenode:9870/models/ctr/7 model_repository/ctr/7
      hotrow copy model_repository/ctr/7 hdfs://namenode/models/ctr/7
    """
    from inference_session.model_source import Copy

    begin = time.perf_counter()
    with Copy(source, target) as copy, byte_progress(f"Copying {source}", copy.num_bytes) as progress:
        report = copy.run(progress)
    seconds = time.perf_counter() - begin
    resumed = f" ({report.num_resumed_bytes} of them copied by an earlier run)" if report.num_resumed_bytes else ""
    copied = f"{counted(report.num_files, 'file')}, {counted(report.num_bytes, 'byte')}{resumed}"
    click.echo(f"{target}: {copied} in {seconds:.1f} s, verified")
