"""`hotrow import torch`: exported programs, with their tables inside or in a distributed checkpoint."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402
from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.command_line import cli  # noqa: E402
from hotrow.training.onnx_export.program import import_program  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError  # noqa: E402
from tests.testing import training_models as models  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

RANDOM = np.random.default_rng(0)


class _Network(nn.Module):
    """Two tables, one of them pooled, a row that is always read, and a matrix that is as large as a table."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(2000, 8)
        self.words = nn.EmbeddingBag(1500, 8, mode="mean")
        self.wide, self.last = nn.Linear(8, 500), nn.Linear(500, 1)

    def forward(self, user: Any, words: Any) -> dict[str, Any]:
        always = self.users(torch.tensor([3]))
        return {"click": torch.sigmoid(self.last(self.wide(self.users(user) + self.words(words) + always)))}


def _program(network: nn.Module, path: Path) -> Path:
    batch = torch.export.Dim("batch")
    example = (torch.tensor([1, 2, 3]), torch.zeros(3, 4, dtype=torch.int64))
    program = torch.export.export(network.eval(), example, dynamic_shapes=({0: batch}, {0: batch}))
    torch.export.save(program, path)
    return path


def _check(directory: Path, network: Any) -> None:
    sent = {"user": RANDOM.integers(0, 2000, 5), "words": RANDOM.integers(0, 1500, (5, 4))}
    (found,) = models.answers(directory, sent)
    with torch.no_grad():
        expected = network.eval()(*(torch.from_numpy(array) for array in sent.values()))["click"].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with InferenceSession.open(directory, device="cpu") as session:
        for table in session.spec.tables:
            weight = getattr(network, table.name).weight.detach().numpy()
            assert np.array_equal(session.lookup(table.name, np.arange(len(weight))), weight)
        assert {table.name for table in session.spec.tables} == {"users", "words"}


def test_a_program_with_its_tables_inside(tmp_path: Path) -> None:
    """By the command; inputs and outputs keep their names."""
    torch.manual_seed(0)
    network = _Network()
    arguments = [str(_program(network, tmp_path / "ctr.pt2")), "--name", "ctr", "--repository", str(tmp_path)]

    result = CliRunner().invoke(cli, ["import", "torch", *arguments], catch_exceptions=False)

    assert result.exit_code == 0
    _check(tmp_path / "ctr" / "1", network)
    assert (tmp_path / "ctr" / "config.pbtxt").exists()


@pytest.mark.parametrize("kind", [models.MaskedMean, models.BranchedMean])
def test_numbers_that_are_nearly_0_or_1_are_kept(kind: type[models.MaskedMean], tmp_path: Path) -> None:
    """PyTorch's optimizer takes them for 0 and 1: the mean of an empty history was NaN."""
    model, histories = kind().eval(), torch.from_numpy(models.HISTORIES)
    program = torch.export.export(model, (histories,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "mean.pt2")

    report = import_program(tmp_path / "mean.pt2", tmp_path / "repository", "mean")

    (found,) = models.answers(report.version_dir, {"history": models.HISTORIES}, ["output_0"])
    np.testing.assert_allclose(found, models.live(model, histories), rtol=1e-6)


class _Scores(nn.Module):
    """Its parameters are called as the columns of a table of data often are."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(9, 2)

    def forward(self, C1: Any, I1: Any, c1: Any, features: Any = None) -> Any:  # noqa: N803
        scale = I1 if features is None else features["I2"]
        return {"click": (self.items(C1) * scale.unsqueeze(1) - self.items(c1)).sum(1)}


@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_have_the_names_of_the_parameters(by_name: bool, tmp_path: Path) -> None:
    """In their own case, which torch does not keep in its programs."""
    given = {"C1": torch.tensor([1, 2]), "I1": torch.tensor([0.5, 3.0]), "c1": torch.tensor([3, 0])}
    network = _Scores().eval()
    example: tuple[Any, Any] = ((), given) if by_name else (tuple(given.values()), {})
    torch.export.save(torch.export.export(network, *example), tmp_path / "ctr.pt2")

    report = import_program(tmp_path / "ctr.pt2", tmp_path, "ctr")

    assert [tensor.name for tensor in report.spec.inputs] == ["C1", "I1", "c1"]
    (found,) = models.answers(report.version_dir, {name: tensor.numpy() for name, tensor in given.items()})
    np.testing.assert_allclose(found, network(**given)["click"].detach().numpy(), atol=1e-6)


def test_inputs_of_a_dict_keep_the_names_of_the_program(tmp_path: Path) -> None:
    """One parameter is several inputs, or none."""
    given = (torch.tensor([1, 2]), torch.tensor([0.5, 3.0]), torch.tensor([3, 0]), {"I2": torch.tensor([1.0, 2.0])})
    torch.export.save(torch.export.export(_Scores().eval(), given), tmp_path / "ctr.pt2")

    report = import_program(tmp_path / "ctr.pt2", tmp_path, "ctr")

    assert {"c1", "features_i2"} <= {tensor.name for tensor in report.spec.inputs}


def test_a_fixed_number_of_samples_is_reported(tmp_path: Path) -> None:
    """Such a program answers requests of that number only, one by one."""
    given = {"C1": torch.tensor([1, 2]), "I1": torch.tensor([0.5, 3.0]), "c1": torch.tensor([3, 0])}
    torch.export.save(torch.export.export(_Scores().eval(), (), given), tmp_path / "ctr.pt2")

    report = import_program(tmp_path / "ctr.pt2", tmp_path, "ctr")

    assert "Note: the first dimension of 'C1', 'I1', 'c1' has a fixed size; requests are served one by" in str(report)


def test_weights_of_a_checkpoint_take_the_place_of_the_programs_own(tmp_path: Path) -> None:
    """One of ours, and one that torch alone wrote."""
    path = _program(_Network(), tmp_path / "ctr.pt2")
    torch.manual_seed(7)
    trained = _Network()
    training.Checkpoint(trained, torch.optim.SGD(trained.parameters(), lr=0.1), tmp_path / "ours").save(4)
    torch.distributed.checkpoint.save({"model": trained.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)

    for number, place in enumerate((tmp_path / "ours" / "4", tmp_path / "theirs"), start=1):
        import_program(path, tmp_path / "repository", "ctr", checkpoint=place)
        _check(tmp_path / "repository" / "ctr" / str(number), trained)


def test_a_table_that_a_checkpoint_lacks_comes_from_the_program_and_is_named(tmp_path: Path) -> None:
    network = _Network()
    path = _program(network, tmp_path / "ctr.pt2")
    trained = _Network()
    weights = {name: value for name, value in trained.state_dict().items() if name != "words.weight"}
    torch.distributed.checkpoint.save(weights, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    report = import_program(path, tmp_path, "ctr", checkpoint=tmp_path / "checkpoint")

    assert "Note: not in the checkpoint, so taken from the program: 'words.weight'" in str(report)
    trained.words = network.words
    _check(tmp_path / "ctr" / "1", trained)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Named, and nothing appears."""
    path = _program(_Network(), tmp_path / "ctr.pt2")
    other = nn.Linear(3, 1)
    training.Checkpoint(other, torch.optim.SGD(other.parameters(), lr=0.1), tmp_path / "other").save(0)
    with pytest.raises(ConfigurationError, match="none of the program's weights"):
        import_program(path, tmp_path / "repository", "ctr", checkpoint=tmp_path / "other" / "0")
    with pytest.raises(ModelFormatError, match=r"other: no \.metadata in it; give the folder of one checkpoint"):
        import_program(path, tmp_path / "repository", "ctr", checkpoint=tmp_path / "other")
    with pytest.raises(ModelFormatError, match="absent: no such folder"):
        import_program(path, tmp_path / "repository", "ctr", checkpoint=tmp_path / "absent")
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelFormatError, match="broken"):
        import_program(broken, tmp_path / "repository", "ctr")
    program = torch.export.export(other, (torch.zeros(2, 3),))
    torch.export.save(program, tmp_path / "dense.pt2")
    with pytest.raises(UnsupportedModelError, match="looks up no float32 or float16 table"):
        import_program(tmp_path / "dense.pt2", tmp_path / "repository", "ctr")
    assert not list(tmp_path.glob("repository/**/session.json"))


def _changed(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy of an archive; `change` gets each member's name and content, and leaves it out by None."""
    target = path.with_name(f"changed-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                copy.writestr(name, content)
    return target


def test_weights_alone_are_no_program(tmp_path: Path) -> None:
    """As torch.save writes them; the error says what the archive lacks."""
    torch.save(_Network().state_dict(), tmp_path / "last.pt")
    with pytest.raises(ModelFormatError, match=r"last\.pt: not a program .*no entry data/w.*is a pickle"):
        import_program(tmp_path / "last.pt", tmp_path / "repository", "ctr")


def test_a_program_whose_weights_are_damaged_is_refused(tmp_path: Path) -> None:
    """A weight that is missing, cut, or changed."""
    path = _program(_Network(), tmp_path / "ctr.pt2")
    with zipfile.ZipFile(path) as archive:
        weights = [name for name in archive.namelist() if "/weights/" in name and not name.endswith(".json")]
        payload = archive.read(max(weights, key=lambda name: archive.getinfo(name).file_size))
    repository = tmp_path / "repository"
    for weight in weights:
        for change in (lambda content: None, lambda content: content[: len(content) // 2]):
            changed = _changed(path, lambda name, content: change(content) if name == weight else content)  # noqa: B023
            with pytest.raises(ModelFormatError, match="changed-ctr"):
                import_program(changed, repository, "ctr")
    content = bytearray(path.read_bytes())
    content[content.index(payload[:64]) + 9] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ModelFormatError, match=r"ctr\.pt2: damaged"):
        import_program(path, repository, "ctr")
    assert not list(repository.glob("**/session.json"))


def test_a_checkpoint_whose_parts_are_damaged_is_refused(tmp_path: Path) -> None:
    """A value that changed, and a part that its metadata do not list."""
    path = _program(_Network(), tmp_path / "ctr.pt2")
    trained = _Network()
    place, repository = tmp_path / "checkpoint", tmp_path / "repository"
    torch.distributed.checkpoint.save(trained.state_dict(), checkpoint_id=place, no_dist=True)
    (file,) = place.glob("*.distcp")
    content = file.read_bytes()
    changed = bytearray(content)
    changed[content.index(trained.users.weight[0].detach().numpy().tobytes()) + 2] ^= 1
    file.write_bytes(bytes(changed))
    with pytest.raises(ModelFormatError, match=r"distcp: damaged"):
        import_program(path, repository, "ctr", checkpoint=place)
    file.write_bytes(content)

    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301  written above
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "users.weight"}
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelFormatError, match=r"'users\.weight' has 16000 elements, of which 0 are there"):
        import_program(path, repository, "ctr", checkpoint=place)
    assert not list(repository.glob("**/session.json"))


def test_nothing_of_a_program_is_unpickled(tmp_path: Path) -> None:
    """Its samples are left out; a weight that says it is pickled is refused."""
    path = _program(_Network(), tmp_path / "ctr.pt2")

    def pickled(name: str, content: bytes) -> bytes:
        is_config = "weights_config" in name
        return content.replace(b'"use_pickle": false', b'"use_pickle": true', 1) if is_config else content

    changed = _changed(path, pickled)

    with pytest.raises(ModelFormatError, match="is pickled, and pickled data is never read"):
        import_program(changed, tmp_path / "repository", "ctr")
