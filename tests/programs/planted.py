"""Twenty fixed bugs, planted back one at a time: which test finds each, and how soon.

python planted.py --list                 the defects
python planted.py NAME [PYTEST ...]      pytest, with one defect planted in all processes that it starts
python planted.py --check [NAME ...]     each against the one test that ``found_by`` names, ten seconds each
python planted.py --table [NAME ...]     search the tests for the first that finds each; a second call resumes

The draw: 60 fixed bugs of CHANGELOG.md and the git log whose test starts real processes and whose feature is still here,
numbered by the age of their commits, newest first; of these ``random.Random(45).sample(range(60), 20)``. They were listed and
drawn before anybody looked which tests find them. ``@fixed`` names the commit that fixed a bug and the file with its test.

How a defect reaches all processes: ``PYTHONPATH`` begins with a temporary folder that has a ``sitecustomize.py``. It reads
``PLANTED_DEFECT``, the name of a defect and the modules that it patches, and plants it as soon as these are imported, before
other modules import names from them. So it holds in ranks, Ray's workers and commands, but not in processes that are started
without the environment (``python -I``). ``PLANTED_LOG`` is a file that gets a line for each process with the defect: a defect
that no process had was not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

VARIABLE, LOG = "PLANTED_DEFECT", "PLANTED_LOG"
ROOT = Path(__file__).parents[2]
UNIT = "tests/unit"
SIMULATOR = f"{UNIT}/test_control_plane.py::test_forty_seeds_end_with_every_step_once_and_one_history_each"
_TIMEOUT_S = 900
_TRIES = 3
"""Tests that fail for another reason, as on a busy machine, before the rest of their files is given up."""
_FOUND = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)

Plant = contextlib.AbstractContextManager[Any]


@dataclasses.dataclass(frozen=True)
class Defect:
    """A fixed bug."""

    plant: Callable[[], Plant]
    commit: str
    """Of the fix."""
    test: str
    """The file with the test of the fix, below ``tests``."""
    found_by: str
    """The first test that finds it, below ``tests/unit``, without the values of its parameters."""

    @property
    def summary(self) -> str:
        return (self.plant.__doc__ or "").strip()

    def modules(self) -> list[str]:
        """Return the modules that it patches."""
        return list(dict.fromkeys(module for module, _ in self.patches()))

    def patches(self) -> list[tuple[str, str]]:
        """Return the module and the name of each of its patches."""
        _patched.clear()
        self.plant()  # is not entered
        return list(_patched)


DEFECTS: dict[str, Defect] = {}
_patched: list[tuple[str, str]] = []
"""Module and name of what the last call of a ``plant`` patches."""


def fixed(commit: str, test: str, found_by: str) -> Callable[[Callable[[], Plant]], Callable[[], Plant]]:
    """Register a defect."""

    def register(plant: Callable[[], Plant]) -> Callable[[], Plant]:
        DEFECTS[plant.__name__] = Defect(plant, commit, test, found_by)
        return plant

    return register


def patch(target: Any, name: str, new: Any) -> Plant:
    """Return the patch of an attribute of an imported module or class."""
    _patched.append((target.__name__ if isinstance(target, types.ModuleType) else target.__module__, name))
    return mock.patch.object(target, name, new)


@contextlib.contextmanager
def _together(*patches: Plant) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


# Imports of springtide are inside the functions: a process imports what one defect patches, and no more.


@fixed(
    "06b603c8",
    "elastic/test_private_cluster.py",
    found_by="ray/test_connect.py::test_cluster_keeps_the_current_folder_out_of_its_workers",
)
def current_folder_first() -> Plant:
    """Ray's workers looked for modules in the driver's current folder before they looked at installed packages."""
    from springtide.ray.cluster import session

    return patch(session, "keep_current_folder_out", lambda job: None)


@fixed(
    "542dbedc",
    "unit/api/test_doctor.py",
    found_by="api/test_doctor.py::test_the_command_checks_this_machine_and_a_store_and_leaves_nothing",
)
def doctor_imports_from_here() -> Plant:
    """Processes that springtide doctor starts imported from the current folder first."""
    from springtide.api import doctor

    def start(command: Sequence[str], **options: Any) -> Any:
        options["env"] = {name: value for name, value in options["env"].items() if name != "PYTHONPATH"}
        return subprocess.Popen([part for part in command if part != "-P"], **options)

    return patch(doctor, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": start}))


@fixed(
    "cecf1414",
    "unit/api/test_provenance.py",
    found_by="api/test_provenance.py::test_a_filter_of_the_checkout_is_not_run",
)
def git_runs_filters() -> Plant:
    """Git ran the clean filter that a stranger's checkout names in its own config."""
    from springtide.api import provenance

    return patch(provenance, "_own_filters", lambda directory: [])


@fixed(
    "f2e2eda5",
    "unit/corpus/test_hostile_tokenizers.py",
    found_by="corpus/test_hostile_tokenizers.py::test_every_step_that_lengthens_is_refused",
)
def steps_multiply() -> Plant:
    """Steps of a tokenizer.json multiplied the length of a text without a limit, unless they were Replace or Unicode's."""
    from springtide.corpus import tokenizer_probe

    growth = tokenizer_probe._growth
    known = ("Replace", "Prepend", "Precompiled", "NFKC", "NFKD")

    def some(step: str, parts: Sequence[dict[str, Any]]) -> float:
        counted = [part for part in parts if part.get("type") in known and step in ("normalizer", "decoder")]
        return growth(step, counted)

    return patch(tokenizer_probe, "_growth", some)


@fixed(
    "fa62823e",
    "unit/hf/test_links_and_limits.py",
    found_by="hf/test_links_and_limits.py::test_a_link_out_of_a_model_is_refused_first",
)
def template_is_a_link() -> Plant:
    """The chat template of a model's folder was read through a link that leads out of the folder."""
    from springtide.hf import hf_tokenizer
    from springtide.storage import Folder

    class Open(Folder):
        def confined(self) -> Folder:
            return self

    theirs = hf_tokenizer.their_template
    return patch(hf_tokenizer, "their_template", lambda folder: theirs(Open(folder.url)))


@fixed(
    "6d94f376",
    "unit/training/test_sample.py",
    found_by="training/test_sample.py::test_a_checkpoint_that_comes_meanwhile_is_not_what_the_sample_is_of",
)
def step_of_a_newer_checkpoint() -> Plant:
    """A sample named the step of a checkpoint that a run committed while the text was written."""
    from springtide.api import train
    from springtide.checkpoint.format import step_of

    sample = train.sample

    def named_later(run: Any, *arguments: Any, **options: Any) -> Any:
        found = sample(run, *arguments, **options)
        return dataclasses.replace(found, step=step_of(run.checkpoint_at()) or 0)

    return patch(train, "sample", named_later)


@fixed(
    "5578fa1f",
    "distributed/test_branch.py",
    found_by="training/test_skipped_steps.py::test_spike_skips_no_step_of_the_trunk",
)
def spike_skips_the_trunk() -> Plant:
    """A spike in the first steps of a branch skipped steps of its trunk."""
    from springtide.training import group_lease

    return patch(group_lease, "branch", types.SimpleNamespace(first_step=lambda config: 0))


@fixed(
    "44b2cccd",
    "elastic/test_runs_on_ray.py",
    found_by="ray/test_mailbox.py::test_rank_0_ends_the_request_that_it_has_heard_and_beats_once_a_second",
)
def save_is_heard_twice() -> Plant:
    """A save that was followed ended by a call of its own, which could arrive after the next wait for a request."""
    from springtide.ray.train import mailbox as mailboxes

    def interrupt(self: Any) -> Any:
        if not self._request.has_come(0):
            return self._asked
        asked = self._request.get()
        once = asked in mailboxes._ONCE
        self._asked = None if once else asked
        self._request = self._mailbox.request(self._asked)
        if once and hasattr(self._mailbox, "actor"):  # a test's mailbox may have none, which is not the defect
            self._mailbox.actor.cancel.remote(self._mailbox.key, asked)
        return asked

    return patch(mailboxes.EventSender, "interrupt", interrupt)


@fixed(
    "f715c0c0",
    "elastic/test_runs_on_ray.py",
    found_by="ray/test_mailbox.py::test_rank_0_ends_the_request_that_it_has_heard_and_beats_once_a_second",
)
def request_is_heard_late() -> Plant:
    """A request to leave, stop or save was followed two steps later than it could be."""
    from springtide.ray.train import mailbox as mailboxes

    interrupt = mailboxes.EventSender.interrupt

    def late(self: Any) -> Any:
        heard = self.__dict__.setdefault("heard", [None, None])
        heard.append(interrupt(self))
        return heard.pop(0)

    return patch(mailboxes.EventSender, "interrupt", late)


@fixed(
    "37b6d114",
    "elastic/test_snapshot_servers.py",
    found_by="ray/test_snapshots_kept.py::test_a_group_on_one_node_has_copies_elsewhere",
)
def next_node_waits() -> Plant:
    """A group on one node whose copy failed tried no other node before its next snapshot."""
    from springtide.ray.train import snapshot_client

    hold, tries = snapshot_client.SnapshotClient._hold, snapshot_client._TRIES

    def once(self: Any, *arguments: Any) -> None:
        with mock.patch.object(snapshot_client, "_TRIES", tries if self._copies and self._others() else 1):
            hold(self, *arguments)

    return patch(snapshot_client.SnapshotClient, "_hold", once)


@fixed("a6d0c8ea", "distributed/test_torchrun.py", found_by="checkpoint/test_leases.py::test_refusal_names_the_driver")
def refusal_names_a_group() -> Plant:
    """A driver that was refused was told the process of a worker group, which its driver replaces, not that of the driver."""
    from springtide.checkpoint import leases
    from springtide.errors import RunExists

    def held(run: Any, lease: Any) -> RunExists:
        return RunExists(f"{run.url} is held by {lease}; stop that process first, or choose another run.id")

    return patch(leases, "_held_by", held)


@fixed(
    "a696c4fc",
    "elastic/test_snapshot_servers.py",
    found_by="ray/test_snapshots_kept.py::test_of_two_copies_a_failed_one_does_not_count",
)
def failed_node_stays() -> Plant:
    """A node whose snapshot server hangs or is full was chosen for copies again and again."""
    from springtide.ray.train import snapshot_client

    return patch(snapshot_client.SnapshotClient, "_avoid", lambda self, node: None)


@fixed(
    "169d5c59",
    "elastic/test_runs_on_ray.py",
    found_by="planning/test_estimate.py::test_fewest_workers_fit_a_step_with_one_row",
)
def auto_with_a_range() -> Plant:
    """A run with train.micro_batch = auto and a range of workers ended with a traceback before it began."""
    from springtide.planning import estimate

    least = estimate.least_workers

    def as_configured(config: Any, vocab_size: int, eos_id: int | None, device_bytes: int) -> int:
        elastic = config.elastic
        if device_bytes and elastic.min_workers != elastic.max_workers:
            estimate._fits_easily(config, vocab_size, device_bytes)
        return least(config, vocab_size, eos_id, device_bytes)

    return patch(estimate, "least_workers", as_configured)


@fixed(
    "0efa38a7",
    "elastic/test_runs_on_ray.py",
    found_by="tracking/test_secrets.py::test_a_config_without_its_secrets_is_a_config",
)
def passwords_in_configs() -> Plant:
    """Passwords in the URLs of a config went to MLflow, checkpoints, Ray and the screen."""
    from springtide.config import files

    return patch(files, "redact", lambda config: config)


@fixed(
    "10ef09b2",
    "distributed/test_branch.py",
    found_by="run/test_start_from.py::test_weights_of_another_vocabulary_are_refused",
)
def weights_of_another_vocabulary() -> Plant:
    """A run began with weights that were trained with another tokenizer."""
    from springtide.checkpoint.branch import split
    from springtide.checkpoint.format import read_manifest
    from springtide.errors import CheckpointError
    from springtide.training import start_check

    check = start_check.check_start

    def trusting(config: Any, identity: Any, tokenizer_digest: str) -> Any:
        with contextlib.suppress(CheckpointError):
            tokenizer_digest = read_manifest(*split(config.train.start_from)).meta.tokenizer_digest
        return check(config, identity, tokenizer_digest)

    return patch(start_check, "check_start", trusting)


@fixed(
    "ec3631ce",
    "distributed/test_who_may_write.py",
    found_by="api/test_second_driver.py::test_driver_that_claims_too_late_has_written_nothing",
)
def refused_driver_has_written() -> Plant:
    """A second driver wrote its config into the run before it was refused."""
    from springtide.api import resolve, train

    lease = train._lease

    def late(found: Any) -> Plant:
        found.run.write_config(found.config)
        return lease(found)

    unchecked = types.SimpleNamespace(check_free=lambda run: None)
    return _together(patch(resolve, "leases", unchecked), patch(train, "_lease", late))


@fixed(
    "483e5e45",
    "distributed/test_links.py",
    found_by="distributed/test_open_files.py::test_connections_are_found_and_no_other_file_is_opened",
)
def open_files_leak() -> Plant:
    """Looking for its connections, a worker left open a copy of each open file that is no socket."""
    from springtide.distributed import connections

    return patch(connections, "stat", types.SimpleNamespace(S_ISSOCK=lambda mode: True))


@fixed(
    "db0f8eb9",
    "elastic/test_metadata.py",
    found_by="ray/test_nodes.py::test_a_deadline_is_as_far_away_as_the_node_itself_says_whatever_the_drivers_clock_shows",
)
def deadline_by_the_drivers_clock() -> Plant:
    """The deadline of a notice was counted by the driver's clock, which may differ from the node's."""
    from springtide.ray.cluster import nodes

    monotonic = nodes._monotonic
    return patch(nodes, "_monotonic", lambda deadline_ms, told: monotonic(deadline_ms, None))


@fixed(
    "0656fbc8",
    "unit/training/test_compile_cache.py",
    found_by="training/test_compile_cache.py::test_what_one_node_compiled_another_loads_once",
)
def code_of_one_size() -> Plant:
    """A new node loaded the compiled code of the largest group only, and compiled the rest itself."""
    from springtide.training import compile_cache

    load = compile_cache.CompileCache.load

    def largest(self: Any, device: Any) -> int:
        own = Path(self.name(device, self.config.elastic.max_workers)).name
        with mock.patch.object(compile_cache, "_FILE", re.compile(re.escape(own))):
            return load(self, device)

    return patch(compile_cache.CompileCache, "load", largest)


@fixed(
    "b240a356",
    "unit/ray/test_reaper.py",
    found_by="ray/test_reaper.py::test_a_process_of_the_cluster_ends_and_a_user_who_reads_its_log_does_not",
)
def reaper_ends_others() -> Plant:
    """What ends a private cluster ended every process that had one of its logs open."""
    from springtide.ray.cluster import reaper

    script = Path(tempfile.mkdtemp(prefix="planted-")) / "reaper.py"
    script.write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('of_springtide', {reaper.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module._is_of_cluster = lambda entry, folder: True\n"
        "module.wait_and_reap(sys.argv[1])\n"
    )
    return patch(reaper, "__file__", str(script))  # it is run as a script


class _Finder:
    """Plants a defect when the last of its modules has been imported."""

    def __init__(self, name: str, modules: Sequence[str]) -> None:
        self._name, self._missing = name, set(modules)
        self._planted: Plant | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As ``sys.meta_path`` has it."""
        if name not in self._missing:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_plant(module: types.ModuleType) -> None:
            run(module)
            self._missing.discard(name)
            if not self._missing:
                self._planted = DEFECTS[self._name].plant()  # collected, it would be undone
                self._planted.__enter__()
                if log := os.environ.get(LOG):
                    with open(log, "a") as file:
                        file.write(f"{os.getpid()} {' '.join(sys.orig_argv)[:300]!r}\n")

        spec.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return spec


def plant_at_import() -> None:
    """Plant what ``PLANTED_DEFECT`` names; ``sitecustomize.py`` calls it."""
    name, *modules = os.environ[VARIABLE].split()
    sys.meta_path.insert(0, _Finder(name, modules))  # type: ignore[arg-type]


@contextlib.contextmanager
def _planted(name: str) -> Iterator[dict[str, str]]:
    """The environment of processes that have a defect; none if ``name`` is empty."""
    if not name:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        lines = (
            "import importlib.util, os, sys",
            f"if {VARIABLE!r} in os.environ:",
            f"    spec = importlib.util.spec_from_file_location('planted', {str(Path(__file__).absolute())!r})",
            "    sys.modules['planted'] = module = importlib.util.module_from_spec(spec)",
            "    spec.loader.exec_module(module)",
            "    module.plant_at_import()",
        )
        Path(folder, "sitecustomize.py").write_text("\n".join(lines) + "\n")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        found = " ".join([name, *DEFECTS[name].modules()])
        yield {**os.environ, VARIABLE: found, LOG: f"{folder}/log", "PYTHONPATH": path}


def packages_of(defect: Defect) -> list[str]:
    """Return the packages that a defect patches."""
    return sorted({name.split(".")[1] for name in defect.modules()})


def run_tests(name: str, paths: Sequence[str], *options: str) -> tuple[str, float, int, str]:
    """Run tests with a defect; with an empty name, without one.

    Returns:
        The first test that failed, empty if none; the time [s]; the number of processes that had the defect; the output.
    """
    with _planted(name) as environment:
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *paths]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            output = f"{error.stdout!r}\nFAILED {paths[0]} - no end in {_TIMEOUT_S} s"
        took_s = time.monotonic() - begin
        log = Path(environment.get(LOG, "/nonexistent"))
        processes = len(log.read_text().splitlines()) if log.exists() else 0
    found = _FOUND.findall(output)
    return (found[0] if found else ""), took_s, processes, output


def naming(defect: Defect) -> list[str]:
    """Return the unit tests that import a module that a defect patches, or call a function of that name: those of the fix and
    of its package first."""
    parts = [name.rpartition(".") for name in defect.modules()]
    imports = [
        re.compile(rf"\b{re.escape(f'{parent}.{name}')}\b|from {re.escape(parent)} import [^\n]*\b{name}\b")
        for parent, _, name in parts
    ]
    imports += [re.compile(rf"\b{name}\(") for _, name in defect.patches()]
    files = [str(file.relative_to(ROOT)) for file in sorted((ROOT / UNIT).rglob("test_*.py"))]
    found = [file for file in files if any(one.search((ROOT / file).read_text()) for one in imports)]
    folders = [f"{UNIT}/{package}" for package in packages_of(defect)]
    return sorted(found, key=lambda file: (file != f"tests/{defect.test}", str(Path(file).parent) not in folders))


@functools.cache
def _simulated() -> frozenset[str]:
    """The files of which the simulator calls a function; ``sys.modules`` would have all, because modules import each other."""
    lines = (
        "import json, sys",
        "from simulation.play import play",
        "play(0)",
        "files = set()",
        "sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == 'call' else None)",
        "play(1), play(2)",
        "sys.setprofile(None)",
        "print(json.dumps(list(files)))",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=True)
    return frozenset(json.loads(done.stdout))


def stages(defect: Defect, whole: bool) -> list[list[str]]:
    """Return what is tried in turn: the unit tests that import what a defect patches, those of its packages, and the simulator
    if it uses that; if ``whole``, the file with its own test, and all unit tests."""
    if whole:
        return [[f"tests/{defect.test}"], [UNIT]]
    named = naming(defect)
    of_packages = [
        str(file.relative_to(ROOT))
        for package in packages_of(defect)
        for file in sorted((ROOT / UNIT / package).glob("test_*.py"))
    ]
    patched = {str(sys.modules[name].__file__) for name in defect.modules()}
    simulator = [] if patched.isdisjoint(_simulated()) else [SIMULATOR]
    return [named, [file for file in of_packages if file not in named], simulator]


def search(name: str, whole: bool) -> dict[str, Any]:
    """Try one defect until a test finds it that passes without it."""
    defect = DEFECTS[name]
    result: dict[str, Any] = {"commit": defect.commit, "packages": packages_of(defect), "whole": whole, "found": ""}
    result["tried"] = []
    for paths in filter(None, stages(defect, whole)):
        passed_over: list[str] = []
        for _ in range(_TRIES):
            found, took_s, processes, output = run_tests(name, paths, *(f"--deselect={one}" for one in passed_over))
            result["tried"].append({"paths": paths, "s": round(took_s, 1), "processes": processes, "found": found})
            if not found:
                break
            again, alone_s, _, _ = run_tests(name, [found])
            if again and not run_tests("", [found])[0]:
                return result | {"found": found, "s": round(alone_s, 1), "said": output[-1500:]}
            result["tried"][-1]["found"] += " (not alone, or without the defect, too)"
            passed_over.append(found)
    return result


def table(names: Sequence[str], results: Path, whole: bool) -> int:
    """Try each defect that has no result yet, and print the table."""
    results.parent.mkdir(exist_ok=True)
    known = json.loads(results.read_text()) if results.exists() else {}
    for name in names:
        if name not in known or (whole and not known[name]["found"] and not known[name]["whole"]):
            known[name] = search(name, whole)
            results.write_text(json.dumps(known, indent=1))
        one = known[name]
        found = f"{one['found']} in {one['s']} s" if one["found"] else "missed"
        print(f"{name} ({one['commit']}, {' '.join(one['packages'])}): {found}", flush=True)
    return int(any(not known[name]["found"] for name in names))


def check(names: Sequence[str]) -> int:
    """Try each defect against the test that is known to find it."""
    missed = 0
    for name in names:
        found, took_s, processes, _ = run_tests(name, [f"{UNIT}/{DEFECTS[name].found_by}"])
        missed += not found
        print(f"{name}: {found or f'MISSED, {processes} processes had it'} in {took_s:.1f} s", flush=True)
    return int(missed > 0)


def main() -> int:
    """Exit status 1 if a defect was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--whole", action="store_true", help="also the test of the fix, and all unit tests, if one is missed"
    )
    parser.add_argument("--results", type=Path, default=ROOT / ".long/planted.json", help="where results are kept")
    parser.add_argument("rest", nargs="*")
    options, unknown = parser.parse_known_args()
    if options.list:
        for name, defect in DEFECTS.items():
            print(f"{name}: {defect.summary} ({defect.commit}, {defect.test}; patches {', '.join(defect.modules())})")
        return 0
    if options.check:
        return check(options.rest or list(DEFECTS))
    if options.table:
        return table(options.rest or list(DEFECTS), options.results, options.whole)
    if not options.rest:
        parser.error("name a defect, or give --list or --table")
    found, took_s, processes, output = run_tests(options.rest[0], options.rest[1:], *unknown)
    print(f"{output}\n{found or 'nothing failed'} after {took_s:.1f} s; {processes} processes had the defect")
    return int(not found)


if __name__ == "__main__":
    sys.modules["planted"] = sys.modules["__main__"]
    sys.exit(main())
