"""What is checked of a run's deadline before anything is written."""

from __future__ import annotations

import time

from springtide.config import Config
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run
from springtide.tracking.journal import stream_journal
from springtide.tracking.ledger import SPOT

_DEADLINE = "elastic.deadline"
_MOST_S = 366 * 86400.0
"""A deadline that is further away is a mistake, such as a wrong year [s]."""
_MARKETS = ("on-demand", *SPOT)
_LABEL = "ray start --labels ray.io/market-type=spot, or on-demand"


def begun_s(run: Run) -> float:
    """Return when a run was first started, seconds since 1970; now, if it was not."""
    first = next(
        stream_journal(run.folder), None
    )  # of the first segment that has one: a long journal takes seconds to read
    return time.time() if first is None else first.time_s


def check_deadline(config: Config, run: Run) -> None:
    """Raise ConfigError if the run's deadline is over or far away, a price is missing, or the workers are not its own."""
    deadline, track = config.elastic.deadline, config.track
    if not deadline.is_set:
        return
    left_s = deadline.at_s(begun_s(run)) - time.time()
    if left_s <= 0:
        over = f"is over since {-left_s / 3600:.1f} h" if left_s < -3600 else f"is over since {-left_s:.0f} s"
        raise ConfigError(explain(_DEADLINE, str(deadline), over, "give a later one, or 0 to train without one"))
    if left_s > _MOST_S:
        limit = f"is {left_s / 86400:.0f} days away, more than a year"
        raise ConfigError(explain(_DEADLINE, str(deadline), limit, "give an earlier one, or 0 to train without one"))
    for field, price in (("track.price", track.price), ("track.spot_price", track.spot_price)):
        if not price:
            remedy = "give the dollars per worker and hour on demand and on spot nodes"
            raise ConfigError(
                explain(field, price, f"is missing, and {_DEADLINE} = {str(deadline)!r} weighs costs", remedy)
            )
    if track.spot_price >= track.price:
        limit = f"is not less than track.price ({track.price:g}), so spot nodes save nothing"
        raise ConfigError(explain("track.spot_price", track.spot_price, limit, f"correct it, or leave {_DEADLINE} out"))
    if config.run.queue:
        limit = f"shares the nodes of both markets with other runs, whoever orders them under {_DEADLINE}"
        raise ConfigError(explain("run.queue", config.run.queue, limit, "leave one of the two out"))


def remarks_on_markets(config: Config) -> list[str]:
    """Return what the user should know of the markets of the connected cluster's nodes, if the run has a deadline."""
    if not config.elastic.deadline.is_set:
        return []
    from springtide.ray.cluster.nodes import markets  # Ray loads only when needed

    found = markets()
    unknown = [market for market in found.values() if market not in _MARKETS]
    if not unknown:
        return []
    odd = sorted({market for market in unknown if market})
    what = f"a market that is not known ({', '.join(odd)})" if odd else "no market label"
    return [
        f"{_DEADLINE}: {len(unknown)} of {len(found)} nodes have {what}: they count as spot nodes for the deadline, and cost "
        f"track.price ({_LABEL})"
    ]
