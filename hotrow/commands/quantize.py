"""`hotrow quantize`: a copy of a version with tables in float16 or int8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hotrow.options.types import FILE, FOLDER, Number
from hotrow.output.progress import byte_progress
from hotrow.output.streams import print_json
from inference_session.errors import CanaryError
from inference_session.platform.drafts import next_version
from inference_session.version_directory.session_file import read_spec

if TYPE_CHECKING:
    from hotrow.answer_quality.comparison import AnswerQuality
    from inference_session.version_directory.quantizing import QuantizedVersion


@click.command()
@click.argument("version_dir", type=FOLDER)
@click.option(
    "--tables",
    type=click.Choice(["float16", "int8"]),
    required=True,
    help="How to store rows; int8 has a scale and an offset for each row.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="VERSION_DIR",
    help="The version directory to write.  [default: the next version of the model]",
)
@click.option(
    "--requests",
    type=FILE,
    metavar="FILE.npz",
    help="The request whose answers are compared, as record-canary reads or writes it.  [default: the model's "
    "canary_requests, else random keys of its tables]",
)
@click.option(
    "--labels",
    type=FILE,
    metavar="FILE.npy|FILE.npz",
    help="0 and 1 for the samples of --requests, [samples, labels], or an array for each label: reports AUC.",
)
@click.option(
    "--max-error", type=Number(min=0), metavar="X", help="Write nothing if any value of an output differs by more."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(
    version_dir: Path,
    tables: Literal["float16", "int8"],
    output: Path | None,
    requests: Path | None,
    labels: Path | None,
    max_error: float | None,
    as_json: bool,
) -> None:
    """Create a version with smaller tables, and report how much its answers differ from the old ones.

    A float16 row takes half the bytes of a float32 row. An int8 row takes one byte per element and 8 more: 0.27 of
    float32 for 128 elements; each element is off by at most half a step of 1/255 of its row's range. Tables that
    would not become smaller stay as they are. Look-ups still return float32.

    The new version appears completely or not at all. Unchanged files are shared by hard links. Servers serve it
    after `hotrow load`.

    \b
    Examples:
      hotrow quantize model_repository/ctr/1 --tables int8 --max-error 0.01
      hotrow quantize model_repository/ctr/1 --tables int8 --requests test.npz --labels test_labels.npz
    """
    if labels and not requests:
        raise click.UsageError("--labels needs --requests, whose samples the labels belong to")
    version_dir = version_dir.absolute()
    read_spec(version_dir)  # its error says how to name a version directory
    if output is None and not version_dir.name.isdecimal():
        raise click.UsageError(f"{version_dir} is not a numbered version of a model; give --output")
    target = output.absolute() if output else version_dir.parent / str(next_version(version_dir.parent))
    # These imports take seconds.
    from hotrow.answer_quality.comparison import compare
    from inference_session.version_directory.quantizing import quantize_version

    found: list[AnswerQuality] = []

    def accept(draft: Path) -> None:
        found.append(compare(version_dir, draft, requests or _canary(version_dir), labels))
        if max_error is not None and not found[0].largest <= max_error:
            click.echo(str(found[0]), err=True)
            raise CanaryError(f"{_too_far(found[0], max_error)}; nothing was written")

    with byte_progress(f"Quantizing {version_dir.name}") as progress:
        versions = quantize_version(version_dir, target, tables, progress=progress, accept=accept)
    if as_json:
        print_json(_as_json(target, versions, found[0]))
    else:
        click.echo(f"Wrote {target}, quantized from {version_dir}")
        click.echo("\n".join(_table_lines(versions)))
        click.echo(str(found[0]))


def _canary(version_dir: Path) -> Path | None:
    """The model's recorded requests, where its settings name some."""
    from triton_backend.repository.model_config import configured_session

    name = configured_session(read_spec(version_dir), version_dir).canary_requests
    return version_dir.parent / name if name else None


def _too_far(quality: AnswerQuality, max_error: float) -> str:
    worst = max(quality.differences, key=lambda difference: difference.largest)
    return f"output {worst.output!r} differs by up to {worst.largest:.3g}, more than --max-error {max_error:g}"


def _table_lines(versions: QuantizedVersion) -> list[str]:
    lines = []
    for old, new in zip(versions.before.tables, versions.after.tables, strict=True):
        became = f"{old.dtype} → {new.dtype}" if old != new else f"stays {old.dtype}"
        lines.append(f"  {old.name!r}: {old.num_rows} rows x {old.embedding_dim}, {became}, {new.num_bytes} bytes")
    before, after = (sum(table.num_bytes for table in spec.tables) for spec in versions)
    lines.append(f"Bytes of all tables: {before} before, {after} after ({after / max(before, 1):.2f})")
    return lines


def _as_json(target: Path, versions: QuantizedVersion, quality: AnswerQuality) -> dict[str, object]:
    return {
        "version_dir": str(target),
        "tables": [
            {"name": new.name, "dtype_before": old.dtype, "dtype": new.dtype, "bytes": new.num_bytes}
            for old, new in zip(versions.before.tables, versions.after.tables, strict=True)
        ],
        "total_table_bytes_before": sum(table.num_bytes for table in versions.before.tables),
        "total_table_bytes": sum(table.num_bytes for table in versions.after.tables),
        "quality": quality.as_json(),
    }
