"""A user's own filter: ``corpus.filter`` names a function that returns a text, changed or not, or None to drop it."""

from __future__ import annotations

from springtide.config.code import find_code
from springtide.corpus.verdict import Verdict
from springtide.errors import ConfigError, explain

_FIELD = "corpus.filter"
_SHOWN = 80


def own_filter(source: str, text: str) -> Verdict:
    """Return what the function that ``source`` names makes of a text. It is called once for each document, in any process.
    The caller has checked that this code may run (``config.check_trusted``).

    Raises:
        ConfigError: it cannot be imported, raises an error, or returns neither a text nor None.
    """
    function = find_code(_FIELD, source)
    shown = f"a text that begins {text[:_SHOWN]!r}"
    try:
        found = function(text)
    except Exception as error:
        problem = f"raised {type(error).__name__} ({error}) for {shown}"
        raise ConfigError(explain(_FIELD, source, problem, "mend it")) from error
    if found is None or found == "":
        return Verdict("", source)
    if not isinstance(found, str):
        problem = f"returned a {type(found).__name__} for {shown}"
        raise ConfigError(explain(_FIELD, source, problem, "return the text, or None to drop it"))
    return Verdict(found, "", {} if found == text else {f"{source}: changed": 1})
