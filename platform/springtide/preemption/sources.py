"""Sources of this machine's preemption notices, polled twice a second.

    metadata service or file --every 0.5 s--> NoticeSource --> on_notice(notice)

A source that is slow, gone or sends nonsense is polled again.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from springtide.elastic.notices import Notice, notice_files, parse_notice_file
from springtide.errors import look_up
from springtide.preemption.metadata import METADATA, MetadataService, cloud_here

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_FILE_BYTES = 100
_SILENT_LOOKS = 20
"""Consecutive failed polls before a source counts as silent: ten seconds, or more if it is slow."""


def watched_files(pattern: str, node: str) -> list[Path]:
    """Return the files that a watcher on ``node`` polls, as this process's user."""
    return [Path(name.replace("{node}", node)) for name in notice_files(pattern, os.getuid())] if pattern else []


def left_in(path: Path) -> Notice | None:
    """Return the notice in a file, None if there is no file. Raises ValueError if it is not a regular file (opening a FIFO
    would wait for its writer), PermissionError if a user who is neither this one nor root may have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a link: name the file itself (elastic.notice_file)") from None
        raise
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to user {os.getuid()} or root")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.filemode(found.st_mode)
            raise PermissionError(f"{path} is not obeyed: other users may write to it ({mode}); chmod go-w it")
        return parse_notice_file(file.read(_FILE_BYTES).decode(), found.st_mtime, time.time())


class NoticeSource:
    """One service or file that is polled for notices."""

    def __init__(self, name: str, ask: Callable[[], Notice | None], on_notice: Callable[[Notice], None]) -> None:
        self.name, self._ask, self._on_notice = name, ask, on_notice
        self._failed_looks = 0
        self._warned: set[type[BaseException]] = set()
        self._last_problem = ""

    @property
    def problem(self) -> str:
        """Why it has not answered for a while; empty if it answers."""
        return self._last_problem if self._failed_looks >= _SILENT_LOOKS else ""

    def look(self) -> None:
        """Poll once, and pass on a notice. Whatever fails is tried again at the next poll."""
        try:
            notice = self._ask()
            if notice is not None:
                self._on_notice(notice)
        except Exception as error:  # a server, a parser or Ray may raise anything, and the next poll may work
            self._failed_looks += 1
            self._last_problem = f"{self.name}: {type(error).__name__}: {str(error)[:200]}"
            if type(error) not in self._warned:  # log each kind once, until a poll works again
                self._warned.add(type(error))
                _log.warning("%s; it is polled again", self._last_problem)
        else:
            self._failed_looks, self._last_problem = 0, ""
            self._warned.clear()


def open_sources(
    cloud: str, metadata_url: str, file: str, rebalance: bool, node: str, on_notice: Callable[[Notice], None]
) -> list[NoticeSource]:
    """Return the sources of this machine's notices, as ``elastic.notices`` and its neighbours name them.

    Args:
        cloud: ``auto`` detects it; a machine of no known cloud has no metadata service.
        metadata_url: URL of the metadata service; empty is the clouds' own.
        file: a path, as ``elastic.notice_file``; empty reads none.
        rebalance: whether AWS's rebalance recommendation counts, too.
        node: the name of this node.
        on_notice: receives each notice.

    Raises:
        ConfigError: ``cloud`` is not a value of ``elastic.notices``.
    """
    service = MetadataService(metadata_url or METADATA)
    asks: dict[str, Callable[[], Notice | None]] = {
        "aws": lambda: service.aws(rebalance),
        "gcp": service.gcp,
        "azure": service.azure,
    }
    names = {**{name: name for name in ("file", "off", *asks)}, "auto": cloud_here()}
    cloud = look_up(names, "elastic.notices", cloud)
    chosen = {cloud: asks[cloud]} if cloud in asks else {}
    for name, path in zip(("file", "root's file"), watched_files(file, node), strict=False):
        chosen[name] = functools.partial(left_in, path)
    return [NoticeSource(name, ask, on_notice) for name, ask in chosen.items()]


def poll(sources: Iterable[NoticeSource]) -> None:
    """Poll each source in a thread of its own, to the end of this process: one that is slow does not delay another."""
    for source in sources:
        threading.Thread(target=_poll, args=(source,), name=f"springtide-notice-{source.name}", daemon=True).start()


def _poll(source: NoticeSource) -> None:
    while True:
        begin = time.monotonic()
        source.look()
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - begin)))  # between polls
