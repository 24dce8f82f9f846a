"""Choose the MLflow server of a run. Credentials in the environment are sent only to a server that the user has named."""

from __future__ import annotations

import netrc
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from springtide.config import Config
from springtide.errors import ConfigError, explain
from springtide.storage import Folder
from springtide.tracking.mlflow_client import OFF, default_uri

_FIELD = "track.mlflow_uri"
_URI = "MLFLOW_TRACKING_URI"
_CREDENTIALS = (
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH"),
    *("MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH"),
)
"""Environment variables with passwords and tokens that MLflow's clients send to whichever server is configured."""
_CREDENTIALS_FILE = Path("~/.mlflow/credentials")
_LOCAL, _HTTP = ("", "file", "sqlite", "databricks"), ("http", "https")
"""URI schemes that a config may name without the user's consent: local ones, and HTTP ones after a check for credentials. The
host of a ``databricks`` URI comes from the user's profile, so it counts as local. Every other scheme is a plug-in or a
database: its URI may load a driver, read a file of this machine, or get a password from a file."""
_AMBIGUOUS = re.compile(r"[\s\\\x00-\x1f\x7f]")
"""Characters that programs parse differently when they search a URL for its host: for ``http://a\\@b`` some programs connect to
a and others to b."""
_Server = tuple[str, str, int | None]
_named: set[_Server] = set()


def name_server(uri: str) -> None:
    """Record that the user has typed ``uri`` on the command line, so that credentials may be sent to its server."""
    _named.add(_server_of(uri))


def mlflow_uri(config: Config, given: str = "", must_be_named: bool = False) -> str:
    """Return the MLflow URI for a run. It may contain a password, so it must not be written to a file.

    Args:
        config: settings of the run; its file may come from somebody else, who must not get the user's credentials.
        given: URI that the caller chooses; empty: none.
        must_be_named: refuse a server that only the config names, even if it would get no credentials. Needed where the
            server's answers decide to which place MLflow writes files.

    Returns:
        The first of these that is set: ``given``, the config's URI, the environment's URI. If none is set, the URI of a sqlite
        file next to the runs.

    Raises:
        ConfigError: only the config names the server, and either the server would get credentials from the environment or
            ``must_be_named`` is set.
    """
    # make one retry only, with a short timeout: by default MLflow's client would retry an unreachable server for minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    _pass_proxies_by()
    chosen = given or config.track.mlflow_uri
    if chosen and not given:
        _check_named(chosen, must_be_named)
    return chosen or os.environ.get(_URI, "") or default_uri(Folder(config.run.root))


def _pass_proxies_by() -> None:
    """If the environment names a proxy, exempt this machine from it by ``no_proxy``: MLflow's and the stores' clients must
    connect to local servers directly, because the proxy cannot reach servers on this machine."""
    if not any(
        os.environ.get(name) or os.environ.get(name.upper()) for name in ("http_proxy", "https_proxy", "all_proxy")
    ):
        return
    passed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if passed.strip() != "*":
        both = ",".join(
            dict.fromkeys(filter(None, [*passed.replace(" ", "").split(","), "localhost", "127.0.0.1", "::1"]))
        )
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = both


def _check_named(uri: str, must_be_named: bool) -> None:
    server = _server_of(uri)
    if uri == OFF or server in _named or server == _server_of(os.environ.get(_URI, "")):
        return
    remedy = f"name it yourself: --{_FIELD} URI, or {_URI}=URI (in Python also train(tracking_uri=...))"
    scheme = server[0]
    if scheme in _LOCAL:
        return
    if scheme not in _HTTP:
        limit = "may load a driver or a plug-in, or get a password from a file, and only the config names it"
        raise ConfigError(explain(_FIELD, uri, limit, remedy))
    found = [name for name in _CREDENTIALS if os.environ.get(name)]
    if _CREDENTIALS_FILE.expanduser().exists():
        found.append(str(_CREDENTIALS_FILE))
    if _netrc_has(server[1]):
        found.append("an entry of ~/.netrc")
    if found or must_be_named:
        gets = f", which would get {' and '.join(found)}" if found else ""
        raise ConfigError(explain(_FIELD, uri, f"only the config names this server{gets}", remedy))


def _netrc_has(host: str) -> bool:
    """Return True if ``requests`` would send ``host`` a password from the user's netrc file, or if the file is unreadable."""
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, files):
        if os.path.exists(file):
            try:
                return netrc.netrc(file).authenticators(host) is not None
            except (OSError, netrc.NetrcParseError):
                return True
    return False


def _server_of(uri: str) -> _Server:
    """Return scheme, host and port of an HTTP server. For any other URI, such as a database's, return the whole URI in place of
    the host, because its query may also name a host. Raises ConfigError if ``uri`` is not a URI."""
    try:
        found = urlsplit(uri)
        scheme, port = found.scheme.lower(), found.port
    except ValueError as error:
        raise ConfigError(explain(_FIELD, uri, f"is not a URI ({error})", "correct it")) from None
    if scheme not in _LOCAL and _AMBIGUOUS.search(uri):
        raise ConfigError(explain(_FIELD, uri, "has a space, a backslash or a control character", "correct it"))
    return (scheme, found.hostname or "", port) if scheme in _HTTP else (scheme, uri, None)
