"""A model folder as HugeCTR and HPS users have it: its files, and what its config.pbtxt says of them.

<repository>/<model>/
  config.pbtxt        the user's own; its `parameters` name files and settings
  ps.json             or elsewhere: parameter `ps`, environment variable HOTROW_PS_CONFIG
  graph.json, weights, sparse folders …
  1/                  may be empty
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr.import_cache import cached_import, kept_import
from inference_session.importers.hugectr.ps_fields import PsJson, PsModel
from inference_session.importers.hugectr.ps_json import read_ps_json
from inference_session.model_source import is_url
from inference_session.model_spec import ModelSpec
from inference_session.platform.progress import Progress
from triton_backend.repository.servable import PS_VARIABLE, SOURCE_LINK, ps_variable

Backend = Literal["hugectr", "hps"]

_FILES = frozenset({"ps", "config", "sparse_files", "dense_file", "non_trainable_params_file", "keep_rows_of"})
_FACTS = ("slots", "des_feature_num", "label_dim", "embedding_vector_size", "embeddingkey_long_type", "mixed_precision")
_WITHOUT_EFFECT = frozenset(
    {
        "cat_feature_num",
        "max_nnz",
        "gpucache",
        "gpucacheper",
        "hit_rate_threshold",
        "refresh_interval",
        "refresh_delay",
        "freeze_sparse",
    }
)


@dataclass(frozen=True)
class InPlaceModel:
    """What a model folder holds."""

    folder: Path
    """The user's model folder."""
    ps_json: PsJson
    model: PsModel
    """From ps.json, as changed by config.pbtxt."""
    keep_rows_of: tuple[Path, ...]
    session_settings: Mapping[str, str]
    """hotrow's own settings in config.pbtxt."""
    statements: Mapping[str, str]
    """Statements in config.pbtxt about the model that do not affect it."""

    @property
    def owner(self) -> Path:
        """What imports are kept for: the folder, unless Triton made it for this load, with a name of its own."""
        return self.folder if self.folder.name == self.model.name else self.folder.parent

    def imported(self, version: int, progress: Progress | None = None) -> AbstractContextManager[Path]:
        """A version directory made of the files; see `cached_import`."""
        keep_rows_of = self.keep_rows_of
        return cached_import(
            self.ps_json, self.model, self.owner, version=version, keep_rows_of=keep_rows_of, progress=progress
        )

    @contextmanager
    def served_before(self, version: int) -> Iterator[Path]:
        """The files of a version when it was last served, regardless of what config.pbtxt names now.

        Raises:
            ConfigurationError: they are no longer known.
        """
        with kept_import(self.model.name, self.owner, version) as version_dir:
            if version_dir is None:
                raise ConfigurationError(
                    f"{self.folder}: the files of version {version} are not kept; restore its config.pbtxt "
                    "and load the model without a version"
                )
            yield version_dir


def read_model_folder(
    folder: Path,
    name: str,
    parameters: Mapping[str, str],
    backend: Backend,
    *,
    environment: Mapping[str, str] = os.environ,
) -> InPlaceModel:
    """Read ps.json of a model, and apply the parameters of config.pbtxt to it.

    Paths in ps.json are relative to its folder, those in config.pbtxt to the model's.

    Raises:
        ConfigurationError: there is no ps.json, it is wrong or has no such model, or a parameter is unknown.
    """
    folder = (folder / SOURCE_LINK).resolve() if (folder / SOURCE_LINK).exists() else folder
    settings = {item.name for item in fields(SessionConfig)} - _WITHOUT_EFFECT
    known = {*_FILES, *_FACTS, *_WITHOUT_EFFECT, *settings}
    ours = {key: value for key, value in parameters.items() if not key.isupper()}  # names in capitals are Triton's own
    for key in ours:
        if key not in known:
            raise ConfigurationError(f"config.pbtxt: unknown parameter {key!r}; known: {', '.join(sorted(known))}")
    ps_json = read_ps_json(_find_ps_json(folder, ours, environment, backend))
    return InPlaceModel(
        folder=folder,
        ps_json=ps_json,
        model=_with_files(ps_json.model(name), folder, ours, backend),
        keep_rows_of=tuple(folder / part for part in _listed(ours.get("keep_rows_of", ""))),
        session_settings={key: value for key, value in ours.items() if key in settings},
        statements={key: value for key, value in ours.items() if key in _FACTS},
    )


def in_place_backend(name: str) -> Backend | None:
    """The backend of that name if it serves such folders."""
    names: dict[str, Backend] = {"hugectr": "hugectr", "hps": "hps"}
    return names.get(name)


def contradictions(model: InPlaceModel, spec: ModelSpec, *, max_batch_size: int) -> list[str]:
    """Statements in config.pbtxt that the model's own files contradict; the files take precedence."""
    facts = {"mixed_precision": "false (computed in float32)"}
    if spec.takes_hugectr_requests:
        options = spec.layout_options
        facts |= {"slots": str(sum(options["slots"])), "des_feature_num": str(options["dense_dim"])}
        facts |= {"label_dim": str(len(spec.labels))}
        facts |= {"embeddingkey_long_type": str(options["key_type"] == "int64").lower()}
        facts |= {"embedding_vector_size": ", ".join(sorted({str(table.embedding_dim) for table in spec.tables}))}
    found = [
        f"{key} is {said!r} in config.pbtxt, but {facts[key]} in the model"
        for key, said in model.statements.items()
        if key in facts and said.strip().lower() not in facts[key].replace(" ", ",").split(",")
    ]
    if max_batch_size != model.model.max_batch_size:
        found.append(f"max_batch_size is {max_batch_size}, but {model.model.max_batch_size} in ps.json, which is used")
    return found


def _find_ps_json(
    folder: Path, parameters: Mapping[str, str], environment: Mapping[str, str], backend: Backend
) -> Path:
    if "ps" in parameters:
        return folder / parameters["ps"]
    for variable in (ps_variable(backend), PS_VARIABLE):
        if environment.get(variable):
            return Path(environment[variable])
    path = folder / "ps.json"
    if not path.exists():
        raise ConfigurationError(
            f"{path}: no such file; put ps.json there, or set its path by the parameter 'ps' in config.pbtxt or "
            f"the environment variable {PS_VARIABLE}"
        )
    return path


def _with_files(model: PsModel, folder: Path, parameters: Mapping[str, str], backend: Backend) -> PsModel:
    changes: dict[str, Any] = {}
    for key, field in (
        ("config", "graph_file"),
        ("dense_file", "dense_file"),
        ("non_trainable_params_file", "statistics_file"),
    ):
        if parameters.get(key):
            changes[field] = _placed(folder, parameters[key])
    if sparse_files := _listed(parameters.get("sparse_files", "")):
        if len(sparse_files) != len(model.sparse_files):
            raise ConfigurationError(
                f"config.pbtxt: parameter 'sparse_files' names {len(sparse_files)} folders, ps.json has "
                f"{len(model.sparse_files)} for model {model.name!r}; one per table"
            )
        changes["sparse_files"] = tuple(_placed(folder, part) for part in sparse_files)
    if backend == "hps":
        changes["graph_file"] = ""
    model = replace(model, **changes)
    if backend == "hugectr" and not (model.graph_file and model.dense_file):
        missing = "graph: 'network_file'" if not model.graph_file else "dense weights: 'dense_file'"
        raise ConfigurationError(f"model {model.name!r} has no {missing} of ps.json is empty; backend 'hps' needs none")
    return model


def _placed(folder: Path, name: str) -> str:
    return name if is_url(name) else str(folder / name)


def _listed(names: str) -> Sequence[str]:
    return [name for part in names.split(",") if (name := part.strip())]
