"""What clouds say of a node's end, read right or refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.preemption.notices import (
    Notice,
    parse_aws_notice,
    parse_aws_rebalance,
    parse_azure_notice,
    parse_gcp_notice,
    parse_notice_file,
)

NOW = 1_795_249_320.0  # 2026-11-21T08:22:00Z


def azure(*events: dict[str, object]) -> str:
    return json.dumps({"DocumentIncarnation": 2, "Events": list(events)})


def event(**changes: object) -> dict[str, object]:
    usual = {"EventId": "f0", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["node-3"]}
    return {**usual, "EventStatus": "Scheduled", "NotBefore": "Sat, 21 Nov 2026 08:22:30 GMT", **changes}


def test_aws_says_when_and_what() -> None:
    said = parse_aws_notice('{"action": "terminate", "time": "2026-11-21T08:24:00Z"}')
    assert said == Notice(NOW + 120, "AWS will terminate the spot instance")
    assert parse_aws_rebalance('{"noticeTime": "2026-11-21T08:22:00Z"}').at_s == NOW + 600


def test_gcp_gives_thirty_seconds() -> None:
    notice = parse_gcp_notice("TRUE\n", NOW)
    assert notice is not None
    assert notice.at_s == NOW + 30
    assert parse_gcp_notice("FALSE", NOW) is None


@pytest.mark.parametrize(
    ("events", "left_s"),
    [
        ([], None),
        ([event()], 30),
        ([event(Resources=["node-4"])], None),
        ([event(EventType="Freeze")], None),
        ([event(EventType="Terminate", NotBefore="")], 0),
        ([event(NotBefore="Sat, 21 Nov 2026 08:30:00 GMT"), event(EventType="Reboot")], 30),
        (["what", event()], 30),
    ],
)
def test_azure_counts_what_takes_this_machine_away(events: list[dict[str, object]], left_s: float | None) -> None:
    found = parse_azure_notice(azure(*events), "node-3", NOW)
    assert (None if found is None else found.at_s - NOW) == left_s


def test_a_file_counts_from_its_time_and_expires() -> None:
    """A file counts from when it was written and not for ever."""
    assert parse_notice_file("25", NOW, NOW + 5) == Notice(NOW + 25, "a notice was left in a file")
    assert parse_notice_file("  \n", NOW, NOW) == Notice(NOW + 30, "a notice was left in a file")
    assert parse_notice_file("25", NOW, NOW + 25) is None


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e9"])
def test_a_file_that_says_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"between|seconds"):
        parse_notice_file(text, NOW, NOW)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["action", "time", "noticeTime", "Events"]
AZURE = ["EventType", "Resources", "NotBefore"]
USUAL = st.sampled_from([event()[name] for name in AZURE] + ["", "Sat, 21 Nov 99999999999999999999 08:22:30 GMT"])


def says_nothing_or_refuses(answer: str) -> None:
    for read in (
        parse_aws_notice,
        parse_aws_rebalance,
        lambda text: parse_gcp_notice(text, NOW),
        lambda text: parse_azure_notice(text, "node-3", NOW),
    ):
        try:
            notice = read(answer)
        except ValueError as error:
            said = str(error)
        else:
            said = ""
            assert notice is None or notice.at_s > -1e12
        assert len(said) < 1000


@pytest.mark.parametrize("name", ["time", "noticeTime"])
def test_a_long_time_is_shown_in_part(name: str) -> None:
    says_nothing_or_refuses(json.dumps({name: "9" * 100_000}))
    events = [{"EventType": "Preempt", "Resources": ["node-3"], "NotBefore": "9" * 100_000}]
    says_nothing_or_refuses(json.dumps({"Events": events}))
    with pytest.raises(ValueError, match="seconds: 'xxx") as refused:
        parse_notice_file("x" * 100_000, NOW, NOW)
    assert len(str(refused.value)) < 1000


@given(st.text(max_size=60) | ANYTHING.map(json.dumps))
def test_nonsense_is_a_value_error(answer: str) -> None:
    says_nothing_or_refuses(answer)


@given(
    st.dictionaries(
        st.sampled_from(NAMES), ANYTHING | st.lists(st.dictionaries(st.sampled_from(AZURE), USUAL | ANYTHING))
    )
)
def test_a_document_of_the_wrong_kind_is_a_value_error(found: dict[str, object]) -> None:
    """A document of the wrong kind is a value error or says nothing."""
    says_nothing_or_refuses(json.dumps(found))


@pytest.mark.parametrize("answer", ["[" * 60_000, '{"Events":' * 60_000, "{" * 60_000])
def test_a_document_nested_too_deeply_is_a_value_error(answer: str) -> None:
    says_nothing_or_refuses(answer)


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"Resources": None}, False),
        ({"Resources": "node-3"}, False),
        ({"Resources": {"node-3": 1}}, False),
        ({"EventType": ["Preempt"]}, False),
        ({"EventType": None}, False),
        ({"NotBefore": 5}, True),
        ({"NotBefore": ["Sat, 21 Nov 2026 08:22:30 GMT"]}, True),
        ({"NotBefore": "Sat, 21 Nov 99999999999999999999 08:22:30 GMT"}, True),
    ],
)
def test_an_azure_event_of_wrong_types_is_refused_or_not_ours(changes: dict[str, object], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ValueError, match=r"time|text"):
            parse_azure_notice(azure(event(**changes)), "node-3", NOW)
    else:
        assert parse_azure_notice(azure(event(**changes)), "node-3", NOW) is None
