"""What is in deploy/: files that their readers accept, and batch scripts that say why a job cannot work."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import manifests
import pytest
import yaml

from springtide.cli.main import parser
from springtide.cli.options import config_of

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
SLURM = DEPLOY / "slurm"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def allocation() -> Iterator[ModuleType]:
    """deploy/slurm/allocation.py, as its batch scripts run it."""
    sys.path.insert(0, str(SLURM))
    spec = importlib.util.spec_from_file_location("allocation", SLURM / "allocation.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SLURM))


@pytest.mark.parametrize("name", ["aws", "aws-p5", "gcp", "gcp-a3", "azure"])
def test_ray_takes_the_cluster_file_of_a_cloud(name: str) -> None:
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    cluster = yaml.safe_load((DEPLOY / "cloud" / f"{name}.yaml").read_text())
    jsonschema.validate(cluster, schema)
    validate_config(prepare_config(cluster))  # with Ray's defaults


@pytest.mark.parametrize("name", ["aws", "aws-p5", "gcp", "gcp-a3", "azure"])
def test_a_cloud_cluster_has_a_stable_head_and_spot_workers(name: str) -> None:
    """A cluster of a cloud has a stable head and spot workers with their zones."""
    text = (DEPLOY / "cloud" / f"{name}.yaml").read_text()
    cluster = yaml.safe_load(text)
    types = dict(cluster["available_node_types"])
    head = types.pop(cluster["head_node_type"])
    assert head["labels"]["ray.io/market-type"] == "on-demand"
    assert not re.search("spot", json.dumps(head["node_config"]), re.IGNORECASE)
    eight = name in ("aws-p5", "gcp-a3")  # their network does not leave a zone
    assert len(types) >= 2 - eight
    for kind in types.values():
        assert kind["labels"]["ray.io/market-type"] == "spot"
        assert re.search(r'"(spot|SPOT|Spot)"', json.dumps(kind["node_config"])), "asks for spot capacity"
        assert kind["labels"]["ray.io/availability-zone"], "what its nodes fail together with"
    if name != "gcp" and not eight:  # Ray 2.60 starts all nodes of Google's in one zone
        assert len({kind["labels"]["ray.io/availability-zone"] for kind in types.values()}) == 2
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    assert f"dist/springtide-{VERSION}-py3-none-any.whl" in cluster["file_mounts"].values()
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1]
    for command in (*cluster["setup_commands"], *cluster["head_setup_commands"]):
        assert "://" not in command
        assert "pip install" not in command or "-c " in command


def test_a_node_of_eight_gpus_has_its_cloud_network_cards() -> None:
    """A node of eight GPUs has the network cards that its cloud gives it.

    AWS: an interface for the address and an EFA on the first of 32 cards, an EFA on each other one. Google: one and four."""
    nodes = {}
    for name in ("aws-p5", "gcp-a3"):
        cluster = yaml.safe_load((DEPLOY / "cloud" / f"{name}.yaml").read_text())
        nodes[name] = cluster["available_node_types"]["spot_h100"]
        assert nodes[name]["resources"]["GPU"] == 8
    cards = nodes["aws-p5"]["node_config"]["NetworkInterfaces"]
    places = [(card["NetworkCardIndex"], card["DeviceIndex"], card["InterfaceType"]) for card in cards]
    efa = [(0, 1, "efa-only"), *((number, 0, "efa-only") for number in range(1, 32))]
    assert places == [(0, 0, "interface"), *efa]
    assert all(card["SubnetId"] and card["Groups"] for card in cards), "Ray takes them from there"
    assert not nodes["aws-p5"]["node_config"].keys() & {"SubnetIds", "SecurityGroupIds"}, "Ray refuses both"
    cards = nodes["gcp-a3"]["node_config"]["networkInterfaces"]
    assert [card["nicType"] for card in cards] == ["GVNIC"] * 5
    assert len({card["subnetwork"] for card in cards}) == 5


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """The pod specs in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


def test_pods_have_few_rights_and_the_time_that_their_notice_takes() -> None:
    found = 0
    for path in KUBERNETES:
        for pod in (pod for one in yaml.safe_load_all(path.read_text()) for pod in pods(one)):
            found += 1
            assert pod["securityContext"]["runAsUser"] > 0
            for container in pod["containers"]:
                assert container["image"].endswith(f":{VERSION}")
                assert container["securityContext"]["runAsNonRoot"]
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
                for seconds in re.findall(r"(?:--in|sleep) (\d+)", " ".join(hook)):
                    assert int(seconds) < pod["terminationGracePeriodSeconds"], "the kubelet kills before the hook ends"
    assert found == 5
    for path in [*KUBERNETES, DEPLOY / "Dockerfile", DEPLOY / "skypilot.yaml"]:
        assert not re.search(r"springtide[-:](?!mine|identity|worker|head)\d", path.read_text().replace(VERSION, "")), (
            path
        )


def test_commands_of_manifests_are_ones_that_springtide_has() -> None:
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    found = [job["spec"]["entrypoint"], task["run"].split("~/venv/bin/")[1].replace("\\\n", " ")]
    for command in found:
        values = {"$SKYPILOT_NUM_GPUS_PER_NODE": "8", "$BUCKET": "s3://bucket", "$RUN": "mine"}
        words = [values.get(word, word.replace("$BUCKET", "s3://bucket")) for word in shlex.split(command)]
        options = parser(show_all=True).parse_args(words[1:])
        assert options.resume == "auto"
        assert config_of(options).run.id


@pytest.mark.full
@pytest.mark.skipif(
    not os.environ.get("SPRINGTIDE_CRDS"), reason="SPRINGTIDE_CRDS is no folder with KubeRay's and Kubeflow's CRDs"
)
def test_the_operators_take_their_manifests() -> None:
    known = manifests.schemas(sorted(Path(os.environ["SPRINGTIDE_CRDS"]).glob("*.yaml")))
    found = list(manifests.problems([path for path in KUBERNETES if path.name != "queue.yaml"], known))
    assert not found, "\n".join(found)


def test_a_duration_of_slurm_is_read(allocation: ModuleType) -> None:
    read = allocation.seconds
    assert [read(text) for text in ("0:30", "1:00:00", "2-00:00:01", "45")] == [30, 3600, 172801, 45]
    assert read("UNLIMITED") == read("INVALID") == read("") == float("inf")


def test_an_allocation_that_is_too_small_is_refused(allocation: ModuleType) -> None:
    nodes = [{"resources": {"CPU": 4.0}}, {"resources": {"CPU": 2.0, "GPU": 1.0}}]
    assert allocation.room(nodes, 1.0, 0.0) == 6
    assert allocation.room(nodes, 1.0, 1.0) == 1
    few = ["train", "--recipe", "tiny", "--elastic.min-workers", "7", "--elastic.max-workers", "8"]
    with pytest.raises(allocation.Refused, match=r"elastic\.min_workers = 7: 2 node.* 6 .*sbatch --nodes"):
        allocation.check_room(nodes, few)
    allocation.check_room(nodes, [*few[:4], "6", *few[5:]])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "neither train nor sweep"),
        (["train", "--recipe", "tiny"], "give --run.id"),
        (["sweep", "--space", "s.py"], "give --name"),
    ],
)
def test_a_job_without_its_name_is_refused(allocation: ModuleType, arguments: list[str], said: str) -> None:
    with pytest.raises(allocation.Refused, match=said):
        allocation.command_of(arguments)


def run(command: list[str], where: Path, **more: str) -> tuple[int, str]:
    """The status and the messages of a batch script's process, outside Slurm."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | more
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("script", ["train", "sweep", "torchrun"])
def test_a_batch_script_says_what_is_missing(script: str, tmp_path: Path) -> None:
    file = str(SLURM / f"{script}.sbatch")
    if script != "torchrun":
        status, said = run(["bash", file], tmp_path)
        assert status == 2
        assert "root of the repository" in said
    status, said = run(["bash", file], REPOSITORY, SPRINGTIDE_PYTHON="/bin/false", SLURMD_NODENAME="n7")
    assert status == 2
    assert re.search(r"refused: /bin/false on n7 has no springtide with (Ray|torch)", said)
    options = [line.split(None, 1)[1] for line in Path(file).read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:TERM@120", "--open-mode=append"} <= {*options}


@pytest.mark.processes
def test_outside_slurm_a_job_says_how_to_submit(tmp_path: Path) -> None:
    command = [sys.executable, str(SLURM / "allocation.py"), "train", "--run.id", "mine"]
    status, said = run(command, tmp_path, HOME=str(tmp_path))
    assert status == 2
    assert "sbatch" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_task_of_an_array_names_itself(
    allocation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of an array speaks of itself not of the array."""
    (tmp_path / "squeue").write_text(
        '#!/bin/sh\ncase "$*" in *7_1*) echo RUNNING;; *) echo RUNNING; echo RUNNING;; esac\n'
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    for name in ("squeue", "scontrol"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    allocation.requeue()
    assert (tmp_path / "told").read_text() == "requeue 7_1\n"


def test_a_home_that_nobody_can_write_is_refused(
    allocation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(allocation.Refused, match=r"slurm-7 .*HOME"):
        allocation.folder_of()
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = allocation.folder_of()
    token = folder / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert allocation.folder_of() == folder
    assert len(token.read_text()) == 64
