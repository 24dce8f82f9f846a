"""Three raylets, a rank on each; one node is killed with its rank and its server. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from metadata import metadata
from ray._private.state import state as state_of_ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from saving import meta, save, state

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.restore import restore
from springtide.checkpoint.shared_memory import NO_STEP
from springtide.checkpoint.snapshots import Snapshotter, restore_from_snapshots
from springtide.checkpoint.tensors import named_tensors
from springtide.elastic.copies import place
from springtide.ray.cluster.session import NAMESPACE
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.train import snapshot_saver
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import MailboxClient, NoticeSender, open_mailbox
from springtide.ray.train.snapshot_client import SnapshotClient, snapshot_servers_follow
from springtide.ray.train.snapshot_lookup import name_prefix, servers_named
from springtide.ray.train.worker import read_elsewhere
from springtide.storage import Folder

WORLD_SIZE = 3
ALONE_S = 8.0


class Rank:
    """One rank of a run, without a training loop."""

    def __init__(self, rank: int, term: int, url: str, mailbox: MailboxClient, limit_bytes: int = 2**30) -> None:
        changes = {"run.id": "servers", "run.root": str(Path(url).parent), "checkpoint.memory_bytes": limit_bytes}
        self.servers = SnapshotClient(configs.recipes.tiny().override(changes), Folder(url), mailbox, ALONE_S)
        self.memory = Snapshotter(self.servers, term, rank, WORLD_SIZE, "/dev/shm")
        self.url = url

    def node(self) -> str:
        return self.servers.node

    def pair(self, nodes: list[str]) -> None:
        self.servers.pair(nodes)

    def snapshot(self, step: int, wait: bool = True) -> str:
        """Take one, and wait until it is safe; the problem, if there is one."""
        self.memory.begin(named_tensors(*state(step)), meta(step).model_copy(update={"world_size": WORLD_SIZE}))
        self.memory.staged()
        try:
            while wait and self.memory.busy():
                time.sleep(0.01)  # between looks
        except OSError as error:
            return str(error)
        return ""

    def tear(self) -> None:
        """Leave the stage taken last as a rank that is killed in the middle of a copy into it would."""
        stage = self.memory._stages[1 - self.memory._next]
        stage.mark(NO_STEP)
        stage._bytes.zero_()

    def restored(self, dying: Any = None) -> int:
        """The step that comes back from memory, every bit compared; 0 for none. ``dying``: a server that goes before the first
        byte is read, when it is settled where from."""
        source, servers = self.servers.source, [dying] if dying else []

        def settled(snapshots: Any) -> Any:
            found = source(snapshots)
            if servers:
                ray.kill(servers.pop())
            return found

        self.servers.source = settled  # type: ignore[method-assign]
        model, optimizer = state(0)
        found = restore_from_snapshots(Folder(self.url), self.servers, model, optimizer, lambda step: "o")
        if found is None:
            return 0
        expected = named_tensors(*state(found.meta.step))
        for name, tensor in named_tensors(model, optimizer).items():
            assert torch.equal(tensor, expected[name]), name
        return found.meta.step


def main() -> None:
    """Kill and look."""
    root = tempfile.mkdtemp()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20) for _ in range(WORLD_SIZE)]
    cluster.wait_for_nodes()
    path = [str(Path(__file__).parent), *sys.path]
    ray.init(
        cluster.address,
        namespace=NAMESPACE,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path)}},
    )
    mailbox = open_mailbox("servers")

    def start(rank: int, node: str, term: int, url: str = f"{root}/run", **options: Any) -> Any:
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        there = ray.remote(Rank).options(num_cpus=0, scheduling_strategy=here)
        return there.remote(rank, term, url, mailbox, **options)

    def everyone(ranks: list[Any], method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in ranks], timeout=180)

    found: dict[str, Any] = {}
    # the copies of each lie on the next: the first is lost, the second has a torn stage
    by_id = {node.node_id: node for node in nodes}
    holds = place(by_id, {}, 1)
    ids = [min(by_id)]
    for _ in nodes[1:]:
        ids += holds[ids[-1]]
    head = ray.get_runtime_context().get_node_id()
    ranks = [start(rank, node, 1) for rank, node in enumerate(ids)]
    everyone(ranks, "pair", everyone(ranks, "node"))
    for step in (1, 2, 3, 4):
        found.setdefault("problems", []).extend(filter(None, everyone(ranks, "snapshot", step)))
    ray.get(ranks[2].snapshot.remote(5))  # which the others never ended
    ray.get(ranks[1].tear.remote())
    cluster.remove_node(by_id[ids[0]], allow_graceful=False)
    for rank in ranks[1:]:
        ray.kill(rank)
    heir = start(0, ids[1], 2)
    found["after_a_lost_node"] = ray.get(heir.restored.remote(), timeout=180)
    found["another_run"] = ray.get(start(0, ids[1], 1, f"{root}/other").restored.remote(), timeout=180)
    # the next lease on the two that are left: what it keeps replaces what the first one left
    heirs = [heir, start(1, ids[2], 2), start(2, ids[1], 2)]
    everyone(heirs, "pair", everyone(heirs, "node"))
    everyone(heirs, "snapshot", 7)
    found["of_the_next_attempt"] = ray.get(heir.restored.remote(), timeout=180)
    everyone(heirs, "snapshot", 8)
    everyone(heirs, "snapshot", 9)
    held = ray.get([server.found.remote() for server in servers_on(ids[1:])], timeout=180)
    found["attempts_held"] = sorted({snapshot.term for _, parts in held for snapshot, _ in parts})
    found["while_a_server_dies"] = ray.get(start(0, head, 9).restored.remote(servers_on(ids[1:2])[0]), timeout=180)
    # a group on one node has its copies elsewhere, and again elsewhere when they are lost
    lonely = start(0, ids[2], 1, f"{root}/lonely")
    ray.get(lonely.pair.remote([ids[2]]))
    ray.get([server.found.remote() for server, _ in servers_of(f"{root}/lonely")])  # nobody else waits for the others
    ray.get(lonely.pair.remote([ids[2]]))
    found["lonely"] = [lonely_holds(lonely, root, 1, ids[2])]
    for server, node in servers_of(f"{root}/lonely"):
        if node != ids[2] and ray.get(server.found.remote())[1]:
            ray.kill(server)
    found["lonely"] += [lonely_holds(lonely, root, step, ids[2]) for step in (2, 3)]
    # a limit
    small = start(0, head, 1, f"{root}/small", limit_bytes=1000)
    found["past_the_limit"] = ray.get(small.snapshot.remote(1), timeout=180)
    found["heard_s"], found["told"] = heard_s(ids[1], mailbox)
    found["committed_from_memory"] = commit_from_memory(mailbox, f"{root}/run")
    found["read_elsewhere"] = read_on_others(mailbox, f"{root}/saved", head, ids[1:])
    # another driver takes over, and has no workers yet: what the servers hold it will want
    run, other = Folder(f"{root}/run"), open_mailbox("servers-again")
    pids = [
        pid
        for (_, pid), _ in ray.get([server.found.remote() for server in servers_named(name_prefix(run))], timeout=180)
    ]
    with snapshot_servers_follow(run, other):
        ray.kill(mailbox.actor)
        time.sleep(1.5 * ALONE_S)  # longer than a server goes on alone
        found["servers_of_another_driver"] = [Path(f"/proc/{pid}").exists() for pid in pids]
        # with that one gone they go too
        ray.kill(other.actor)
        deadline = time.monotonic() + 90
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.5)  # until they have ended
        found["servers_left"] = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


def heard_s(node: str, mailbox: MailboxClient) -> tuple[float, bool]:
    """From when a cloud says that a node goes until Ray knows; whether the run's mailbox knows of that deadline by then."""
    with metadata() as cloud:
        cloud.answers = {"/latest/api/token": "t"}
        watches = PreemptionWatchers("aws", cloud.url, "", False, NoticeSender(mailbox.name, mailbox.key))
        watches.cover({node})
        while "GET /latest/meta-data/spot/instance-action" not in cloud.asked:
            time.sleep(0.05)  # until it stands
        assert node not in state_of_ray.get_draining_nodes()
        begin = time.monotonic()
        cloud.answers["/latest/meta-data/spot/instance-action"] = json.dumps(
            {"action": "terminate", "time": "2099-01-01T00:00:00Z"}
        )
        while node not in state_of_ray.get_draining_nodes():
            assert time.monotonic() - begin < 60
            time.sleep(0.02)  # between looks
        took_s, told = time.monotonic() - begin, mailbox.notices().get()
        return took_s, bool(told) and told[node].deadline_ms == state_of_ray.get_draining_nodes()[node]


def commit_from_memory(mailbox: MailboxClient, url: str) -> list[Any]:
    """The state, the step and the world size of the checkpoints that a run has after its driver has saved from memory; every
    bit is compared."""
    run = Folder(url)
    leases.claim(run, "driver", trains=False)
    config = configs.recipes.tiny().override({"run.id": run.name, "run.root": str(Path(url).parent)})
    snapshot_saver.configs = SimpleNamespace(fingerprint=lambda config: "c", redact=configs.redact)  # that of ``meta``
    problem = snapshot_saver.SnapshotSaver(TrainJob(config, mailbox, {}, "driver")).finish(lambda: False)
    model, optimizer = state(0)
    restored = restore(run, model, optimizer, lambda step: "o")
    assert restored, problem
    expected = named_tensors(*state(restored.meta.step))
    for name, tensor in named_tensors(model, optimizer).items():
        assert torch.equal(tensor, expected[name]), name
    [one] = inspect(run, verify=True)
    return [problem, one.state, one.step, restored.meta.world_size]


def read_on_others(mailbox: MailboxClient, url: str, head: str, others: list[str]) -> list[str | None]:
    """What nodes say of a checkpoint that another one found bad: it is good; it is damaged; no node is left to ask; the others
    have another storage."""
    run, [file] = Folder(url), ["step-0000000005/a0001-r0000.safetensors"]
    save(url, [5], stage_in="")
    asked = [read_elsewhere(mailbox, run, "step-0000000005", file, {head})]
    damaged = Path(url, "checkpoints", file)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    asked += [read_elsewhere(mailbox, run, "step-0000000005", file, {others[0]})]
    asked += [read_elsewhere(mailbox, run, "step-0000000005", file, {head, *others})]
    return [*asked, read_elsewhere(mailbox, Folder(f"{url}-elsewhere"), "step-0000000005", file, {head})]


def lonely_holds(rank: Any, root: str, step: int, node: str) -> list[bool]:
    """Take a snapshot; of each server that holds it, whether it is of the rank's node."""
    assert ray.get(rank.snapshot.remote(step), timeout=180) == ""
    held = [(one, ray.get(server.found.remote())[1]) for server, one in servers_of(f"{root}/lonely")]
    return sorted(one == node for one, parts in held if any(part.meta.step == step for part, _ in parts))


def servers_of(url: str) -> list[tuple[Any, str]]:
    """The servers of a run, and their nodes."""
    return [(server, ray.get(server.found.remote())[0][0]) for server in servers_named(name_prefix(Folder(url)))]


def servers_on(nodes: list[str]) -> list[Any]:
    """Handles on the servers of these nodes."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [ray.get_actor(name, namespace=NAMESPACE) for name in names if name.endswith(tuple(nodes))]


if __name__ == "__main__":
    main()
