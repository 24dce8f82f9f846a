"""Masks of email and IP addresses: what is masked, what stays, and hostile text."""

from __future__ import annotations

import pytest

from springtide.config.data import CorpusConfig
from springtide.corpus import clean
from springtide.corpus.cleaning import mask

EMAIL, IPV4, IPV6 = "email@example.com", "192.0.2.1", "2001:db8::1"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("jo@mail.net", EMAIL),
        ("<jo.o'neil+x@a-b.co.uk>,", f"<{EMAIL}>,"),
        ("mailto:jo_1@mail.net?subject=x", f"mailto:{EMAIL}?subject=x"),
        ("jo@mail.net.", f"{EMAIL}."),
        ("jo@localhost and @name and a@ b.com", "jo@localhost and @name and a@ b.com"),
        ("8.8.8.8, (1.1.1.1).", f"{IPV4}, ({IPV4})."),
        ("127.0.0.1 10.1.2.3 192.168.0.1 169.254.1.1", "127.0.0.1 10.1.2.3 192.168.0.1 169.254.1.1"),
        ("version 1.2.3.4.5, 300.1.1.1, 8.8.8.8888", "version 1.2.3.4.5, 300.1.1.1, 8.8.8.8888"),
        ("at 2606:4700:4700::1111: open", f"at {IPV6}: open"),
        ("[2606:4700:4700:0:0:0:0:1111]:80", f"[{IPV6}]:80"),
        (
            "2001:db8::2 fe80::1 ::1 std::vector 20:30:45 2023:10",
            "2001:db8::2 fe80::1 ::1 std::vector 20:30:45 2023:10",
        ),
    ],
)
def test_addresses_of_others_are_masked(text: str, masked: str) -> None:
    found = mask(text, ["emails", "ip_addresses"])
    assert found.text == masked
    assert sum(found.edits.values()) == masked.count(EMAIL) + masked.count(IPV4) + masked.count(IPV6)
    assert mask(found.text, ["ip_addresses"]).edits == {}  # what stands in their place is not public


def test_only_the_kinds_that_are_named_are_masked_and_counted() -> None:
    text = "jo@mail.net from 8.8.8.8 and 8.8.4.4"
    assert clean(text, CorpusConfig()).text == text
    assert clean(text, CorpusConfig(pii=("emails",))) == (
        f"{EMAIL} from 8.8.8.8 and 8.8.4.4",
        "",
        {"pii: emails masked": 1},
    )
    both = clean(text, CorpusConfig(pii=("emails", "ip_addresses")))
    assert both.edits == {"pii: emails masked": 1, "pii: ip_addresses masked": 2}


@pytest.mark.parametrize("unit", ["a", "a.", "@", "a@", "a@a.", "1.", "1.1.1.1.", "2000:", ":", "2606::1 "])
def test_hostile_text_takes_linear_time(unit: str) -> None:
    """A pattern that is quadratic would take hours on this megabyte."""
    text = unit * (2**20 // len(unit))
    mask(text + "@", ["emails", "ip_addresses"])
