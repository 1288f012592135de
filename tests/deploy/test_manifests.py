"""The files of deploy/ are valid by the published API schemas, and fit together as Kubernetes and Compose read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "deploy/kubernetes", ROOT / "deploy/kserve")
# Kinds that others define: their schemas are in no package.
DEFINED_ELSEWHERE = {"Kustomization", "PodMonitor", "ClusterServingRuntime", "InferenceService"}
LABELS = {"app.kubernetes.io/name": "hotrow"}


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every Kubernetes object under deploy/, with its file's name."""
    found = [
        (path.name, document)
        for folder in FOLDERS
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    return [(name, document) for name, document in found if "kind" in document]


def manifest(kind: str) -> dict[str, Any]:
    """The only object of that kind."""
    (found,) = [document for _, document in manifests() if document["kind"] == kind]
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "document"), manifests(), ids=lambda value: value if isinstance(value, str) else "")
def test_an_object_is_valid_by_its_schema(name: str, document: dict[str, Any]) -> None:
    """Strictly: a misspelt field is an error, as in `kubectl apply --validate=strict`."""
    import kubernetes_validate

    if document["kind"] not in DEFINED_ELSEWHERE:
        kubernetes_validate.validate(document, "1.31", strict=True)
    assert re.fullmatch(r"[a-z0-9.-]+", document.get("metadata", {"name": "hotrow"})["name"])


def test_every_selector_finds_the_pods() -> None:
    """Service, policies, monitor and deployment select the labels that the pods bear, with or without kustomize."""
    pod = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pod.items() >= LABELS.items()
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == LABELS
    assert manifest("Service")["spec"]["selector"] == LABELS
    assert manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == LABELS
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert manifest(kind)["spec"]["selector"]["matchLabels"] == LABELS


def test_kustomize_lists_every_object() -> None:
    """No object is missing from the list, and every listed file exists."""
    listed = set(manifest("Kustomization")["resources"])
    there = {path.name for path in FOLDERS[0].glob("*.yaml")}
    assert listed == there - {"kustomization.yaml", "adapter.yaml"}


def test_probes_survive_a_version_swap() -> None:
    """They ask the model, never a server-wide readiness, and leave the watch-dog a minute to recover the model."""
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert re.fullmatch(r"/v2/models/\w+/ready", container[probe]["httpGet"]["path"])
    live = container["livenessProbe"]
    assert live["exec"]["command"][:2] == ["hotrow", "health"]
    assert live["periodSeconds"] * live["failureThreshold"] >= 60
    assert live["timeoutSeconds"] > 10  # how long the command takes at most


def test_pods_have_shared_memory_and_time_to_stop() -> None:
    """Shared memory is a separate volume, and the grace period outlasts the wait and the stop."""
    spec = manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mounts["/dev/shm"]]  # noqa: S108
    assert volume["emptyDir"]["medium"] == "Memory"
    assert spec["terminationGracePeriodSeconds"] >= int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + 30


def test_the_autoscaler_asks_for_a_metric_that_the_adapter_makes() -> None:
    """Both name it alike, and its source is one of Triton's own."""
    (rule,) = yaml.safe_load((FOLDERS[0] / "adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    (metric,) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert "nv_inference_queue_duration_us" in rule["metricsQuery"]


def test_compose_names_what_is_there() -> None:
    """Folders that it mounts exist, ports are bound to this machine only, and the Dockerfile has the image's target."""
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert compose["services"]["hotrow"]["build"]["target"] in targets
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / "deploy" / source).exists()
