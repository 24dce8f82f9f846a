"""A driver: ``train`` itself, with Ray Train replaced by a controller that asks the real policies."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import yaml
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from simulation.clock import Clock, Process
from simulation.cluster import Cluster, Machine
from simulation.group import Setting, WorkerGroup
from springtide.api import resolve as resolving
from springtide.api import train as training
from springtide.checkpoint import commit, leases, load, verified_reads
from springtide.checkpoint import restore as restoring
from springtide.checkpoint import snapshots as from_snapshots
from springtide.checkpoint.snapshot_commit import to_commit
from springtide.config import Config, files, fingerprint
from springtide.elastic import GroupRequest
from springtide.elastic.group_sizes import MemoryLimits
from springtide.elastic.health import Health
from springtide.elastic.policy import Bounds
from springtide.errors import StoppedWaiting
from springtide.ray._ray_private import FailureDecision, WorkerGroupStartupFailedError
from springtide.ray.cluster import liveness, session
from springtide.ray.cluster import nodes as cluster_nodes
from springtide.ray.train import failure_policy, hang, process_pool, snapshot_saver, trainer
from springtide.ray.train import scaling_policy as policies
from springtide.ray.train.mailbox import Mailbox
from springtide.ray.train.worker import let_go
from springtide.run import verify as verifying
from springtide.run.origin import Origin
from springtide.storage import Folder
from springtide.tracking import journal_reader

_POLL_S = 1.0
_ALONE_S = 60.0
"""How long snapshot servers stay up without a driver [s]."""


class Reference:
    """Ray's reference to a value that comes later."""

    def __init__(self, clock: Clock, at_s: float, value: Any = None, error: Exception | None = None) -> None:
        self.clock, self.at_s, self.value, self.error = clock, at_s, value, error

    @property
    def is_there(self) -> bool:
        return self.clock.now >= self.at_s

    def get(self, timeout_s: float | None = None) -> Any:
        wait_s = self.at_s - self.clock.now
        if timeout_s is not None and wait_s > timeout_s:
            self.clock.sleep(timeout_s)
            raise GetTimeoutError("no answer in time")
        if wait_s > 0:
            self.clock.sleep(wait_s)
        if self.error is not None:
            raise self.error
        return self.value

    def wait(self, timeout_s: float = 2.0) -> None:
        with contextlib.suppress(RayError):
            self.get(timeout_s)

    def has_come(self, timeout_s: float | None) -> bool:
        if timeout_s is None and not self.is_there:
            self.clock.sleep(self.at_s - self.clock.now)
        return self.is_there


class AwaitedRequest(Reference):
    """The answer to a call that waits in the mailbox for another request, group or run, and is sent when that has come."""

    def __init__(self, client: MailboxClient, heard: Any) -> None:
        super().__init__(client.clock, math.inf)
        self._client, self._heard, self._run = client, heard, client.mailbox._run
        self._group = self._run.groups
        self.look()

    def look(self) -> None:
        """Send the answer if what it waits for has come; called after each change of the mailbox."""
        client = self._client
        over = client.mailbox._run is not self._run or self._run.groups != self._group
        if self.at_s == math.inf and (over or not client.alive or self._run.request is not self._heard):
            self.at_s = self.clock.now + self.clock.random.uniform(0.002, 0.02)
            self.value = None if over else self._run.request
            self.error = None if client.alive else RayActorError(error_msg="the mailbox is gone")


class MailboxClient:
    """A client of the real ``Mailbox``, whose coroutines are carried out at once."""

    def __init__(self, clock: Clock, mailbox: Mailbox, key: str) -> None:
        self.clock, self.mailbox, self.key, self.alive = clock, mailbox, key, True
        self._awaited: AwaitedRequest | None = None

    def _call(self, method: str, *arguments: Any) -> Reference:
        at_s = self.clock.now + self.clock.random.uniform(0.002, 0.02)
        if not self.alive:
            return Reference(self.clock, at_s, error=RayActorError(error_msg="the mailbox is gone"))
        call = getattr(self.mailbox, method)(self.key, *arguments)
        try:
            call.send(None)
        except StopIteration as done:
            if self._awaited is not None:
                self._awaited.look()
            return Reference(self.clock, at_s, done.value)
        raise AssertionError(f"{method} waits")

    def end(self) -> None:
        """The mailbox ends with its driver."""
        self.alive = False
        if self._awaited is not None:
            self._awaited.look()

    def __getattr__(self, method: str) -> Callable[..., Reference]:
        return functools.partial(self._call, method)

    def request(self, heard: Any, followed: Any = None) -> Reference:
        """As the real one's, which waits."""
        if followed is not None:
            self._call("cancel", followed)
        self._awaited = AwaitedRequest(self, heard)
        return self._awaited

    def taken(self) -> list[Any]:
        """All events that have come, without waiting."""
        run = self.mailbox._run
        events, run.events = run.events, []
        return events


class Actor:
    """A worker's process as the pool knows it."""

    def __init__(self, simulated: Simulated, node: str) -> None:
        self.simulated, self.node, self.alive = simulated, node, True
        clock = simulated.clock
        self.ready_at_s = clock.now + clock.random.uniform(5.0, 12.0)
        machine = simulated.cluster.machines[node]
        self.frozen_until_s = machine.frozen_until_s
        machine.workers.append(self)
        simulated.actors.append(self)
        if clock.now < simulated.cluster.crashes_until_s:
            clock.after(clock.random.uniform(1.0, 4.0), self.crash)
        simulated.cluster.reach("start", node)
        self.execute = types.SimpleNamespace(remote=self._execute)
        self.get_metadata = types.SimpleNamespace(remote=lambda: Reference(clock, clock.now + 0.01, self))

    def crash(self) -> None:
        """End by itself: the node stays."""
        self.alive = False

    def _execute(self, function: Any, *arguments: Any) -> Call:
        return Call(self, 0.3 if function is let_go else 0.0, True if function is let_go else _health(self.node))


def _health(node: str) -> Health:
    return Health(1e12, 1e10, network_bytes_per_s=1e9)


class Call(Reference):
    """A call of an actor: it is never answered while the node is stopped, and fails with it. An answer that was there stays
    with who has called: Ray sends small ones along."""

    def __init__(self, actor: Actor, takes_s: float, value: Any) -> None:
        clock = actor.simulated.clock
        super().__init__(clock, max(clock.now, actor.ready_at_s) + takes_s, value)
        self.actor, self._was_there = actor, False

    @property
    def is_there(self) -> bool:
        self._was_there = self._was_there or self._is_there_now()
        return self._was_there

    def _is_there_now(self) -> bool:
        machine = self.actor.simulated.cluster.machines[self.actor.node]
        if not machine.alive or not self.actor.alive:
            self.error = RayActorError(error_msg="The actor died unexpectedly")
            return self.clock.now >= machine.died_s + 1.0
        return self.actor.frozen_until_s <= self.clock.now and self.clock.now >= self.at_s

    def get(self, timeout_s: float | None = None) -> Any:
        until_s = self.clock.now + (timeout_s if timeout_s is not None else 1e9)
        while not self.is_there:
            if self.clock.now >= until_s:
                raise GetTimeoutError("no answer in time")
            self.clock.sleep(0.2)
        if self.error is not None:
            raise self.error
        return self.value


class Ray:
    """The part of Ray that the pool of worker processes calls."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        until_s = self.clock.now + (timeout if timeout is not None else 1e9)
        while sum(one.is_there for one in refs) < num_returns and self.clock.now < until_s:
            self.clock.sleep(min(0.2, until_s - self.clock.now))
        return [one for one in refs if one.is_there], [one for one in refs if not one.is_there]

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if isinstance(ref, list):
            return [self.get(one, timeout) for one in ref]
        return ref.get(timeout)

    def put(self, value: Any) -> Reference:
        return Reference(self.clock, self.clock.now, value)

    def kill(self, actor: Actor) -> None:
        """A process that was stopped is ended, too, as soon as its node's Ray runs, and the next one on its node is not."""
        machine = actor.simulated.cluster.machines[actor.node]
        actor.alive = False
        for process in self.clock.processes:
            if process.rank and process.rank.actor is actor:
                self.clock.after(max(0.0, machine.frozen_until_s - self.clock.now), process.kill)


class ScalingPolicy(policies.SpringtideScalingPolicy):
    """The real one, without Ray's autoscaler: every node has a place."""

    def _maybe_send_resource_request(self) -> None:
        return None

    def _send_resource_request(self) -> None:
        return None

    def _reserved(self, table: Sequence[dict[str, Any]], busy: Sequence[str]) -> dict[str, dict[str, float]]:
        if self._share is not None:
            return super()._reserved(table, busy)
        return {node["NodeID"]: {"CPU": 1.0} for node in table}

    def _get_resize_decision(self, num_workers: int) -> Any:
        return ("start", num_workers)


class Simulated:
    """What the drivers of one simulation share."""

    def __init__(self, clock: Clock, cluster: Cluster, setting: Setting, watch: Any) -> None:
        self.clock, self.cluster, self.setting, self.watch = clock, cluster, setting, watch
        self.actors: list[Actor] = []
        """All that were started."""
        self.asked: dict[str, bool] = {}
        """Host -> whether its driver was asked to stop."""
        self._drivers = 0
        """Drivers that have trained, or wanted to."""
        self._began: set[Process] = set()
        """Drivers that have started a group."""
        self.heard: Callable[[Any], None] = lambda event: None

    def crash(self, seconds: float) -> None:
        """End the workers' processes on all nodes, and those that start in the next seconds."""
        self.cluster.crashes_until_s = self.clock.now + seconds
        for actor in self.actors:
            actor.crash()
        for process in self.clock.processes:
            if process.rank and process.alive:
                process.kill()

    def lacks_step(self) -> bool:
        """Return True if the store lacks the newest snapshot in memory."""
        setting, held = self.setting, [part for one in self.cluster.contents(()) for part, _ in one.held]
        with contextlib.suppress(OSError):  # the store is away
            return bool(to_commit(setting.run, held, fingerprint(setting.config)))
        return False

    def drive(self, config: Config, host: str, **how: Any) -> Process:
        """Start a driver."""
        self.asked[host] = False

        def work() -> Any:
            return training.train(config, workers=object(), dashboard=False, tracking_uri="off", **how)

        driver = self.clock.start("driver", host, work)
        driver.ended.append(lambda: self._driver_ended(driver))
        return driver

    def _driver_ended(self, driver: Process) -> None:
        if driver.result is not None or driver.error is not None:  # not killed
            self.watch.ended(driver, driver in self._began)

    def train(
        self,
        config: Config,
        run: Folder,
        term: int,
        labels: Any,
        owner: str,
        listen: Any,
        workers: Any = None,
        begun_s: float = 0.0,
    ) -> None:
        """In place of ``springtide.ray.train.trainer.train``."""
        clock, me = self.clock, self.clock.current
        assert me is not None
        mailbox = MailboxClient(clock, Mailbox("run", config.num_steps, float(config.elastic.hang)), "run")
        controller = Controller(self, config, owner, mailbox)
        process = clock.start("controller", me.host, controller.run)

        def end() -> None:
            process.kill()
            mailbox.end()
            clock.after(clock.random.uniform(0.2, 2.0), controller.abandon)

        me.ended.append(end)
        self._drivers += 1
        orphaned = snapshot_saver.OrphanedRun(config, run.url, owner)
        alone = functools.partial(self._end_servers, self._drivers, orphaned)
        me.ended.append(functools.partial(clock.after, _ALONE_S, alone))
        controller.begins = functools.partial(self._began.add, me)
        while process.alive:
            clock.sleep(0.5)
            for event in mailbox.taken():
                self.heard(event)
                listen(event)
            if self.asked[me.host]:
                self.asked[me.host] = False
                mailbox.ask(GroupRequest.STOP)
        for event in mailbox.taken():
            listen(event)
        failure = process.error
        if failure is not None and not isinstance(failure_policy.fatal(failure), StoppedWaiting | None):
            raise trainer._explain(failure) from failure
        if failure is not None and failure_policy.fatal(failure) is None:
            raise trainer._explain(failure) from failure
        self.cluster.end_servers()

    def _end_servers(self, driver: int, orphaned: snapshot_saver.OrphanedRun) -> None:
        """The snapshot servers have had no driver for a while, if none has followed this one."""
        if driver == self._drivers:
            for machine in self.cluster.alive:
                self.clock.start("server", machine.id, functools.partial(self._end_server, driver, orphaned, machine))

    def _end_server(self, driver: int, orphaned: snapshot_saver.OrphanedRun, machine: Machine) -> None:
        def is_over() -> bool:
            return self._drivers != driver

        begun_s = self.clock.now
        orphaned.commit((machine.id, 1), is_over)
        if is_over():
            return
        with contextlib.suppress(OSError):  # the store is away
            held = [part for one in self.cluster.contents(()) for part, _ in one.held]
            lost = to_commit(orphaned.folder, held, fingerprint(orphaned.config))
            last = leases.newest(orphaned.folder)
            if lost and last and last.owner == orphaned.owner and self.clock.now - begun_s < 500.0 and not is_over():
                self.watch.say(f"{machine.id} ends, and step {lost[0].meta.step} is in memory only")
        machine.snapshots.clear()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Replace what the drivers of a real run have around them."""
        clock, cluster = self.clock, self.cluster
        patches = [
            mock.patch.object(policies, "live", self._live),
            mock.patch.object(policies, "observed", lambda table, *_: [one["observed"] for one in table]),
            mock.patch.object(policies, "unanswering", cluster.unspeaking),
            mock.patch.object(policies, "ray", Ray(clock)),
            mock.patch.object(failure_policy, "lost", self._lost),
            mock.patch.object(failure_policy, "leaving", self._leaving),
            mock.patch.object(failure_policy, "unanswering", cluster.unanswering),
            mock.patch.object(policies, "diagnose", self._diagnose),
            mock.patch.object(liveness, "ray", Ray(clock)),
            mock.patch.object(liveness, "silent_processes", cluster.silent),
            mock.patch.object(hang, "look", lambda workers: [()] * len(workers)),
            mock.patch.object(process_pool, "ray", Ray(clock)),
            mock.patch.object(cluster_nodes, "unanswering", cluster.unanswering),
            mock.patch.object(snapshot_saver, "servers_named", lambda name: cluster.alive),
            mock.patch.object(snapshot_saver, "contents_of", cluster.contents),
            mock.patch.object(snapshot_saver, "staying", cluster.staying),
            mock.patch.object(snapshot_saver, "ray", Ray(clock)),
            mock.patch.object(trainer, "train", self.train),
            mock.patch.object(training, "Console", _Silent),
            mock.patch.object(training.provenance, "origin_of", lambda *_: Origin()),
            mock.patch.object(resolving, "prepare", lambda config, progress: config),
            mock.patch.object(resolving, "open_data", lambda config: self.setting.data),
            mock.patch.object(resolving, "fitted", lambda config, data: (config, [])),
            mock.patch.object(verifying, "open_data", lambda config: self.setting.data),
            mock.patch.object(session, "check_before_start", lambda config: None),
            mock.patch.object(session, "check_resources", lambda config: []),
            mock.patch.object(session, "starting_cluster", lambda config: contextlib.nullcontext(str)),
            mock.patch.object(files, "yaml", _KnownYaml),
            mock.patch.object(leases, "process_id", self._process),
            mock.patch.object(commit, "ThreadPoolExecutor", _Here),
            mock.patch.object(load, "ThreadPoolExecutor", _Here),
            mock.patch.object(verified_reads, "ThreadPoolExecutor", _Here),
            mock.patch.object(journal_reader, "ThreadPoolExecutor", _Here),
            *(
                mock.patch.object(module, name, getattr(self, f"_{name}"))
                for module in (restoring, from_snapshots)
                for name in ("on_first", "gathered", "rank_here")
            ),
        ]
        with contextlib.ExitStack() as stack:
            for one in patches:
                stack.enter_context(one)
            yield

    def _diagnose(self, workers: Sequence[Any], *_: Any) -> tuple[str, list[Any]]:
        silent = self.cluster.silent({one.actor: one.metadata.node_id for one in workers})
        return "stacks", [one for one in workers if one.actor in silent]

    def _live(self) -> Any:
        return [{"NodeID": node.id, "observed": node} for node in self.cluster.observed()]

    def _lost(self, before: Any) -> set[str]:
        self.cluster.ask_head()
        return {name for name in before if not self.cluster.machines[name].alive}

    def _leaving(self, before: Any) -> set[str]:
        return {name for name in before if self.cluster.machines[name].leaves_at_s is not None}

    def _process(self, pid: int) -> str:
        found = next((one for one in self.clock.processes if one.pid == pid), None)
        return f"process {pid}" if found is not None and found.alive else ""

    def _rank(self) -> Any:
        me = self.clock.current
        return me.rank if me else None

    def _gathered(self, value: Any) -> list[Any]:
        rank = self._rank()
        return rank.gathered(value) if rank else [value]

    def _on_first(self, function: Callable[[], Any]) -> Any:
        rank = self._rank()
        return rank.on_first(function) if rank else function()

    def _rank_here(self) -> int:
        rank = self._rank()
        return rank.rank if rank else 0


class Controller:
    """Ray Train's controller: it starts groups, looks at them, and asks the policies."""

    def __init__(
        self, simulated: Simulated, config: Config, owner: str, mailbox: MailboxClient, share: Any = None
    ) -> None:
        self.simulated, self.clock, self.owner, self.mailbox = simulated, simulated.clock, owner, mailbox
        elastic = config.elastic
        bounds = Bounds(
            elastic.min_workers,
            elastic.max_workers,
            settle_s=float(elastic.settle),
            reserve_s=float(elastic.reserve),
            grow=elastic.grow,
            wait_s=float("inf"),
            cluster_is_shared=share is not None,
        )
        self.job: Any = types.SimpleNamespace(
            config=config, mailbox=mailbox, folder=simulated.setting.run, owner=owner, keeps_snapshots=True
        )
        self.pool = process_pool.WorkerProcessPool()
        limits = MemoryLimits(1)
        lender: Any = types.SimpleNamespace(processes=self.pool, share=share)
        scaling = ScalingConfig(num_workers=elastic.max_workers, resources_per_worker={"CPU": 1})
        self.policy = ScalingPolicy(scaling, bounds, self.job, None, lender, limits)
        self.failures = failure_policy.SpringtideFailurePolicy(
            FailureConfig(max_failures=elastic.max_failures), self.job, self.pool, limits
        )
        self.group: WorkerGroup | None = None
        self.begins: Callable[[], None] = lambda: None
        self._workers: list[Any] = []

    def run(self) -> None:
        """Until the run is over; raises what ends it."""
        while True:
            self.clock.sleep(_POLL_S)
            try:
                decision = self.decide()
                self.clock.tell("decided", type(decision).__name__, decision if isinstance(decision, tuple) else "")
                if decision is True:
                    return
                self.follow(decision)
            except (ControllerError, WorkerGroupError) as error:
                self.fail(error)
            except Exception as error:
                self.fail(ControllerError(error))

    def follow(self, decision: Any) -> None:
        """End the group and start the next one, if that is decided."""
        if isinstance(decision, tuple):
            _, workers = decision
            self._release()
            if workers:
                self._begin()

    def decide(self) -> Any:
        """Ask the policy; True if the run is over."""
        group = self.group
        if group is None:
            return self.policy.make_decision_for_non_running_worker_group()
        if failures := group.failures():
            raise WorkerGroupError("a worker failed", failures)
        if group.is_over:
            self._release()
            return True
        state: Any = types.SimpleNamespace(workers=self._workers)
        return self.policy.make_decision_for_running_worker_group(state, None)

    def fail(self, error: Any) -> None:
        """Release the group that has failed, and raise the error if it is not to be tried again."""
        decision = self.failures.make_decision(error)
        self._release()
        if decision is not FailureDecision.RETRY:
            self.abandon()
            raise error

    def _begin(self) -> None:
        self.begins()
        taken = self.pool.take(lambda node, name: Actor(self.simulated, node))
        simulated = self.simulated
        if lost := [one.node for one in taken if not simulated.cluster.machines[one.node].alive]:
            self.pool.give_back([one for one in taken if one.node not in lost])
            raise WorkerGroupStartupFailedError(f"lost before it began: {lost}")
        nodes = tuple(sorted(one.node for one in taken))
        by_node = {one.node: one for one in taken}
        self._workers = [
            types.SimpleNamespace(metadata=types.SimpleNamespace(node_id=node), actor=by_node[node].actor)
            for node in nodes
        ]
        self.group = WorkerGroup(simulated.setting, nodes, self.owner, self.mailbox, simulated.watch)
        for rank in self.group.ranks:
            rank.actor = by_node[rank.node].actor

    def _release(self) -> None:
        if self.group is None:
            return
        self.group.release()
        gone = self.simulated.cluster.unanswering(self.group.nodes)
        self.group = None
        self.pool.reclaim(self._workers, gone)

    def abandon(self) -> None:
        """The driver is gone, or gives up: its workers go with it."""
        if self.group is not None:
            self.group.release()
            self.group = None


class _KnownYaml:
    """``yaml``, which parses and writes each text once."""

    YAMLError = yaml.YAMLError
    load = staticmethod(functools.lru_cache(64)(yaml.load))

    @staticmethod
    def safe_dump(data: Any, sort_keys: bool) -> str:
        return _dumped(json.dumps(data), sort_keys)


@functools.lru_cache(64)
def _dumped(data: str, sort_keys: bool) -> str:
    return yaml.safe_dump(json.loads(data), sort_keys=sort_keys)


class _Silent:
    """A console that nobody reads."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, event: Any) -> None:
        return None

    def say(self, *_: Any) -> None:
        return None


class _Here:
    """A pool of threads that calls at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def map(self, function: Callable[..., Any], *values: Any) -> Iterator[Any]:
        return map(function, *values)
