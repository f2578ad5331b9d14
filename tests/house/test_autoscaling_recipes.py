"""The recipes for autoscalers agree with the upstream documentation in their fields, and with the program in flags and probes."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from server.http.observability.metrics import Metrics
from server.http.observability.ops import ops_routes
from server.options.table import Options
from tests.house.test_recipes import ROOT, options_of
from tests.support.service.recipes import LEADER_WORKER_SET, RECIPES, load

AUTOSCALING = RECIPES / "kubernetes" / "autoscaling"
KSERVE = RECIPES / "kserve" / "inferenceservice.yaml"
RAY_APP = RECIPES / "ray" / "wideep_app.py"

# Fields that the documentation of each project names. A field maps to those below it; None ends a branch that is checked
# elsewhere or has free names. A list has the same fields in each element.
PACE = {"policies": {"type": None, "value": None, "periodSeconds": None}, "stabilizationWindowSeconds": None}
BEHAVIOR = {"scaleUp": PACE, "scaleDown": PACE}
TARGET = {"apiVersion": None, "kind": None, "name": None}
HEAD = {"apiVersion": None, "kind": None, "metadata": {"name": None, "annotations": None, "labels": None}}
FIELDS: Mapping[Path, Mapping[str, Any]] = {
    # keda.sh/docs/2.22/reference/scaledobject-spec and .../scalers/prometheus
    AUTOSCALING / "scaledobject.yaml": HEAD | {
        "spec": {
            "scaleTargetRef": TARGET | {"envSourceContainerName": None},
            "pollingInterval": None, "cooldownPeriod": None, "minReplicaCount": None, "maxReplicaCount": None,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOR}},
            "triggers": {
                "type": None, "metricType": None, "name": None,
                "metadata": dict.fromkeys(("serverAddress", "query", "threshold", "activationThreshold", "authModes")),
            },
        }
    },
    # kubernetes.io/docs/reference/kubernetes-api/workload-resources/horizontal-pod-autoscaler-v2
    AUTOSCALING / "hpa.yaml": HEAD | {
        "spec": {
            "scaleTargetRef": TARGET, "minReplicas": None, "maxReplicas": None, "behavior": BEHAVIOR,
            "metrics": {
                "type": None,
                "external": {"metric": {"name": None, "selector": None}, "target": {"type": None, "value": None, "averageValue": None}},
            },
        }
    },
    # github.com/kubernetes-sigs/prometheus-adapter/blob/master/docs/config.md, below the chart's rules.external
    AUTOSCALING / "adapter-values.yaml": {
        "rules": {
            "external": {
                "seriesQuery": None, "seriesFilters": None, "metricsQuery": None, "name": {"matches": None, "as": None},
                "resources": {"overrides": None, "template": None},
            }
        }
    },
    # kserve.github.io: model-serving/generative-inference/autoscaling, and a predictor with a custom container (a pod's fields)
    KSERVE: HEAD | {
        "spec": {
            "predictor": {
                "minReplicas": None, "maxReplicas": None,
                "autoScaling": {
                    "metrics": {
                        "type": None,
                        "external": {
                            "metric": {"backend": None, "serverAddress": None, "query": None},
                            "target": {"type": None, "value": None, "averageValue": None},
                        },
                    }
                },
                **dict.fromkeys(("terminationGracePeriodSeconds", "securityContext", "volumes", "containers")),
            }
        }
    },
}  # fmt: skip
# docs.ray.io: serve/api/doc/ray.serve.deployment_decorator and ray.serve.config.AutoscalingConfig
RAY_OPTIONS = {
    *("max_ongoing_requests", "ray_actor_options", "autoscaling_config", "graceful_shutdown_timeout_s"),
    *("health_check_period_s", "health_check_timeout_s", "num_replicas", "name", "max_queued_requests"),
}
RAY_ACTOR = {
    "accelerator_type",
    "memory",
    "num_cpus",
    "num_gpus",
    "object_store_memory",
    "resources",
    "runtime_env",
}
RAY_AUTOSCALING = {
    *("min_replicas", "max_replicas", "initial_replicas", "target_ongoing_requests", "metrics_interval_s"),
    *("look_back_period_s", "upscaling_factor", "downscaling_factor", "upscale_delay_s", "downscale_delay_s"),
}


def unknown_fields(value: Any, fields: Mapping[str, Any] | None, where: str = "") -> Iterator[str]:
    """Yield the fields of a document that are not among the known ones."""
    if fields is None:
        return
    if isinstance(value, list):
        for each in value:
            yield from unknown_fields(each, fields, where)
        return
    assert isinstance(value, dict), f"{where} must be an object"
    for name, below in value.items():
        if name not in fields:
            yield f"{where}.{name}"
        else:
            yield from unknown_fields(below, fields[name], f"{where}.{name}")


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: path.name)
def test_every_field_is_one_of_the_upstream_documentation(path: Path) -> None:
    document = load(path)
    assert list(unknown_fields(document, FIELDS[path])) == []
    document["spek"] = 1
    assert list(unknown_fields(document, FIELDS[path])) == [".spek"]


def test_every_file_is_checked() -> None:
    assert {*AUTOSCALING.iterdir(), KSERVE} == FIELDS.keys()


def test_what_is_scaled_is_the_leader_worker_set_of_the_recipe() -> None:
    scaled = load(LEADER_WORKER_SET)
    expected = {
        "apiVersion": scaled["apiVersion"],
        "kind": scaled["kind"],
        "name": scaled["metadata"]["name"],
    }
    keda, hpa = (load(AUTOSCALING / f"{name}.yaml")["spec"] for name in ("scaledobject", "hpa"))
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"] == expected
    assert 1 <= keda["minReplicaCount"] <= keda["maxReplicaCount"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]


def test_the_names_of_the_hpa_are_those_of_the_adapter() -> None:
    named = {each["external"]["metric"]["name"] for each in load(AUTOSCALING / "hpa.yaml")["spec"]["metrics"]}
    rules = load(AUTOSCALING / "adapter-values.yaml")["rules"]["external"]
    assert named == {rule["name"]["as"] for rule in rules}


def test_both_autoscalers_have_the_same_thresholds() -> None:
    triggers = load(AUTOSCALING / "scaledobject.yaml")["spec"]["triggers"]
    keda = {trigger["metadata"]["threshold"]: trigger["metricType"] for trigger in triggers}
    targets = [each["external"]["target"] for each in load(AUTOSCALING / "hpa.yaml")["spec"]["metrics"]]
    quantities = {"700m": "0.7"}
    hpa = {target.get("value", target.get("averageValue")): target["type"] for target in targets}
    assert {quantities.get(value, value): kind for value, kind in hpa.items()} == keda


def test_the_inference_service_starts_what_wideep_takes() -> None:
    predictor = load(KSERVE)["spec"]["predictor"]
    (container,) = predictor["containers"]
    options = options_of(["wideep", *container["args"]])
    assert (options.host, options.port, options.served_model_names) == (
        "0.0.0.0",
        Options().port,
        ("wideep-kserve",),
    )
    assert container["name"] == "kserve-container", "KServe looks for this name"
    (port,) = container["ports"]
    annotations = load(KSERVE)["metadata"]["annotations"]
    assert port["containerPort"] == options.port == int(annotations["prometheus.io/port"])
    paths = {route.path for route in ops_routes("0", Metrics("m", 1), lambda: None).routes}  # type: ignore[attr-defined]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["path"] in paths and probe["port"] == options.port for probe in probes)
    assert annotations["prometheus.io/path"] in paths
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    needed_s = int(pause) + Options().http.shutdown_timeout_s
    assert predictor["terminationGracePeriodSeconds"] > needed_s
    (metric,) = predictor["autoScaling"]["metrics"]
    assert 'model_name="wideep-kserve"' in metric["external"]["metric"]["query"]


class PlayedServe(ModuleType):
    """Ray Serve's decorators, which record the options."""

    def __init__(self) -> None:
        super().__init__("serve")
        self.options: dict[str, Any] = {}

    def deployment(self, **options: Any) -> Callable[[type], type]:
        """Record the options of a deployment, and add `bind` to its class."""
        self.options = options

        def decorated(kind: type) -> type:
            kind.bind = classmethod(lambda cls: cls)  # type: ignore[attr-defined]
            return kind

        return decorated

    @staticmethod
    def ingress(_routes: Any) -> Callable[[type], type]:
        """Return the class as it is."""
        return lambda kind: kind


def read_app(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, PlayedServe]:
    """Import the app with a replacement for Ray."""
    ray, played = ModuleType("ray"), PlayedServe()
    ray.serve = played  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    spec = importlib.util.spec_from_file_location("wideep_app", RAY_APP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, played


def test_the_ray_app_has_options_of_ray_and_starts_what_wideep_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))
    monkeypatch.setenv("FLAGS", "-dp 2 --served-model-name mine")
    app, played = read_app(monkeypatch)
    assert played.options.keys() <= RAY_OPTIONS
    assert played.options["ray_actor_options"].keys() <= RAY_ACTOR
    assert played.options["autoscaling_config"].keys() <= RAY_AUTOSCALING
    options = options_of(app.command("/tmp/wideep-1/http"))
    assert (options.uds, options.served_model_names) == ("/tmp/wideep-1/http", ("mine",))
    assert (
        options.http.shutdown_timeout_s
        == app.DRAIN_S
        < app.KILL_S
        < played.options["graceful_shutdown_timeout_s"]
    )
    assert RAY_APP.is_relative_to(ROOT)
