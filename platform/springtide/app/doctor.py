"""Checks of this machine before it trains: each has a figure, a limit and a remedy, and none can hang the others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from springtide.errors import redacted

Status = Literal["ok", "warn", "fail"]
_USUAL_S = 20.0
"""Time after which a check is cut off: all but the measured ones take milliseconds."""


class Check(NamedTuple):
    """What one check found."""

    name: str
    status: Status
    figure: str
    """What was found, with its unit."""
    limit: str = ""
    """What is needed; empty where nothing is."""
    remedy: str = ""
    """What to do; empty if all is well."""

    def describe(self) -> str:
        """Return the check as lines for people."""
        limit = f" (needed: {self.limit})" if self.limit else ""
        remedy = f"\n{'':6}try: {self.remedy}" if self.remedy else ""
        return f"{self.status:4}  {self.name}: {self.figure}{limit}{remedy}"


class CheckPlan(NamedTuple):
    """A check that is still to be made."""

    name: str
    make: Callable[[], Sequence[Check]]
    timeout_s: float = _USUAL_S


def doctor(
    store: str = "",
    root: str = "runs",
    environment: Mapping[str, str] | None = None,
    peer: str = "",
    upload: str = "",
) -> Iterator[Check]:
    """Check this machine, and yield what each check found, as soon as it has.

    Args:
        store: folder or URL to measure, as ``run.root``; empty measures none. What is written there is removed.
        root: local folder of runs, whose disk must have room.
        environment: variables to check; None: those of this process.
        peer: HOST:PORT of this machine or of another one, where the same check runs; empty measures no network.
        upload: folder that is to be submitted as the working directory of a Ray job; empty looks at none.

    Raises:
        ConfigError: ``store`` is not a URL that is opened here, ``peer`` is not HOST:PORT, or ``upload`` is not a folder.
    """
    from springtide.app import doctor_checks as checks
    from springtide.app.doctor_gpus import gpus

    variables = dict(os.environ if environment is None else environment)
    plans = [
        CheckPlan("versions", checks.versions),
        CheckPlan("devices", lambda: gpus(variables)),
        CheckPlan("memory", checks.memory),
        CheckPlan("shared memory", checks.shared_memory),
        CheckPlan("open files", checks.open_files),
        CheckPlan("disk", lambda: checks.disks(root)),
        CheckPlan("environment", lambda: checks.variables(variables)),
        CheckPlan("Ray", lambda: checks.ray_access(variables)),
        CheckPlan("torch and gloo", lambda: checks.torch_and_gloo(variables), 90.0),
    ]
    if store:
        from springtide.app.doctor_store import StoreCheck

        plans.append(CheckPlan("store", StoreCheck(store).make, 180.0))
    if peer:
        from springtide.app.doctor_peer import WAIT_S, PeerCheck

        plans.append(CheckPlan("peer", PeerCheck(peer, variables).make, WAIT_S))
    if upload:
        from springtide.app.doctor_upload import UploadCheck

        plans.append(CheckPlan("upload", UploadCheck(upload).make))
    for plan in plans:
        yield from carry_out(plan)


def carry_out(plan: CheckPlan) -> list[Check]:
    """Return what a check found. One that raises has failed; one that hangs is cut off and left behind."""
    found: list[Check] = []

    def make() -> None:
        try:
            found.extend(plan.make())
        except Exception as error:  # a broken driver or client may raise anything; the other checks are still worth it
            text = redacted(f"{type(error).__name__}: {error}")[:300]
            found.append(Check(plan.name, "fail", f"the check ended with {text}", "", "repair what it names"))

    thread = threading.Thread(target=make, name=f"springtide-doctor-{plan.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(plan.timeout_s)
    if thread.is_alive():
        figure = f"no answer in {time.monotonic() - began:.0f} s: cut off"
        return [
            Check(plan.name, "fail", figure, f"{plan.timeout_s:g} s", "something hangs: a driver, a mount, a network")
        ]
    return found
