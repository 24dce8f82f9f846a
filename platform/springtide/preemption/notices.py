"""Parse preemption notices: announcements of a cloud or a scheduler that a node will be taken away.

    service      request                                       no notice            notice
    AWS          spot/instance-action (IMDSv2)                 404                  action and time
                 events/recommendations/rebalance              404                  time of the advice; the node may stay
    GCP          instance/preempted                            FALSE                TRUE, thirty seconds before the loss
    Azure        scheduledevents                               no event of this VM  Preempt, Terminate, Redeploy, Reboot
    a file       text that a script on the node writes there   no file              seconds to the loss; an empty file: 30

Sources: AWS EC2 User Guide "Spot Instance interruption notices", Google Compute Engine "Spot VMs: preemption process",
Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import datetime as dt
import email.utils
import json
from typing import Any, NamedTuple

GCP_NOTICE_S = 30.0
REBALANCE_S = 600.0
"""Assumed time from a rebalance recommendation of AWS to the loss of the node [s]. AWS gives no time, and may keep the node."""
FILE_NOTICE_S = 30.0
_TAKE_AWAY = {"Preempt", "Terminate", "Redeploy", "Reboot"}
_LONGEST_S = 7 * 24 * 3600.0
_SHOWN = 80
_MOST_AHEAD_S = 24 * 3600.0
"""Largest difference between a service's clock and this machine's clock that is corrected [s]. A larger difference means that
one of the clocks is not set, so the difference is ignored."""


class Notice(NamedTuple):
    """A notice that a node will be taken away."""

    at_s: float
    """When the node will be taken away, in seconds since 1970."""
    why: str


class TimeLeft(NamedTuple):
    """Time until a node is taken away. The process that polls for notices on the node reports it to the driver. The clocks of
    driver and node may differ, so the driver counts ``left_s`` from when the report arrives."""

    deadline_ms: int
    """When the node is taken away, by the node's clock, as reported to Ray [ms since 1970]."""
    left_s: float
    """Time left until the node is taken away, by the node's clock [s]."""


def clock_ahead_s(date: str, sent_s: float, received_s: float) -> float:
    """Return how far a service's clock is ahead of this machine's clock [s]; 0 if the clocks may
    agree or cannot be compared.

    Args:
        date: the Date header of the service's HTTP response, in whole seconds.
        sent_s, received_s: when the request was sent and the answer received, by this machine's clock, in seconds since 1970.

    >>> clock_ahead_s("Sat, 21 Nov 2026 08:22:30 GMT", 1795249340.0, 1795249340.1)
    11.0
    >>> clock_ahead_s("Sat, 21 Nov 2026 08:22:30 GMT", 1795249350.5, 1795249350.6)
    0.0
    """
    try:
        shown_s = _seconds(email.utils.parsedate_to_datetime(date))
    except (ValueError, OverflowError):
        return 0.0
    least_s, most_s = shown_s - received_s, shown_s + 1.0 - sent_s
    if least_s <= 0 <= most_s or abs(most_s) > _MOST_AHEAD_S:
        return 0.0
    return most_s  # the largest possible offset: a smaller one could overestimate the time left until the loss


def parse_aws_notice(answer: str) -> Notice:
    """Parse AWS's response to a request for spot/instance-action, which announces the loss of a spot instance. Raises
    ValueError if the text has another form."""
    found = _object(answer)
    return Notice(_time(found.get("time")), f"AWS will {_word(found.get('action'))} the spot instance")


def parse_aws_rebalance(answer: str) -> Notice:
    """Parse a rebalance recommendation of AWS. AWS gives no time of the loss, so the notice assumes ``REBALANCE_S`` after the
    recommendation. Raises ValueError if the text is no recommendation."""
    made_s = _time(_object(answer).get("noticeTime"))
    return Notice(made_s + REBALANCE_S, "AWS recommends to rebalance: the spot instance may go")


def parse_gcp_notice(answer: str, now: float) -> Notice | None:
    """Parse a response of GCP's instance/preempted: a notice for TRUE, None for FALSE. Raises ValueError for other text."""
    match answer.strip():
        case "TRUE":
            return Notice(now + GCP_NOTICE_S, "GCP preempts the instance")
        case "FALSE":
            return None
        case other:
            raise ValueError(f"instance/preempted is {_shown(other)}, neither TRUE nor FALSE")


def parse_azure_notice(answer: str, machine: str, now: float) -> Notice | None:
    """Parse Azure's response to a request for scheduledevents. Returns the earliest event that takes ``machine`` away, None if
    there is none. Raises ValueError if the text has no list of events."""
    events = _object(answer).get("Events")
    if not isinstance(events, list):
        raise ValueError(f"scheduledevents has no list of Events: {_shown(answer)}")
    notices = [
        Notice(_not_before(event.get("NotBefore"), now), f"Azure will {event['EventType'].lower()} the machine")
        for event in events
        if isinstance(event, dict) and _takes_away(event, machine)
    ]
    return min(notices, default=None)


def _takes_away(event: dict[str, Any], machine: str) -> bool:
    kind, machines = event.get("EventType"), event.get("Resources")
    return isinstance(kind, str) and kind in _TAKE_AWAY and isinstance(machines, list) and machine in machines


def parse_notice_file(text: str, written_s: float, now: float) -> Notice | None:
    """Parse the text of a notice file: a number of seconds. The node is taken away this long after ``written_s``, the time when
    the file was written. Returns None if the node should be gone before ``now``: the file is left over from before a restart.
    Raises ValueError if the text is not a number from 0 to a week."""
    try:
        left_s = float(text) if text.strip() else FILE_NOTICE_S
    except ValueError:
        raise ValueError(f"not a number of seconds: {_shown(text)}") from None
    if not 0 <= left_s <= _LONGEST_S:
        raise ValueError(f"{left_s:g} s is not between 0 and a week")
    at_s = written_s + left_s
    return Notice(at_s, "a notice was left in a file") if at_s > now else None


def notice_files(pattern: str, uid: int) -> list[str]:
    """Return the paths of the notice files that apply to the user ``uid``: the user's own file, then root's file, which applies
    to every user.

    >>> notice_files("/tmp/springtide-notice-{uid}", 1000)
    ['/tmp/springtide-notice-1000', '/tmp/springtide-notice-0']
    """
    return list(dict.fromkeys(pattern.replace("{uid}", str(one)) for one in (uid, 0)))


def _object(answer: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except RecursionError:
        raise ValueError(f"nested too deeply: {_shown(answer)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {_shown(answer)}")
    return found


def _shown(value: Any) -> str:
    """Return the beginning of an unexpected value, which may be long, for an error message."""
    return repr(value[:_SHOWN] if isinstance(value, str) else value)[: 4 * _SHOWN]


def _word(value: Any) -> str:
    return value if isinstance(value, str) and value.isalpha() else "take away"


def _time(text: Any) -> float:
    """Parse a time such as 2026-11-21T08:22:00Z [s since 1970]."""
    if not isinstance(text, str):
        raise ValueError(f"not a time: {_shown(text)}")
    try:
        return _seconds(dt.datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        raise ValueError(f"not a time: {_shown(text)}") from None


def _not_before(text: Any, now: float) -> float:
    """Parse the NotBefore of an Azure event, such as Sat, 21 Nov 2026 08:22:00 GMT [s since 1970]. Returns ``now`` for empty
    text, because the event has then begun."""
    if not text:
        return now
    if not isinstance(text, str):
        raise ValueError(f"NotBefore is not text: {_shown(text)}")
    try:
        return _seconds(email.utils.parsedate_to_datetime(text))
    except (ValueError, OverflowError):
        raise ValueError(f"not a time: {_shown(text)}") from None


def _seconds(time: dt.datetime) -> float:
    """Return seconds since 1970; a time without a zone is UTC, as clouds write it."""
    return (time if time.tzinfo else time.replace(tzinfo=dt.UTC)).timestamp()
