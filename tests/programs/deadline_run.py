"""A run with a deadline on a cluster that Ray's own autoscaler scales: it begins on a spot node, orders an on-demand node,
trains on both, and gives the ordered one back when it is ahead. Prints one line of JSON.

python deadline_run.py [SECONDS that one worker needs for it]
"""

from __future__ import annotations

import datetime
import json
import logging
import statistics
import sys
import tempfile
import time
from typing import Any

from autoscaled import autoscaled, markets, wait_for

import springtide as st
from springtide.api.drill import compare
from springtide.config import Config
from springtide.elastic.on_demand import ORDER_S
from springtide.events import Event, Ordered, Started, StepDone
from springtide.planning.scenarios import Scenario, config_of
from springtide.ray.cluster.nodes import leftovers
from springtide.run import control
from springtide.storage import Folder

ALONE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 160.0
_FIRST, _CALIBRATED, _EVERY = 20, 40, 10
"""Steps before the deadline is set, steps whose time is measured for the length of the run, and steps between two looks at the
nodes."""
_LARGE = {"model.dim": 384, "model.ffn_dim": 1024}
"""So large that two workers are not slower than one: the two cores of a virtual machine may share one of the host's."""
_MORE_S = 0.7 * ORDER_S
"""Time that the run has after its twin, beyond that of one worker. An order is assumed to take longer, so that it orders at
once; and it is ahead when about half of its steps are done, however little the second worker helps [s]."""


def main() -> None:
    """Train a run until its twin overtakes it, and then with a deadline; say what was ordered. It is behind then, and
    one worker alone would be done in time."""
    logging.basicConfig(level=logging.ERROR)
    seen: list[tuple[int, list[str]]] = []
    with tempfile.TemporaryDirectory() as root, autoscaled({"spot": (1, 1), "on-demand": (0, 2)}):

        def config(steps: int, name: str, **changes: Any) -> Config:
            one = config_of(Scenario(2, (), steps, "a deadline"), root).override(_LARGE)
            return one.override({"run.id": name, **{key.replace("__", "."): value for key, value in changes.items()}})

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                if event.step % _EVERY == 0:
                    seen.append((event.step, sorted(markets().values())))
            else:
                told = f"{time.time() - begin_s:6.1f} step {event.step}: {event.kind} {event.describe()}"
                print(told, file=sys.stderr, flush=True)

        def stop(event: Event) -> None:
            if isinstance(event, StepDone) and event.step == _FIRST:
                control.give(Folder(root) / "mine", "stop")

        wait_for(markets)
        measured = st.train(config(_CALIBRATED, "measured", elastic__max_workers=1))
        steps = max(2 * _FIRST, int(ALONE_S / statistics.median(step.step_time_s for step in measured.steps)))
        st.train(config(steps, "mine", elastic__max_workers=1), listen=stop)
        twin = st.train(config(steps, "twin", elastic__max_workers=1))
        alone_s, begin_s = sum(step.step_time_s for step in twin.steps), time.time()
        until = datetime.datetime.fromtimestamp(begin_s + alone_s + _MORE_S, datetime.UTC).isoformat()
        prices = {"track__price": 3.0, "track__spot_price": 1.0}
        run = st.train(config(steps, "mine", elastic__deadline=until, **prices), resume=True, listen=listen)
        took_s = time.time() - begin_s
        compared = compare(run, twin, (), leftovers(), steps)
        groups = [one for one in run.events if isinstance(one, Started) and one.step >= _FIRST]
        orders = [one for one in run.events if isinstance(one, Ordered)]
        found: dict[str, Any] = {
            "digests_match": compared.digests_match,
            "loss_max_abs_diff": compared.loss_max_abs_diff,
            "is_verified": compared.is_verified,
            "in_time": took_s <= alone_s + _MORE_S,
            "groups": [one.markets for one in groups],
            "orders": [(one.step, one.workers, one.given_back) for one in orders],
            "restarts": [(one.cause, one.gap_s, one.steps_lost) for one in run.ledger.restarts],
            "market_dollars": run.ledger.market_dollars,
            "nodes_by_step": [one for place, one in enumerate(seen) if place == 0 or seen[place - 1][1] != one[1]],
            "leftovers": compared.leftovers,
            "steps": steps,
            "alone_s": alone_s,
            "took_s": took_s,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
