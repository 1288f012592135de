"""Checks a model repository before a server reads it: Triton hangs without end on some mistakes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_spec import SESSION_FILE
from inference_session.platform.drafts import MAX_VERSION
from inference_session.version_directory.session_file import read_spec
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig

IN_PLACE_BACKENDS = frozenset({"hugectr", "hps"})
"""Backends that serve model folders of HugeCTR and HPS users, through a view (view.py)."""
VIEW_FOLDER = "adapted"
"""Name of the folder of links that Triton sees in place of a repository (view.py)."""
SOURCE_LINK = ".source"
"""In a model folder of the view: points to the user's own."""
PS_VARIABLE = "HOTROW_PS_CONFIG"
"""Environment variable that names ps.json."""
_PS_FLAG = re.compile(r"^--backend-config[=\n](hugectr|hps),ps=(.+)$", re.MULTILINE)
_VERSION = re.compile(r"[1-9][0-9]*")
_NUMBER_AT_START = re.compile(r"[ \t\n\v\f\r]*\+?[0-9]")
_PLAIN = re.compile(r"[\w./+@%,=-]+")
_PLAIN_NAME = re.compile(r"[\w.+@%,=-]+", re.ASCII)
_BACKEND_BY_FILE = {
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.pt": "pytorch",
    "model.xml": "openvino",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.py": "python",
}
"""What Triton takes for the backend of a model without a config.pbtxt, by an entry of its versions."""
_IN_STUBS = IN_PLACE_BACKENDS | {"hotrow", "python"}
"""Backends whose models run in processes of their own."""


def is_version(name: str) -> bool:
    """Whether a folder of that name in a model's folder is a version."""
    return _VERSION.fullmatch(name) is not None and int(name) <= MAX_VERSION


def is_plain(path: str) -> bool:
    """Whether a shell leaves it unchanged: Triton starts the processes of Python models through a shell."""
    return _PLAIN.fullmatch(path) is not None


def in_url(model: str) -> str:
    """A model's name in the path of an HTTP request. Triton 24.10 does not decode what is escaped there."""
    return quote(model, safe="+@%,=")


def ps_variable(backend: str) -> str:
    """The environment variable that names ps.json for one backend alone."""
    return f"{PS_VARIABLE}_{backend.upper()}"


def ps_json_variables(flags: Sequence[str]) -> dict[str, str]:
    """HugeCTR's own `--backend-config=hugectr,ps=FILE` (or `hps,ps=`) among tritonserver's flags, as variables.

    Triton hands that flag to C++ backends only; Python sees the environment. Relative paths start here.
    """
    found = _PS_FLAG.findall("\n".join(flags))
    return {ps_variable(backend): str(Path(path).absolute()) for backend, path in found}


@dataclass(frozen=True)
class ServableModel:
    """A model folder that Triton can load."""

    name: str
    versions: tuple[int, ...]
    """Ascending; Triton serves the highest unless its config says otherwise."""
    backend: str


def model_folders(repository: Path) -> Iterator[Path]:
    """The folders that Triton takes for models, except `lost+found`, which file systems have at their top."""
    for path in repository.iterdir():
        if path.name[0] != "." and path.name != "lost+found" and path.is_dir():
            yield path


def begun_models(repository: Path) -> list[Path]:
    """The folders of models whose first version is being written, or was when its writer died."""
    return sorted(folder for folder in model_folders(repository) if _is_begun(folder))


def misread_entries(repository: Path, models: Sequence[ServableModel]) -> list[tuple[Path, str]]:
    """Entries of a repository and of these models' folders that Triton must not see, and the reasons."""
    found = [
        (path, "the link leads nowhere, and Triton would fail to list the repository")
        for path in repository.iterdir()
        if not os.path.exists(path)  # noqa: PTH110  Path.exists() raises where the target may not be looked at
    ]
    for model in models:
        if model.backend not in IN_PLACE_BACKENDS:  # else Triton sees the versions alone, in a view
            found += [(path, reason) for path in (repository / model.name).iterdir() if (reason := misreading(path))]
    return sorted(found)


def misreading(path: Path) -> str:
    """Why Triton must not see an entry of a model's folder; empty if it may."""
    if not os.path.exists(path):  # noqa: PTH110  as above
        return "the link leads nowhere, and Triton would not load the model"
    # Triton reads the leading digits: it would take `5.tmp` for version 5, and wait for its files.
    if _NUMBER_AT_START.match(path.name) and path.is_dir() and not is_version(path.name):
        return "it is not a version number, but Triton would treat it as one"
    return ""


def find_models(
    repository: Path,
    wanted: Sequence[str] = (),
    *,
    backends: Sequence[str] = (),
    leave_out: Callable[[HotrowError], None] | None = None,
) -> list[ServableModel]:
    """The models of a repository, or those wanted, in order of name.

    Models whose first version is still being written belong to it only if they are wanted.

    Args:
        backends: names of the backends that the server has; a model of another one is an error. Empty: not checked.
        leave_out: called with the error of each model that cannot be served, which is left out. None: it is raised.

    Raises:
        ConfigurationError: no such folder or model, or a model that Triton cannot load or hangs on.
    """
    if not repository.is_dir():
        raise ConfigurationError(f"{repository}: no such folder; a model repository holds a folder for each model")
    present = sorted(path.name for path in model_folders(repository))
    for name in wanted:
        if name not in present:
            raise ConfigurationError(f"{repository} has no model {name!r}; models: {_listed(present)}")
    begun = {folder.name for folder in begun_models(repository)}
    names = sorted(set(wanted)) or [name for name in present if name not in begun]
    if not names:
        raise ConfigurationError(f"{repository} contains no model; `hotrow import` creates one")
    found = (_find(repository / name, backends, leave_out) for name in names)
    return [model for model in found if model is not None]


def _find(
    folder: Path, backends: Sequence[str], leave_out: Callable[[HotrowError], None] | None
) -> ServableModel | None:
    try:
        return _check_model(folder, backends)
    except HotrowError as error:
        if leave_out is None:
            raise
        leave_out(error)
        return None


def _check_model(folder: Path, backends: Sequence[str]) -> ServableModel:
    config = read_config(folder)
    if config.name not in ("", folder.name):
        raise ConfigurationError(f"{folder / CONFIG_FILE}: name is {config.name!r}, but the folder is {folder.name!r}")
    if backends and config.backend and config.backend not in backends:
        raise ConfigurationError(
            f"model {folder.name!r}: this server has no backend {config.backend!r}; backends: {_listed(backends)}"
        )
    if config.backend in _IN_STUBS and not _PLAIN_NAME.fullmatch(folder.name):
        raise ConfigurationError(
            f"model {folder.name!r}: Triton starts its process through a shell, which would misread this "
            f"name; allowed: ASCII letters, digits and any of .+@%,=_-; rename {folder}"
        )
    versions = _versions(folder)
    for version in config.chosen_versions(versions):
        _check_version(folder / str(version), config)
    return ServableModel(folder.name, tuple(versions), config.backend)


def incomplete_models(repository: Path) -> list[str]:
    """The models whose config.pbtxt does not describe their inputs and outputs, so that their backends have to.

    Among all models, because an ensemble has Triton load others, and clients may.
    """
    found = []
    for folder in model_folders(repository):
        with suppress(ConfigurationError, OSError):  # loading it says what is wrong
            config = read_config(folder)
            if not (config.inputs and config.outputs) and config.backend not in (*IN_PLACE_BACKENDS, "hotrow"):
                found.append(folder.name)
    return sorted(found)


def read_config(folder: Path) -> ModelConfig:
    """A model's config.pbtxt; where there is none, what Triton detects; ConfigurationError if it detects nothing."""
    config_file = folder / CONFIG_FILE
    if config_file.is_file():
        return ModelConfig.read(config_file)
    for name, backend in _BACKEND_BY_FILE.items():
        if any(_describes_itself(folder / str(version) / name) for version in versions_in(folder)):
            return ModelConfig(name="", backend=backend)
    raise ConfigurationError(f"model {folder.name!r}: {config_file} does not exist{_hint(folder)}")


def _describes_itself(path: Path) -> bool:
    """Whether a model is there that a backend can ask for inputs and outputs. Code that cannot tell would get none."""
    return path.exists() and (path.suffix != ".py" or "auto_complete_config" in path.read_text(errors="replace"))


def _hint(model: Path) -> str:
    """What was given in place of a repository, or not made by a command, if that is known."""
    folder = model.parent
    if any((model / str(version) / SESSION_FILE).is_file() for version in versions_in(model)):
        return "; `hotrow import` and `hotrow publish-version` write it, functions in Python do not"
    if (folder / CONFIG_FILE).is_file():
        return f"; {folder} is the folder of a model: give the repository that holds it, {folder.parent}"
    if (folder / SESSION_FILE).is_file():
        return f"; {folder} is a version directory: give the repository of its model, {folder.parent.parent}"
    if below := sorted(folder.glob(f"*/*/{CONFIG_FILE}")):
        return f"; {folder} is no model repository: give one of those in it, such as {below[0].parent.parent}"
    return ""


def _is_begun(folder: Path) -> bool:
    """Whether a folder holds no version but one that is being written, or was when its writer died."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:  # finding the model raises it
        return False
    return any(name.startswith(".tmp-") for name in names) and not any(map(is_version, names))


def versions_in(folder: Path) -> list[int]:
    """The versions in a model's folder, ascending."""
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and is_version(path.name))


def _versions(folder: Path) -> list[int]:
    versions = versions_in(folder)
    if not versions:
        raise ConfigurationError(
            f"model {folder.name!r}: {folder} contains no version; a version is a folder whose name is a whole number"
        )
    return versions


def _check_version(version_dir: Path, config: ModelConfig) -> None:
    if config.backend == "python":
        code = version_dir / (config.default_model_filename or "model.py")
        if not code.is_file():
            raise ConfigurationError(f'{code} does not exist; Triton would wait for it forever (backend "python")')
    if config.backend == "hotrow" or (version_dir / SESSION_FILE).exists():
        read_spec(version_dir)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
