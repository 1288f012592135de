"""The how-to guides that need PyTorch, run as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.testing.broker import Broker
from tests.testing.manual import ROOT, blocks
from tests.testing.walkthrough import Walkthrough

pytest.importorskip("torch")
pytestmark = pytest.mark.training

HOW_TO = ROOT / "docs/how-to"
ENVIRONMENT = {"KERAS_BACKEND": "torch"}
TRAINER = """
import numpy as np, torch
from torch import nn
from hotrow import training
from tests.testing.training_models import Clicks, bag_collection, batch as draw
model, batch, version = Clicks(bag_collection(), 16), draw(0), 1
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def steps():
    for seed in range(3):
        model(*draw(seed)).sum().backward()
        yield seed
loader = steps()
"""
KERAS = """
import keras
ids = keras.Input((3,), dtype="int32", name="item")
pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(200, 8, name="items")(ids))
model = keras.Model(ids, keras.layers.Dense(1, name="click")(pooled))
model.compile("sgd", "mse")
class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return np.full((4, 3), i, np.int32), np.ones((4, 1), np.float32)
data = Data()
"""
PROGRAM = """
import torch
from hotrow import training
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(2000, 8)
    def forward(self, user):
        return {"click": torch.sigmoid(self.users(user).sum(-1, keepdim=True))}
model = Model().eval()
example = (torch.tensor([1, 2, 3]),)
program = torch.export.export(model, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
torch.export.save(program, "ctr.pt2")
training.Checkpoint(model, torch.optim.SGD(model.parameters(), 0.1), "programs").save(10000)
"""
NETWORK = """
import hugectr
from pathlib import Path
from tests.testing.hugectr_training_samples import SAMPLES, make_data, make_model
folder = Path("wdl")
folder.mkdir(exist_ok=True)
make_data(SAMPLES["wdl"], folder)
model = make_model(SAMPLES["wdl"], folder)
"""


def test_train_and_serve(broker: Broker, tmp_path: Path) -> None:
    """A TorchRec model and a Keras model are exported, followed and saved; files of training are imported."""
    places = {"kafka://broker:9092": broker.url, "hdfs://namenode:9870/ckpt": f"{tmp_path}/checkpoints"}
    places["hdfs://namenode/ckpt/ctr/"] = f"{tmp_path}/programs/"
    page = Walkthrough(
        HOW_TO / "train-and-serve.md",
        tmp_path,
        places,
        ENVIRONMENT,
        prelude={"": TRAINER, "KerasCallback": KERAS},
    )
    page.run_python(PROGRAM)
    _write_dump(tmp_path / "dump")
    page.run()
    assert sorted(path.name for path in (tmp_path / "checkpoints/ctr").iterdir())


def _write_dump(folder: Path) -> None:
    """The rows of one table, as DynamicEmb dumps those of one rank."""
    folder.mkdir()
    np.arange(5, dtype=np.int64).tofile(folder / "items_emb_keys.rank_0.world_size_1")
    np.ones((5, 4), np.float32).tofile(folder / "items_emb_values.rank_0.world_size_1")


@pytest.mark.triton
def test_move_a_hugectr_script(tritonserver: None, tmp_path: Path) -> None:
    """A script that imports hugectr runs unchanged, in fewer steps than written, and what it saved is served.

    So does a JSON configuration.
    """
    from tests.testing.hugectr_configurations import dcn_configuration
    from tests.testing.hugectr_training_samples import SAMPLES, make_data

    make_data(SAMPLES["dcn"], tmp_path)
    (tmp_path / "dcn.json").write_text(json.dumps(dcn_configuration()), encoding="utf-8")
    page = Walkthrough(
        HOW_TO / "move-a-hugectr-script.md",
        tmp_path,
        {"max_iter=2300": "max_iter=23", "=1000": "=10", "display=200": "display=5", "_2000.": "_20."},
        ENVIRONMENT,
        prelude={"": NETWORK.replace("import hugectr", "from hotrow.training import hugectr")},
        not_run=["from inference_session.update_stream import Publisher"],  # test_training_cache.py does
    )
    training, _ = (block.text for block in blocks(page.page) if block.language == "python")
    (tmp_path / "train.py").write_text(NETWORK + page.placed(training), encoding="utf-8")
    (ps_json,) = (block.text for block in blocks(page.page) if block.language == "json")
    (tmp_path / "ps.json").write_text(page.placed(ps_json), encoding="utf-8")
    page.run()
    assert "model    wdl (version 1)" in page.outputs[-1]
    for name in (
        "wdl_dense_10.model",
        "wdl_dense_20.model",
        "wdl0_sparse_10.model/emb_vector",
        "wdl_opt_dense_10.model",
        "wdl.json",
    ):
        assert (tmp_path / name).exists(), name
