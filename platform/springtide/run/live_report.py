"""Rewrite a run's ``report.html`` while the run trains, in a separate process. Reload the page in a browser for new data.

    driver: live_report                     python -m springtide.run.live_report URL
      starts the process  ---------------->   sleeps, reads new lines of the journal, writes the page, sleeps ...
      closes the pipe, or dies  ---------->   finishes the write that is in progress, and ends
      waits until the process has ended, then writes the final report

The process is separate because the driver must act on a killed worker within a second, and must not wait for a shared GIL. It
has the lowest priority and does not import torch. After each page it sleeps 200 times as long as writing the page took, so it
uses at most half a percent of a core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.storage import Folder

PROGRAM = ("-m", "springtide.run.live_report")
"""Command-line arguments of Python that start the process which writes the report."""
EVERY_S = 30.0
"""Shortest pause before each write of the HTML report, also before the first [s]."""
TIMES = 200
"""Shortest pause before each rewrite of the HTML report, as a multiple of the duration of the last rewrite."""
_END_S = 5.0
"""How long a write in progress may continue after the ``with`` block, or the driver, has ended [s]."""


@contextlib.contextmanager
def live_report(run: Folder, say: Callable[[str], None]) -> Iterator[None]:
    """Keep the report of ``run`` up to date, in a separate process, during the ``with`` block.

    On exit the process has ended, so it cannot overwrite a report that the caller writes afterwards. If the process fails, no
    error is raised in the ``with`` block. Instead, ``say`` receives one line about the first failure.

    Args:
        run: the run's folder.
        say: function that prints a line; called from a thread.
    """
    # start Python as in checkpoint/writer_process.py. Pass on this process's sys.path, which may differ from the default. -P
    # keeps the working directory out of sys.path, so that no file there shadows a module
    command = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, "-P", *PROGRAM, run.url]
    try:
        # start it in its own session, so that Ctrl-C in the terminal interrupts only the driver, not the new process
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        say(f"report.html is written only when the run ends: {error}")
        yield
        return
    assert process.stdin is not None
    assert process.stdout is not None
    lines, is_over = process.stdout, threading.Event()

    def listen() -> None:
        problem = lines.readline().decode(errors="replace").strip()
        if not is_over.is_set():
            problem = problem or f"its process ended with status {process.wait()}"
            say(f"report.html cannot be written while the run trains: {problem}")

    listener = threading.Thread(target=listen, name="springtide-live-report", daemon=True)
    listener.start()
    try:
        yield
    finally:
        is_over.set()
        process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S + 1.0)
        finally:  # kill it also if the store hangs or Ctrl-C comes again: the caller writes the report next
            process.kill()
            process.wait()
            listener.join()
            lines.close()


def main(url: str) -> None:
    """Rewrite the report of the run at ``url`` until standard input is closed. A failed write is tried again later. Only the
    first failure is printed."""
    os.nice(19)
    with contextlib.suppress(OSError):  # on Linux: if memory runs out, the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable()  # the driver prints one line about the first failure; more lines would only repeat it
    writing = threading.Lock()
    threading.Thread(target=_end_with_input, args=(writing,), daemon=True).start()
    time.sleep(EVERY_S)  # a short run ends during this sleep and saves the slow imports below

    from springtide.run.folder import REPORT, Run
    from springtide.run.page_facts import facts_of
    from springtide.run.report.run_page import render
    from springtide.storage import Folder
    from springtide.tracking.journal_reader import JournalReader

    run = Run(Folder(url))
    reader, is_new, has_failed = JournalReader(run.folder), False, False
    while True:
        begun_s = time.monotonic()
        try:
            is_new = reader.read() or is_new
            if is_new:
                text = render(run.id, reader.timeline, facts_of(run))
                with writing:
                    run.folder.write(REPORT, text)
                is_new = False
        except Exception as error:
            if not has_failed:
                print(f"{type(error).__name__}: {error}", flush=True)
            has_failed = True
        time.sleep(max(EVERY_S, TIMES * (time.monotonic() - begun_s)))


def _end_with_input(writing: threading.Lock) -> None:
    """Wait until standard input is closed, then exit this process. A write of the report that is in progress may continue for
    ``_END_S`` seconds."""
    while os.read(0, 1):
        pass
    writing.acquire(timeout=_END_S)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
