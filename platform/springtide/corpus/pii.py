"""Masks for personal data: email addresses, and public IP addresses of both versions.

The kinds are those that FineWeb masks (Penedo et al., 2406.17557). What stands in their place is reserved for examples by RFC
2606, 5737 and 3849. Private and reserved IP addresses stay. Every pattern has a bounded length: the time is linear.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable

from springtide.corpus.verdict import Verdict

_EMAIL = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}"
)
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)")
_IPV6 = re.compile(r"(?<![0-9A-Za-z:])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{1,34}(?<!:)(?![0-9A-Za-z])")
"""Global unicast addresses begin with a 2 or 3, which times and names of C++ seldom do."""


def _email(text: str) -> tuple[str, int]:
    return _EMAIL.subn("email@example.com", text) if "@" in text else (text, 0)


def _ip_addresses(text: str) -> tuple[str, int]:
    masked = 0

    def replace(found: re.Match[str], mask: str) -> str:
        nonlocal masked
        try:
            is_public = ipaddress.ip_address(found.group()).is_global
        except ValueError:
            is_public = False
        masked += is_public
        return mask if is_public else found.group()

    text = _IPV4.sub(lambda found: replace(found, "192.0.2.1"), text)
    return _IPV6.sub(lambda found: replace(found, "2001:db8::1"), text), masked


_MASKS: dict[str, Callable[[str], tuple[str, int]]] = {"emails": _email, "ip_addresses": _ip_addresses}


def mask(text: str, kinds: Iterable[str]) -> Verdict:
    """Return the text with personal data of these kinds masked: ``emails``, ``ip_addresses``.

    >>> mask("write to jo@mail.example.net or 8.8.8.8, not to 127.0.0.1", ["emails", "ip_addresses"]).text
    'write to email@example.com or 192.0.2.1, not to 127.0.0.1'
    """
    edits: dict[str, int] = {}
    for kind in kinds:
        text, count = _MASKS[kind](text)
        edits |= {f"pii: {kind} masked": count} if count else {}
    return Verdict(text, "", edits)
