"""A run with a deadline on a cluster that Ray's own autoscaler scales: it begins on a spot node, orders an on-demand node,
trains on both, and gives the ordered one back when it is ahead. Prints one line of JSON.

python deadline_run.py [STEPS]
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from typing import Any

from autoscaled import autoscaled, markets, wait_for

import springtide as st
from springtide.app.drill import compare
from springtide.app.scenarios import Scenario, config_of
from springtide.events import Event, Ordered, Started, StepDone
from springtide.on_ray.cluster.nodes import leftovers

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1200
_EVERY = 10
"""Steps between two looks at the nodes."""


def main() -> None:
    """Train twice, and say what was ordered."""
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as root:
        config = config_of(Scenario(2, (), STEPS, "a deadline"), root)
        seen: list[tuple[int, list[str]]] = []

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                if event.step % _EVERY == 0:
                    seen.append((event.step, sorted(markets().values())))
            else:
                told = f"{time.time() - begin_s:6.1f} step {event.step}: {event.kind} {event.describe()}"
                print(told, file=sys.stderr, flush=True)

        with autoscaled({"spot": (1, 1), "on-demand": (0, 2)}):
            wait_for(markets)
            twin = st.train(config.override({"run.id": "twin", "elastic.max_workers": 1}))
            alone_s = sum(step.step_time_s for step in twin.steps)
            changes = {"track.price": 3.0, "track.spot_price": 1.0, "elastic.deadline": 2.2 * alone_s + 30}
            begin_s = time.time()
            run = st.train(config.override({"run.id": "mine", **changes}), listen=listen)
            took_s = time.time() - begin_s
            kept = leftovers()
        compared = compare(run, twin, (), {}, STEPS)
        found: dict[str, Any] = {
            "digests_match": compared.digests_match,
            "loss_max_abs_diff": compared.loss_max_abs_diff,
            "is_verified": compared.is_verified,
            "in_time": took_s <= float(changes["elastic.deadline"]),
            "groups": [one.markets for one in run.events if isinstance(one, Started)],
            "orders": [(one.step, one.workers, one.given_back) for one in run.events if isinstance(one, Ordered)],
            "restarts": [(one.cause, one.gap_s, one.steps_lost) for one in run.ledger.restarts],
            "market_dollars": run.ledger.market_dollars,
            "nodes_by_step": [one for place, one in enumerate(seen) if place == 0 or seen[place - 1][1] != one[1]],
            "leftovers": kept,
            "alone_s": alone_s,
            "took_s": took_s,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
