"""Facts that a version directory gives about itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.version_directory.version import VersionDirectory
from tests.testing import small_model


def test_names_are_those_of_the_folders_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links on the way keep their names, and a path may be relative."""
    small_model.write(tmp_path / "store" / "7")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "ctr").symlink_to(tmp_path / "store")
    version = VersionDirectory.read(tmp_path / "repository" / "ctr" / "7")
    assert (version.model, version.version) == ("ctr", "7")
    assert version.sibling("6") == tmp_path / "repository" / "ctr" / "6"
    assert version.state_file("/state", "hot_keys") == Path("/state/ctr.hot_keys")
    monkeypatch.chdir(tmp_path / "repository" / "ctr")
    assert VersionDirectory.read("7").version == "7"
    assert version.model_file("canary.json") == tmp_path / "repository" / "ctr" / "canary.json"


def test_a_version_in_a_folder_of_another_name_has_the_name_that_it_is_given(tmp_path: Path) -> None:
    """Triton copies versions of repositories in the cloud to folders that have a new name at each load."""
    small_model.write(tmp_path / "folderX2mA9e" / "7")
    version = VersionDirectory.read(tmp_path / "folderX2mA9e" / "7", "ctr")

    assert (version.model, version.version) == ("ctr", "7")
    assert version.state_file("/state", "hot_keys") == Path("/state/ctr.hot_keys")


def test_a_folder_without_one_above_is_no_version(tmp_path: Path) -> None:
    """It has no model."""
    small_model.write(tmp_path / "1")
    spec = VersionDirectory.read(tmp_path / "1").spec
    with pytest.raises(ConfigurationError, match="is not a path of the form <repository>/<model>/<version>"):
        _ = VersionDirectory(Path("/"), spec).model


def test_tables_are_opened_in_their_order(tmp_path: Path) -> None:
    """As in session.json; a missing one is named."""
    arrays = small_model.write(tmp_path / "1")
    version = VersionDirectory.read(tmp_path / "1")
    for file, table in zip(version.open_tables(), version.spec.tables, strict=True):
        assert np.array_equal(file.vectors, arrays[table.folder])
    (version.tables_folder / version.spec.tables[0].folder / "emb_vector").unlink()
    with pytest.raises(ModelFormatError, match="emb_vector"):
        version.open_tables()
