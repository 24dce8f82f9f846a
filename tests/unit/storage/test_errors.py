"""Whatever the client of a store raises, a folder raises OSErrors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from springtide.storage import Folder


class HttpError(Exception):
    """As gcsfs's, which is no OSError and has the answer's code."""

    __module__ = "gcsfs.retry"

    def __init__(self, code: int) -> None:
        super().__init__(f"{code}\nand a long page")
        self.code = code


class HttpResponseError(Exception):
    """As azure's."""

    __module__ = "azure.core.exceptions"


class ResourceExistsError(HttpResponseError):
    """As azure's."""

    __module__ = "azure.core.exceptions"


class EndpointConnectionError(Exception):
    """As botocore's."""

    __module__ = "botocore.exceptions"


class Away:
    """A file system whose every method raises."""

    def __init__(self, error: Exception) -> None:
        self.error, self.protocol = error, "gs"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*_: Any, **__: Any) -> Any:
            raise self.error

        return method


CALLS: list[Callable[[Folder], Any]] = [
    lambda folder: folder.read("a"),
    lambda folder: folder.open("a"),
    lambda folder: folder.read_range("a", 0, 1),
    lambda folder: list(folder.stream("a", 0, 1)),
    lambda folder: folder.write("a", b""),
    lambda folder: folder.put("a", [memoryview(bytes(2**20))] * 17),
    lambda folder: folder.create("a", b""),
    lambda folder: folder.exists("a"),
    lambda folder: folder.size("a"),
    lambda folder: folder.names(),
    lambda folder: folder.files(),
    lambda folder: folder.remove("a"),
    lambda folder: folder.check_writable(),
]


def away(error: Exception) -> Folder:
    folder = Folder("memory:///run")
    folder.fs = Away(error)
    return folder


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [HttpError(503), HttpResponseError("busy"), EndpointConnectionError("no route")])
def test_a_store_that_is_away_is_an_os_error_that_names_the_file(
    call: Callable[[Folder], Any], error: Exception
) -> None:
    with pytest.raises(OSError, match=rf"/run.*{type(error).__name__}: [^\n]*$") as found:
        call(away(error))
    assert type(found.value) is OSError
    assert found.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HttpError(404), FileNotFoundError),
        (HttpError(403), PermissionError),
        (HttpError(412), FileExistsError),
        (ResourceExistsError("there"), FileExistsError),
    ],
)
def test_errors_that_mean_something_keep_their_meaning(error: Exception, kind: type[OSError]) -> None:
    with pytest.raises(kind):
        away(error).create("a", b"")


def test_what_is_not_there_can_be_removed_and_lists_nothing() -> None:
    gone = away(HttpError(404))
    gone.remove("a")
    assert gone.names() == []


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(KeyError):
        away(KeyError("a")).read("a")
