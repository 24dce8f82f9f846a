"""Whatever happens in a save, the run goes on from a good step by itself, and nothing that was committed is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_faults
import s3_server
from saving import (
    HERE,
    WIDTH,
    apart,
    apart_all,
    claim_apart,
    claim_together,
    meta,
    resume,
    save,
    save_with_a_fault,
    state,
)

from springtide.checkpoint import leases
from springtide.checkpoint.async_saver import AsyncSaver, SaveOutcome
from springtide.checkpoint.format import FORMAT, committed
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import named_tensors
from springtide.errors import CheckpointError, RunExists
from springtide.storage import Folder, digest

pytestmark = pytest.mark.distributed
TABLE: list[tuple[str, str, int, int]] = []
"""fault, result, step resumed, bytes lost"""


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """What the sweep found, printed at its end (pytest -rP or -s shows it)."""
    yield
    for fault, result, step, lost in TABLE:
        print(f"{fault:90s} {result:34s} step {step:3d}  bytes lost {lost}")


def recover(url: str, fault: str, result: str, width: int = WIDTH) -> dict[str, Any]:
    """Resume; what was committed before must still be whole, and what is resumed the newest of it."""
    before = committed(Folder(url))
    found = resume(url, width)
    after = inspect(Folder(url), verify=True)
    whole = {one.name for one in after if one.state == "committed"}
    lost = sum(
        one.manifest.size_bytes for one in after if one.manifest and one.name in before and one.name not in whole
    )
    TABLE.append((fault, result, found["step"], lost))
    assert set(before) <= whole
    assert not found["rejected"]
    # or later: what a killed trainer had handed over may be committed meanwhile
    assert found["step"] >= (int(before[-1].removeprefix("step-")) if before else 0)
    return found


def sweep(root: str, told: Path, where: str, points: int) -> None:
    """Kill at ``points`` places spread over a save."""
    assert [outcome.error for outcome in apart(save_with_a_fault, f"{root}/whole", where, 0, str(told))] == [None, None]
    calls = int(told.read_text())
    assert calls >= points
    died = set()
    for point in range(points):
        nth = 1 + point * (calls - 1) // (points - 1)
        url = f"{root}/{where}-{nth}"
        outcomes = apart(save_with_a_fault, url, where, nth, str(told))
        died.add(told.read_text())
        if where == "writer":
            assert outcomes[0].error is None
            assert "ended with status -9" in str(outcomes[1].error) or outcomes[1].written
        else:
            assert outcomes is None
        found = recover(url, f"{where} killed at {told.read_text()} ({nth}/{calls})", "resumed by itself")
        assert found["step"] in (5, 10)
    assert len(died) > points // 2  # places, not one place again and again


def test_the_writing_process_killed_anywhere(tmp_path: Path) -> None:
    sweep(str(tmp_path), tmp_path / "told", "writer", 14)


def test_the_trainer_killed_anywhere(tmp_path: Path) -> None:
    sweep(str(tmp_path), tmp_path / "told", "trainer", 8)


@pytest.mark.full
def test_the_writing_process_killed_anywhere_on_object_storage(s3: str, tmp_path: Path) -> None:
    sweep(f"{s3}/faults", tmp_path / "told", "writer", 8)


@pytest.fixture(scope="module")
def misbehaving(s3: str) -> Iterator[tuple[str, s3_faults.Faults]]:
    """The URL of a proxy before the S3 server, and its faults."""
    with s3_faults.proxy(os.environ["AWS_ENDPOINT_URL"]) as found:
        yield found


def saved_apart(through: str, url: str, steps: list[int], **options: Any) -> list[SaveOutcome]:
    with s3_server.pointing_to(through):
        found: list[SaveOutcome] = apart(save, url, steps, **options)
        return found


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("slowdown", 9),
        pytest.param("reset", 6, marks=pytest.mark.full),
        pytest.param("slow", 3, marks=pytest.mark.full),
    ],
    ids=["503 storm", "connections reset", "slow server"],
)
@pytest.mark.full
def test_a_store_that_misbehaves_for_a_while_costs_time_only(
    s3: str, misbehaving: Any, kind: str, requests: int
) -> None:
    through, faults = misbehaving
    url = f"{s3}/misbehaving-{kind}"
    faults.set(kind, requests)
    outcomes = saved_apart(through, url, [5, 10], width=1024)  # 48 MB: in parts
    assert faults.suffered == requests
    faults.set("")
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert apart(resume, url, 1024)["step"] == 10
    TABLE.append((f"{kind} for {requests} requests of a save in parts", "saved", 10, 0))


def test_permission_lost_in_mid_run_is_one_clear_error(s3: str, misbehaving: Any) -> None:
    through, faults = misbehaving
    url = f"{s3}/denied"
    apart(save, url, [5])
    faults.set("deny")
    [outcome] = saved_apart(through, url, [10], tries=2, term=1)
    faults.set("")
    assert isinstance(outcome.error, PermissionError)
    assert "step-0000000010" in str(outcome.error)
    assert s3_server.environment("")["AWS_SECRET_ACCESS_KEY"] not in str(outcome.error)
    recover(url, "permission to write lost", "one error")


@pytest.mark.full
def test_the_server_killed_in_the_middle_of_an_upload_and_started_again(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    server = s3_server.Server(folder)
    request.addfinalizer(server.stop)
    server.start()
    url = "s3://checkpoints/killed"
    with s3_faults.proxy(server.url) as (through, faults), s3_server.pointing_to(through):
        apart(save, url, [5], width=1024)
        faults.set("slow", 4)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(apart(save, url, [10], width=1024)))
        thread.start()
        assert faults.seen.wait(60)  # a part is on its way
        server.kill()
        server.start()
        thread.join()
        assert [outcome.error for outcome in found] == [None]
        assert recover(url, "the server killed in mid-upload, started again", "saved", 1024)["step"] == 10


POSITIONS: dict[str, tuple[str, Any]] = {
    "the first byte of the data": ("r0000.safetensors", lambda data: _flip(data, _header_length(data))),
    "the middle of the data": ("r0000.safetensors", lambda data: _flip(data, len(data) // 2)),
    "the last byte of the data": ("r0000.safetensors", lambda data: _flip(data, len(data) - 1)),
    "half of the data cut off": ("r0000.safetensors", lambda data: data[: len(data) // 2]),
    "the last byte of the data cut off": ("r0000.safetensors", lambda data: data[:-1]),
    "all of the data cut off": ("r0000.safetensors", lambda data: b""),
    "the data file missing": ("r0000.safetensors", None),
    "a bit of the index": ("r0000.json", lambda data: _flip(data, len(data) // 2)),
    "the index cut off": ("r0000.json", lambda data: data[: len(data) // 2]),
    "the index missing": ("r0000.json", None),
    "a bit of the manifest": ("manifest.json", lambda data: _flip(data, len(data) // 2)),
    "the manifest empty": ("manifest.json", lambda data: b""),
    "the manifest missing": ("manifest.json", None),
    "a bit of the commit marker": ("COMMITTED", lambda data: _flip(data, 3)),
    "the commit marker empty": ("COMMITTED", lambda data: b""),
}


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _header_length(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("where", ["local", "s3"])
def test_bad_bytes_in_any_position_are_found_and_the_one_before_is_taken(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = str(tmp_path) if where == "local" else f"{request.getfixturevalue('s3')}/positions"
    for number, (position, (ending, damage)) in enumerate(POSITIONS.items()):
        if where == "s3" and number % 3:
            continue
        url = f"{root}/{number}"
        save(url, [5, 10], stage_in="")
        checkpoint = Folder(url) / "checkpoints" / "step-0000000010"
        [file] = [name for name in checkpoint.names() if name.endswith(ending)]
        data = checkpoint.read(file)
        checkpoint.remove(file)
        if damage is not None:
            checkpoint.write(file, damage(data))
        found = resume(url)
        assert found["step"] == 5, position
        [(name, reason)] = found["rejected"]
        assert name == "step-0000000010"
        assert file in reason or "commit marker" in reason, reason
        [bad] = [one for one in inspect(Folder(url)) if one.name == name]
        assert bad.state in ("committed", "quarantined")  # it was written anew when training came there again
        TABLE.append((f"{where}: {position}", "quarantined, walked back", 5, 0))


def test_a_rotten_safetensors_header_is_found_by_verify(tmp_path: Path) -> None:
    """Loading goes by the index and needs no header; other tools do."""
    save(str(tmp_path), [5], stage_in="")
    file = next(tmp_path.glob("checkpoints/*/*.safetensors"))
    file.write_bytes(_flip(file.read_bytes(), 20))
    [found] = inspect(Folder(tmp_path), verify=True)
    assert found.state == "bad"
    assert "header: digest expected" in found.reason


def test_a_full_disk_fails_the_save_and_keeps_what_was_committed(tmp_path: Path, small_disk: Any) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import saving, os\n"
        "print(saving.save(sys.argv[2], [5], tries=2, width=32))\n"
        "[outcome] = saving.save(sys.argv[2], [10], tries=2, width=512)\n"
        "print(outcome.error); print(saving.resume(sys.argv[2], 32))"
    )
    done = small_disk(tmp_path / "disk", [sys.executable, "-c", program, HERE, str(tmp_path / "disk" / "run")])
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout.splitlines()[1]
    assert "{'step': 5" in done.stdout.splitlines()[2]
    assert "1 tries left" in done.stderr
    TABLE.append(("the disk is full", "one error", 5, 0))


def test_full_shared_memory_makes_training_wait_and_says_so(tmp_path: Path, small_disk: Any) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import saving, os\n"
        "print(saving.save(sys.argv[2], [5, 10], stage_in=sys.argv[3], width=512)); print(saving.resume(sys.argv[2], 512))"
    )
    command = [sys.executable, "-c", program, HERE, str(tmp_path / "run"), str(tmp_path / "shm")]
    done = small_disk(tmp_path / "shm", command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error=None") == 2
    assert "{'step': 10" in done.stdout
    assert "checkpoint.stage" in done.stderr
    assert done.stderr.count("cannot allocate") == 1
    TABLE.append(("shared memory is full", "saved, training waited", 10, 0))


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    save(url, [5], stage_in="")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    save(url, [10], owner="later", stage_in="")
    monkeypatch.undo()
    newest = leases.newest(Folder(url))
    assert newest
    assert newest.owner == "later"
    assert recover(url, "the clock goes back by a day", "resumed by itself")["step"] == 10


def test_of_two_writers_one_wins_and_the_other_says_who_holds_the_run(tmp_path: Path, s3: str) -> None:
    for url in (str(tmp_path / "two"), f"{s3}/two"):
        run = Folder(url)
        first = leases.claim(run, "first")
        model, optimizer = state(5)
        writer = AsyncSaver(run, first.term, 0, 1, stage_in="", tries=1, rule=Rule(3))
        second = apart(claim_apart, url, True)
        writer.begin(named_tensors(model, optimizer), meta(5), {})
        outcome = writer.poll(wait=True)
        assert outcome
        assert isinstance(outcome.error, RunExists)
        assert f"lease 2, begun {time.strftime('%Y-')}" in str(outcome.error)
        assert f"by process {second} on " in str(outcome.error)
        assert committed(run) == []
        with pytest.raises(RunExists, match="held by lease 2"):
            leases.claim(run, "first", again=True)
        # at one moment: both have seen the same newest lease
        both = [apart_all(claim_together, url, 4)]
        winners = [found for found in both[0] if found is None]
        assert len(winners) == 1, both
        assert sum("was claimed at the same moment by lease 3" in str(found) for found in both[0]) == 3


def test_whoever_is_alive_on_this_machine_holds_its_run(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    leases.claim(run, "me")
    # another process of this machine is refused while this one lives ...
    assert "is held by lease 1" in str(apart(claim_apart, str(tmp_path)))
    # ... until it says that it has ended
    leases.end(run, 1)
    assert isinstance(apart(claim_apart, str(tmp_path)), int)
    # the process is dead, so what it held is free, and counts as lost
    assert leases.claim(run, "me again").term == 3
    assert leases.losses(run) == 1


def test_any_file_system_of_fsspec_will_do() -> None:
    """gs, az and the like come the same way; memory is the one that starts here."""
    url = "memory://any"
    assert [outcome.error for outcome in save(url, [5, 10, 15], stage_in="", keep=2)] == [None] * 3
    assert committed(Folder(url)) == ["step-0000000010", "step-0000000015"]
    assert resume(url)["step"] == 15
    leases.claim(Folder(url), "once more")
    # AdamW's counts of steps are the same in all of them here, so the first one's file is still referred to
    assert [one.state for one in inspect(Folder(url), verify=True)] == ["referred", *["committed"] * 3]


def test_a_checkpoint_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    save(str(tmp_path), [5], stage_in="")
    checkpoint = Folder(tmp_path) / "checkpoints" / "step-0000000005"
    marker = checkpoint.read_json("COMMITTED")
    data = (
        checkpoint.read(marker["manifest"])
        .replace(f'"format":{FORMAT}'.encode(), b'"format":99')
        .replace(b'"refers"', b'"new":1,"refers"')
    )
    checkpoint.write(marker["manifest"], data)
    checkpoint.write_json("COMMITTED", {**marker, "digest": digest.of_bytes(data)})
    with pytest.raises(CheckpointError, match=f"is in format 99, this version of springtide reads {FORMAT}"):
        resume(str(tmp_path))
    assert committed(Folder(tmp_path)) == ["step-0000000005"]
