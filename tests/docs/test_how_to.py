"""The how-to guides, run as they are written. Each test makes what its page assumes: a model, a store, a server.

Two pages need PyTorch: tests/hotrow/training/test_how_to.py runs these. What is in `not_run` is still read by
tests/docs/test_names.py, which knows each command, option, setting and name.
"""

from __future__ import annotations

import getpass
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from inference_session.errors import ConfigurationError
from tests.testing.broker import Broker
from tests.testing.certificates import new_authority
from tests.testing.hugectr_models import write_wide_and_deep
from tests.testing.manual import ROOT, blocks
from tests.testing.manual_models import inputs, write_onnx, write_versions
from tests.testing.servers import RedisServer
from tests.testing.walkthrough import Walkthrough
from triton_backend.launcher.front import find_nginx

if TYPE_CHECKING:
    from tests.testing.hadoop import Hdfs

HOW_TO = ROOT / "docs/how-to"
ELSEWHERE = {"export-to-onnx", "move-a-hugectr-script", "train-and-serve"}
"""Run where PyTorch is installed."""


def test_every_page_is_run() -> None:
    """Each page with a block of shell or Python has a test that is named after the page."""
    pages = {page.stem for page in HOW_TO.glob("*.md") if {"sh", "python"} & {block.language for block in blocks(page)}}
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert pages - ELSEWHERE <= tests


@pytest.mark.triton
def test_beside_other_models(tritonserver: None, tmp_path: Path) -> None:
    """A model in Python asks one of ours; the backend is copied into a server's folder."""
    write_onnx(tmp_path / "ctr.onnx")
    (tmp_path / "server/backends").mkdir(parents=True)
    page = Walkthrough(HOW_TO / "beside-other-models.md", tmp_path, {"/opt/tritonserver": f"{tmp_path}/server"})
    page.run()
    assert (tmp_path / "server/backends/hotrow/model.py").exists()
    (scores,) = json.loads(page.outputs[-1].splitlines()[-1])["outputs"]
    assert (scores["name"], scores["shape"]) == ("scores", [3])


def test_deploy(tmp_path: Path) -> None:
    """Containers and clusters are not for tests: the page's blocks are read only."""
    page = Walkthrough(HOW_TO / "deploy.md", tmp_path, not_run=["docker build", "kubectl apply"])
    page.run()
    assert (ROOT / "deploy/kubernetes/kustomization.yaml").exists()


def test_migrate_from_hugectr(tmp_path: Path) -> None:
    """A model as HugeCTR has saved it is imported."""
    write_wide_and_deep(tmp_path / "models")
    Walkthrough(HOW_TO / "migrate-from-hugectr.md", tmp_path, {"/models/": f"{tmp_path}/models/"}).run()
    assert list(tmp_path.glob("model_repository/*/1/session.json"))


@pytest.mark.triton
def test_publish_versions(tritonserver: None, tmp_path: Path) -> None:
    """Of four versions the last is published, loaded, rolled back, and compared; its answers become canary requests."""
    write_versions(tmp_path / "model_repository", num_versions=3)
    write_versions(tmp_path / "trained", num_versions=1)
    request = inputs()
    tensors = [
        {"name": name, "datatype": "INT64", "shape": array.shape, "data": array.tolist()}
        for name, array in request.items()
    ]
    (tmp_path / "sample.jsonl").write_text(json.dumps({"inputs": tensors}) + "\n", encoding="utf-8")
    np.savez(tmp_path / "requests.npz", **request)
    (tmp_path / "canary").mkdir()
    places = {"/training/out": f"{tmp_path}/trained/ctr/1", "/srv/canary": f"{tmp_path}/canary"}
    page = Walkthrough(HOW_TO / "publish-versions.md", tmp_path, places)
    page.serve("model_repository")
    page.run()
    assert (tmp_path / "canary/ctr.npz").exists()


def test_rank_candidates(tmp_path: Path) -> None:
    """The ranker of the tutorial is imported with a context, as the page shows, and ranks."""
    (tmp_path / "client_examples").symlink_to(ROOT / "client_examples")
    maker = next(
        block for block in blocks(ROOT / "docs/tutorials/rank-candidates.md") if block.title == "make_ranker.py"
    )
    page = Walkthrough(
        HOW_TO / "rank-candidates.md",
        tmp_path,
        prelude={"": "from inference_session import InferenceSession\nclicks, items = [[1] * 50], [5, 6, 7]\n"},
        not_run=["perf_analyzer "],
    )
    subprocess.run([sys.executable, "-c", maker.text], cwd=tmp_path, check=True)
    page.run()


@pytest.mark.triton
def test_run_a_server(tritonserver: None, tmp_path: Path) -> None:
    """It serves without and with TLS, and its machine is checked."""
    write_versions(tmp_path / "model_repository")
    (tmp_path / "models").symlink_to("model_repository")
    authority = new_authority(tmp_path / "authority")
    for name, host in {"tls": "localhost", "me": "client"}.items():
        issued = authority.issue(host)
        (tmp_path / f"{name}.crt").symlink_to(issued.file)
        (tmp_path / f"{name}.key").symlink_to(issued.key)
    for name in ("ca.crt", "clients.crt"):
        (tmp_path / name).symlink_to(authority.file)
    Walkthrough(HOW_TO / "run-a-server.md", tmp_path, {"ctr.example.org": "localhost"}).run()


@pytest.mark.triton
def test_secure(tritonserver: None, tmp_path: Path) -> None:
    """It serves behind nginx, with a key."""
    try:
        find_nginx()
    except ConfigurationError as error:
        pytest.skip(str(error))
    write_versions(tmp_path / "models")
    (tmp_path / "hotrow.key").write_text("a-key\n", encoding="utf-8")
    Walkthrough(HOW_TO / "secure.md", tmp_path).run()


def test_several_gpus(tmp_path: Path) -> None:
    """The content of each GPU is computed without a GPU."""
    write_versions(tmp_path / "model_repository")
    page = Walkthrough(HOW_TO / "several-gpus.md", tmp_path)
    page.run()
    assert "A copy on each device" in page.outputs[0]


@pytest.mark.triton
def test_size(tritonserver: None, tmp_path: Path) -> None:
    """Traces are read, curves are drawn, and a version with smaller tables is written and loaded."""
    write_versions(tmp_path / "model_repository")
    request = inputs(512)
    np.save(tmp_path / "users.npy", request["user_id"].ravel())
    with gzip.open(tmp_path / "items.txt.gz", "wt") as file:
        file.write("\n".join(map(str, request["item_id"].ravel())))
    np.savez(tmp_path / "test.npz", **request)
    np.savez(tmp_path / "test_labels.npz", click=np.arange(512) % 2)
    page = Walkthrough(HOW_TO / "size.md", tmp_path)
    page.serve("model_repository")
    page.run()
    assert (tmp_path / "curves.html").exists()
    assert (tmp_path / "model_repository/ctr/2").exists()


def test_update_rows(broker: Broker, tmp_path: Path) -> None:
    """Rows reach a real broker, from Python and from the command line."""
    write_versions(tmp_path / "model_repository", num_versions=2)
    prelude = "import numpy as np\nkeys, vectors, keys_that_are_gone = np.array([1, 2]), np.ones((2, 16), 'f4'), [3]\n"
    Walkthrough(
        HOW_TO / "update-rows.md",
        tmp_path,
        {"kafka://broker:9092": broker.url},
        prelude={"": prelude},
        not_run=["20000 ratings"],
    ).run()
    assert len(broker.messages("hps_et.ctr.user")) > 3


def test_use_hdfs(hdfs: Hdfs, broker: Broker, tmp_path: Path) -> None:
    """Rows are dumped to a real HDFS, those of a stream too."""
    write_versions(tmp_path / "model_repository")
    (tmp_path / "model_repository/ctr/1").rename(tmp_path / "model_repository/ctr/8")
    Walkthrough(
        HOW_TO / "use-hdfs.md",
        tmp_path,
        {"hdfs://nn/dumps": f"{hdfs.url}/how-to-use-hdfs", "kafka://broker:9092": broker.url},
        environment={"HADOOP_USER_NAME": getpass.getuser()},
    ).run()


def test_use_stores(redis: RedisServer, tmp_path: Path) -> None:
    """A Redis is filled and read, and its rows change while they are served."""
    write_versions(tmp_path / "model_repository")
    prelude = (
        "import numpy as np\nfrom inference_session import InferenceSession\n"
        "session = InferenceSession.open('model_repository/ctr/1', volatile_store='redis://127.0.0.1:6379/0')\n"
        "keys, vectors = np.array([1, 2]), np.ones((2, 16), 'f4')\n"
    )
    places = {"redis://127.0.0.1:6379/0": redis.url}
    Walkthrough(HOW_TO / "use-stores.md", tmp_path, places, prelude={"": prelude}).run()


@pytest.mark.triton
def test_watch(tritonserver: None, tmp_path: Path) -> None:
    """A server is watched once, and serves with traces switched on."""
    write_versions(tmp_path / "model_repository")
    places = {"hotrow top ": "hotrow top --once ", "http://collector:4318": "http://127.0.0.1:4318"}
    page = Walkthrough(HOW_TO / "watch.md", tmp_path, places)
    page.serve("model_repository")
    page.run()
    assert "ctr" in page.outputs[0]
