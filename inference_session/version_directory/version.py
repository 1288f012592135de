"""VersionDirectory: the files of one version of a model, their places and names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from inference_session.model_spec import KEY_FILE, SESSION_FILE, TABLES_FOLDER, ModelSpec
from inference_session.tables.table_file import TableFile
from inference_session.version_directory.manifest import read_manifest, verify
from inference_session.version_directory.names import absolute, model_and_version, state_file
from inference_session.version_directory.session_file import read_spec
from inference_session.version_directory.verified_files import VerifiedFiles


@dataclass(frozen=True)
class VersionDirectory:
    """`<repository>/<model>/<version>`, and what its session.json says."""

    path: Path
    """As given."""
    spec: ModelSpec
    named: str = ""
    """The name of the model, where it is not that of the folder above: servers copy versions to temporary folders."""

    @classmethod
    def read(cls, path: str | Path, named: str = "") -> VersionDirectory:
        """Read session.json; ModelFormatError where it is missing or damaged, ConfigurationError for its settings."""
        spec = read_spec(Path(path))
        try:
            SessionConfig.resolve(spec.settings)
        except ConfigurationError as error:
            raise ConfigurationError(f"{Path(path) / SESSION_FILE}: field 'settings': {error}") from None
        return cls(Path(path), spec, named)

    @property
    def model(self) -> str:
        """The name of the model: that of the folder above, unless it was given another."""
        return self.named or model_and_version(self.path)[0]

    @property
    def version(self) -> str:
        """The name of the version: that of the folder itself."""
        return absolute(self.path).name

    @property
    def tables_folder(self) -> Path:
        """The folder of the tables; it is missing where only a store has their rows."""
        return self.path / TABLES_FOLDER

    def sibling(self, version: str) -> Path:
        """Another version of the same model."""
        return absolute(self.path).parent / version

    def model_file(self, name: str) -> Path:
        """A file that all versions of the model share, in the model's folder."""
        return self.path.parent / name

    def state_file(self, state_dir: str, kind: str) -> Path:
        """The state of one kind that processes that serve the model keep for each other."""
        return state_file(Path(state_dir), self.named or absolute(self.path).parent.name, kind)

    def verify(self, *, checksums: bool, has_store: bool, state_dir: str | None) -> None:
        """Compare the files with the manifest; see `manifest.verify`.

        Args:
            checksums: compare them, too, except those of files that were found to have them before.
            has_store: a store has the rows, so that the tables may be missing.
            state_dir: remembers whose checksums were compared; None: all are.
        """
        absent = frozenset({TABLES_FOLDER}) if has_store else frozenset()
        known = VerifiedFiles(self.state_file(state_dir, "verified")) if state_dir else None
        verify(self.path, checksums=checksums, absent=absent, known=known)
        if known is not None:
            known.save()

    def open_tables(self, *, verify_indexes: bool = False) -> list[TableFile]:
        """The tables, in the order of session.json; see `TableFile.open`."""
        listed = {entry.path.as_posix(): entry.sha256 for entry in read_manifest(self.path)}
        return [
            TableFile.open(
                self.tables_folder / table.folder,
                table,
                key_sha256=listed.get(f"{TABLES_FOLDER}/{table.folder}/{KEY_FILE}"),
                verify_index=verify_indexes,
            )
            for table in self.spec.tables
        ]
