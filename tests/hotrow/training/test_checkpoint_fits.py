"""What `Checkpoint` refuses to restore: files that are damaged, and states of other models and optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from inference_session.errors import ConfigurationError, ModelFormatError  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


class _Network(nn.Module):
    """A table, a hash embedding and a network."""

    def __init__(self, *, hashed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(50, 4)
        self.users = training.HashEmbedding(4, training.Adam(0.1)) if hashed else None
        self.last = nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        vectors = self.items(ids)
        return self.last(vectors if self.users is None else vectors * self.users(ids))


def _adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.1)


def _job(make: Callable[[Any], Any] = _adam, **options: Any) -> tuple[Any, Any]:
    model = _Network(**options)
    return model, make(list(model.parameters()))


def _saved(place: Path) -> tuple[Any, Any]:
    """One step, saved as step 0: the checkpoint and the model."""
    model, optimizer = _job()
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    checkpoint = training.Checkpoint(model, optimizer, place)
    checkpoint.save(0)
    return checkpoint, model


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    """In each file that holds state; the file is named."""
    checkpoint, model = _saved(tmp_path)
    folder = tmp_path / "0"
    np.save(one_array := io.BytesIO(), np.zeros(3))
    for damaged in (b"PK damaged", one_array.getvalue()):
        (folder / "unconfirmed_0.npz").write_bytes(damaged)
        with pytest.raises(ModelFormatError, match=r"unconfirmed_0\.npz: damaged"):
            checkpoint.restore()
    (folder / "unconfirmed_0.npz").unlink()
    for name, value in (("__0_0.distcp", model.items.weight[3]), (".metadata", None)):
        content = (folder / name).read_bytes()
        place = len(content) // 2 if value is None else content.index(value.detach().numpy().tobytes()) + 5
        changed = bytearray(content)
        changed[place] ^= 1
        (folder / name).write_bytes(bytes(changed))
        with pytest.raises(ModelFormatError, match=rf"{name}: damaged"):
            checkpoint.restore()
        (folder / name).write_bytes(content)
    assert checkpoint.restore() == 1


def test_the_newest_checkpoint_is_not_passed_over_when_its_description_is_gone(tmp_path: Path) -> None:
    """Training would begin anew, or from an older state, without a word."""
    checkpoint, _ = _saved(tmp_path)
    checkpoint.save(1)
    (tmp_path / "1" / "checkpoint.json").unlink()

    with pytest.raises(ModelFormatError, match=r"/1: the newest checkpoint has no checkpoint\.json"):
        checkpoint.restore()

    assert checkpoint.restore(step=0) == 1


def _two(parameters: Any) -> Any:
    return [_adam(parameters[:1]), _adam(parameters[1:])]


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), {}, "was Adam, but is SGD now"),
        (_two, {}, "which this model and its optimizers lack"),
        (_adam, {"hashed": False}, r"holds 'rows\.users.*lack"),
    ],
    ids=["another optimizer", "two optimizers", "no hash embedding"],
)
def test_a_checkpoint_that_holds_more_than_fits_is_refused(
    tmp_path: Path, make: Callable[[Any], Any], options: dict[str, Any], text: str
) -> None:
    """Nothing that was trained is left out silently, and the model stays as it is."""
    _saved(tmp_path)
    model, optimizer = _job(make, **options)
    before = model.items.weight.detach().clone()

    with pytest.raises(ConfigurationError, match=text):
        training.Checkpoint(model, optimizer, tmp_path).restore()

    assert torch.equal(model.items.weight, before)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """When the checkpoint is made, before anything was trained in vain."""
    model, optimizer = _job()
    _, of_another = _job()
    for arguments, text in (
        ((None, optimizer, tmp_path), "model is a NoneType"),
        ((model, None, tmp_path), "optimizer.0 is a NoneType"),
        ((model, of_another, tmp_path), r"trains a parameter of shape \[50, 4\] that is not one of the model's"),
        ((model, optimizer, None), "place is None"),
        ((model, optimizer, ""), "place is ''"),
        ((model, optimizer, "s3://bucket/place"), "s3"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            training.Checkpoint(*arguments)
