"""Every transition of a save, with a writer that answers as told; then with real writer processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from saving import meta
from scripted import Copies, ScriptedWriter, scripted

from springtide.checkpoint.async_saver import SPARE, AsyncSaver, Closed, Copying, Done, Idle, Writing
from springtide.checkpoint.commit import Committed
from springtide.checkpoint.format import committed
from springtide.checkpoint.retention import Rule
from springtide.storage import Folder

Make = Callable[[Path, Copies], AsyncSaver]
WRITTEN = Committed("step-0000000005", 16, 16)


@pytest.fixture
def copies() -> Iterator[Copies]:
    """Scripted writers and copies."""
    with scripted() as found:
        yield found


def saver_of(run: Path, stage_in: str = "/dev/shm") -> AsyncSaver:
    """The saver of the only rank."""
    return AsyncSaver(Folder(run), 1, 0, 1, stage_in=stage_in, tries=1, rule=Rule(3))


def begin(saver: AsyncSaver, step: int, size: int = 4) -> None:
    """Begin to save one tensor."""
    saver.begin({"weight": torch.full((size,), float(step))}, meta(step), {})


def idle(run: Path, copies: Copies) -> AsyncSaver:
    """A saver after its first save."""
    copies.error = None
    copies.may_end.set()
    saver = saver_of(run)
    begin(saver, 1)
    ScriptedWriter.started[-1].answers = [WRITTEN]
    assert saver.poll(wait=True)
    assert isinstance(saver.state, Idle)
    return saver


def copying(run: Path, copies: Copies) -> AsyncSaver:
    """A saver whose copy goes on until told."""
    saver = idle(run, copies)
    copies.may_end.clear()
    begin(saver, 5)
    assert isinstance(saver.state, Copying)
    return saver


def writing(run: Path, copies: Copies) -> AsyncSaver:
    """A saver whose writer has the job and has not answered."""
    saver = copying(run, copies)
    copies.may_end.set()
    assert isinstance(saver.state, Copying)
    saver.state.handed_over.result(60)
    assert saver.poll() is None
    assert isinstance(saver.state, Writing)
    return saver


def done(run: Path, copies: Copies) -> AsyncSaver:
    """A saver whose outcome nobody has heard."""
    saver = copying(run, copies)
    copies.error = MemoryError("no room")
    copies.may_end.set()
    saver.cancel()
    assert isinstance(saver.state, Done)
    return saver


def closed(run: Path, copies: Copies) -> AsyncSaver:
    """A saver after its end."""
    saver = idle(run, copies)
    saver.end()
    assert isinstance(saver.state, Closed)
    return saver


def test_a_save_is_copied_then_written_then_heard_of_once(tmp_path: Path, copies: Copies) -> None:
    saver = saver_of(tmp_path)
    assert saver.state == Idle()
    saver.start()
    [writer] = ScriptedWriter.started
    assert saver.state == Idle(writer)  # type: ignore[arg-type]
    copies.may_end.clear()
    begin(saver, 5)
    assert saver.busy
    assert saver.poll() is None
    assert isinstance(saver.state, Copying)
    assert writer.heard == ["stage"]  # and no job before the copy is complete
    copies.may_end.set()
    saver.staged()
    saver.state.handed_over.result(60)
    assert saver.poll() is None
    assert isinstance(saver.state, Writing)
    assert writer.heard == ["stage", 5]
    assert saver.busy
    saver.staged()  # the tensors may change already
    writer.answers = [WRITTEN]
    outcome = saver.poll()
    assert outcome
    assert (outcome.step, outcome.written, outcome.error) == (5, WRITTEN, None)
    assert isinstance(saver.state, Idle)
    assert not saver.busy
    assert saver.poll(wait=True) is None
    # the next one uses the same process and buffer
    begin(saver, 10)
    writer.answers = [OSError("the store is full")]
    outcome = saver.poll(wait=True)
    assert outcome
    assert outcome.written is None
    assert str(outcome.error) == "the store is full"
    assert writer.heard == ["stage", 5, 10]
    assert ScriptedWriter.started == [writer]
    saver.close()


def test_a_larger_state_gets_a_larger_buffer(tmp_path: Path, copies: Copies) -> None:
    saver = idle(tmp_path, copies)
    saver._layout._names = []
    begin(saver, 5, size=1000)
    [writer] = ScriptedWriter.started
    writer.answers = [WRITTEN]
    assert saver.poll(wait=True)
    assert writer.heard == ["stage", 1, "stage", 5]
    saver.close()


def test_a_copy_that_fails_fails_the_save_and_nothing_is_written(tmp_path: Path, copies: Copies) -> None:
    saver = copying(tmp_path, copies)
    copies.error = MemoryError("no room")
    copies.may_end.set()
    saver.staged()  # is no error: the outcome is
    outcome = saver.poll(wait=True)
    assert outcome
    assert (outcome.step, outcome.written) == (5, None)
    assert str(outcome.error) == "the state could not be copied to the staging buffer: no room"
    [writer] = ScriptedWriter.started
    assert writer.heard == ["stage", 1]
    # the next save may begin
    copies.error, writer.answers = None, [WRITTEN]
    begin(saver, 10)
    outcome = saver.poll(wait=True)
    assert outcome
    assert outcome.error is None
    saver.close()


@pytest.mark.parametrize("when", [idle, copying, writing])
def test_a_dead_writer_is_replaced_and_fails_one_save(when: Make, tmp_path: Path, copies: Copies) -> None:
    """A writer that dies is replaced and fails only the save it had."""
    saver = when(tmp_path, copies)
    ScriptedWriter.started[0].alive = False
    if when is not idle:
        copies.may_end.set()
        outcome = saver.poll(wait=True)
        assert outcome
        assert (outcome.step, str(outcome.error)) == (5, "the writer process ended with status -9")
        assert isinstance(saver.state, Idle)
        assert saver.state.writer is None
        assert saver.state.stage is not None
    begin(saver, 10)
    other = ScriptedWriter.started[1]
    other.answers = [WRITTEN]
    outcome = saver.poll(wait=True)
    assert outcome
    assert outcome.error is None
    assert other.heard == ["stage", 10]
    saver.close()


def test_a_save_in_the_wrong_state_is_refused(tmp_path: Path, copies: Copies) -> None:
    """A save in a state that does not allow it is refused."""
    under_way = "the saver of rank 0 cannot begin to save step 10: the save of step 5 is under way"
    for make, message in (
        (copying, under_way),
        (writing, under_way),
        (done, "cannot begin to save step 10: poll has not returned the outcome of step 5"),
        (closed, "cannot begin to save step 10: it is closed"),
    ):
        saver = make(tmp_path, copies)
        state = saver.state
        with pytest.raises(RuntimeError, match=message):
            begin(saver, 10)
        with pytest.raises(RuntimeError, match="writer process"):
            saver.start()
        assert saver.state is state
        copies.may_end.set()
        saver.close()


def test_a_cancellation_never_overtakes_the_job(tmp_path: Path, copies: Copies) -> None:
    for make in (idle, closed):
        saver = make(tmp_path, copies)
        saver.cancel()  # nothing to cancel
        saver.close()
    assert not any("cancel" in str(one.heard) for one in ScriptedWriter.started)
    saver = writing(tmp_path, copies)
    saver.cancel()
    assert ScriptedWriter.started[-1].heard[-2:] == [5, "cancel 5"]
    saver.close()
    saver = copying(tmp_path, copies)
    copies.may_end.set()
    saver.cancel()
    assert isinstance(saver.state, Writing)
    assert ScriptedWriter.started[-1].heard[-2:] == [5, "cancel 5"]
    saver.close()


@pytest.mark.parametrize("how", ["close", "end"])
def test_closing_ends_an_idle_writer_and_lets_a_busy_one_finish(how: str, tmp_path: Path, copies: Copies) -> None:
    """Closing leaves or ends an idle writer and lets a busy one finish."""
    for make, is_idle in ((idle, True), (copying, False), (writing, False), (done, True)):
        saver = make(tmp_path, copies)
        copies.may_end.set()
        writer = ScriptedWriter.started[-1]
        getattr(saver, how)()
        assert saver.state == Closed()
        assert not saver.busy
        assert saver.poll() is None
        saver.staged()
        if not is_idle:
            assert writer.heard[-1] == 5  # it has the job of a copy that was under way, too
            assert writer.waited_s == 0  # and answers nobody
        elif how == "end":
            assert writer.waited_s == 30
        else:
            assert writer.heard[-1] == "release"
            assert SPARE.take() is writer  # type: ignore[comparison-overlap]
        heard = list(writer.heard)
        saver.close()
        saver.end()
        assert writer.heard == heard
    saver_of(tmp_path).close()  # nothing was ever started


def test_the_spare_writer_serves_the_next_saver_unless_it_has_died(tmp_path: Path, copies: Copies) -> None:
    idle(tmp_path, copies).close()
    [writer] = ScriptedWriter.started
    second = saver_of(tmp_path)
    second.start()
    assert ScriptedWriter.started == [writer]
    begin(second, 5)
    writer.answers = [WRITTEN]
    assert second.poll(wait=True)
    assert writer.heard == ["stage", 1, "release", "stage", 5]
    second.close()
    writer.alive = False
    third, fourth = saver_of(tmp_path), saver_of(tmp_path)
    third.start()
    fourth.start()
    assert len(ScriptedWriter.started) == 3
    third.close()
    fourth.close()
    assert [one.waited_s for one in ScriptedWriter.started[1:]] == [0, None]  # of two idle writers, one is kept


def test_without_room_for_a_buffer_training_waits_for_each_save(
    tmp_path: Path, copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of(tmp_path, stage_in=str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING):
        begin(saver, 5)
    assert "training waits for each save" in caplog.text
    assert isinstance(saver.state, Done)
    assert committed(Folder(tmp_path)) == ["step-0000000005"]
    assert saver.busy
    saver.staged()
    outcome = saver.poll()
    assert outcome
    assert outcome.written
    caplog.clear()
    begin(saver, 10)  # not tried again
    assert caplog.text == ""
    assert saver.poll()
    [writer] = ScriptedWriter.started
    assert writer.heard == []
    saver.close()
    plain = saver_of(tmp_path, stage_in="")
    begin(plain, 15)
    outcome = plain.poll()
    assert outcome
    assert outcome.written
    assert len(ScriptedWriter.started) == 1
    plain.close()


@pytest.mark.processes
def test_a_real_writer_is_replaced_after_its_death(tmp_path: Path) -> None:
    """A real writer saves dies is replaced and is left to the next saver."""
    SPARE.close()
    with saver_of(tmp_path) as saver:
        begin(saver, 5)
        outcome = saver.poll(wait=True)
        assert outcome
        assert outcome.written, outcome.error
        assert isinstance(saver.state, Idle)
        assert saver.state.writer is not None
        pid = saver.state.writer.pid
        os.kill(pid, signal.SIGSTOP)
        begin(saver, 10)
        os.kill(pid, signal.SIGKILL)
        outcome = saver.poll(wait=True)
        assert outcome
        assert str(outcome.error) == "the writer process ended with status -9"
        begin(saver, 15)
        outcome = saver.poll(wait=True)
        assert outcome
        assert outcome.written, outcome.error
        other = saver.state.writer
        assert other is not None
        assert other.pid != pid
    with saver_of(tmp_path) as saver:
        begin(saver, 20, size=100)
        outcome = saver.poll(wait=True)
        assert outcome
        assert outcome.written, outcome.error
        assert isinstance(saver.state, Idle)
        assert saver.state.writer is other
        saver.end()
    assert not other.alive
    assert committed(Folder(tmp_path)) == ["step-0000000005", "step-0000000015", "step-0000000020"]


@pytest.mark.processes
def test_the_writer_finds_springtide_and_imports_no_torch(tmp_path: Path) -> None:
    """The writer finds springtide where its trainer found it and imports no torch."""
    program = """
import os, sys
sys.path[:0] = [sys.argv[1], ""]  # as no environment says
from springtide.checkpoint import writer_process
told = "import springtide.checkpoint.writer_process as it, sys; print(it.__file__, 'torch' in sys.modules)"
writer_process.PROGRAM = ("-c", told)
writer_process.WriterProcess().close(60)
"""
    import springtide

    here = Path(springtide.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", program, str(here)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(here / "springtide/checkpoint/writer_process.py"), "False"]
