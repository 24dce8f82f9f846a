"""Take up new datasets while a run trains: it saves and stops at a step that its workers agree on, and resumes with them.

index has an entry that the run has not -> ask for a stop -> saved at step N -> record from step N on -> the same workers
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from springtide.config import Config
from springtide.elastic import Interrupt
from springtide.errors import SpringtideError
from springtide.on_ray.train.worker_lender import workers_of
from springtide.run.folder import Run
from springtide.run.take_up import read_take_ups
from springtide.shards import has_more_entries
from springtide.store import Folder

LOOK_S = 60.0
"""Time between two looks at the index, one request each [s]. A take-up costs a restart, so it comes no more often than this."""
_END_S = 5.0
_log = logging.getLogger(__name__)


class DatasetWatcher:
    """Asks a run to stop when its index has new datasets. The same workers then train on."""

    def __init__(self, config: Config) -> None:
        self.workers = workers_of(config)

    def __enter__(self) -> DatasetWatcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.workers.end()

    @contextlib.contextmanager
    def watching(self, config: Config, run: Run) -> Iterator[threading.Event]:
        """Look at the index for the block, in a thread. Yields an event that is set when the run is asked to stop. Warns of an
        index that cannot be read; the run trains on."""
        asked, ended = threading.Event(), threading.Event()
        index, known = Folder(config.stream.follow), sum(len(one.datasets) for one in read_take_ups(run.folder))

        def look() -> None:
            warned = False
            while not ended.wait(LOOK_S):
                try:
                    if has_more_entries(index, known) and not ended.is_set():
                        asked.set()
                        self.workers.ask(Interrupt.STOP)  # again at the next look: the run may just be starting
                except (OSError, SpringtideError) as error:
                    if not warned:
                        _log.warning("%s: no new datasets are taken up for now (%s)", config.stream.follow, error)
                    warned = True

        thread = threading.Thread(target=look, name="springtide-take-up", daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            ended.set()
            thread.join(_END_S)  # a store that does not answer must not hold up the end
