"""Names of rows in a store: tags, and the model and version that they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.errors import ConfigurationError
from inference_session.parameter_server.namespace import Namespace, split_tag


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("model", ["ctr", "my.model", "a-b_c"])
def test_a_tag_says_whose_table_it_is(model: str, shared: bool) -> None:
    """Whatever dots are in the model's name."""
    namespace = Namespace(model, None if shared else "7")
    tag = namespace.tag("user_id")
    assert tag == f"hps_et.{model}{'' if shared else '@7'}.user_id"
    assert split_tag(tag) == (namespace, "user_id")


def test_names_are_those_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are completed, and links keep their own names, as a server names models by them."""
    (tmp_path / "releases" / "build-1234").mkdir(parents=True)
    (tmp_path / "repository" / "ctr").mkdir(parents=True)
    link = tmp_path / "repository" / "ctr" / "7"
    link.symlink_to(tmp_path / "releases" / "build-1234")
    assert Namespace.of(link, shared=False) == Namespace("ctr", "7")
    assert Namespace.of(link, shared=True) == Namespace("ctr")
    monkeypatch.chdir(tmp_path / "repository" / "ctr")
    assert Namespace.of(Path("7"), shared=False) == Namespace("ctr", "7")
    assert Namespace.of(Path("../ctr/7/"), shared=False) == Namespace("ctr", "7")


def test_a_folder_without_a_model_is_refused() -> None:
    """A version's folder has a model's folder above it."""
    with pytest.raises(ConfigurationError, match="is not a path of the form <repository>/<model>/<version>"):
        Namespace.of(Path("/1"), shared=False)
