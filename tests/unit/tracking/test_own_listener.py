"""A listener of the user's own hears a run, and can neither hold it up nor end it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_events import step

import springtide as st
from springtide.api.train import train
from springtide.cli.main import main
from springtide.config import Config, code
from springtide.errors import ConfigError
from springtide.events import Evaluated, Event, Started, Stopped
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.own_listener import OwnListener

REPOSITORY = Path(__file__).parents[3]


def test_a_listener_receives_every_event_in_its_own_thread() -> None:
    """It hears every event in order in a thread of its own."""
    heard: list[tuple[Event, int]] = []
    events = [step(1), step(2), Stopped(step=2, status="finished")]
    with OwnListener("mine:listen", lambda: lambda event: heard.append((event, threading.get_ident()))) as listener:
        for event in events:
            listener(event)
    assert [event for event, _ in heard] == events
    assert threading.get_ident() not in {thread for _, thread in heard}


def test_one_that_is_slow_holds_nothing_up_and_hears_the_end(caplog: pytest.LogCaptureFixture) -> None:
    begun, goes_on, heard = threading.Event(), threading.Event(), list[int]()

    def hear(event: Event) -> None:
        heard.append(event.step)  # type: ignore[attr-defined]
        begun.set()
        goes_on.wait()

    with OwnListener("mine:listen", lambda: hear, most_waiting=4) as listener:
        listener(step(1))
        begun.wait()
        for number in range(2, 12):  # it is at work on the first all this time
            listener(step(number))
        goes_on.set()
    assert heard == [1, 8, 9, 10, 11], "the oldest are dropped"
    assert [record.message for record in caplog.records] == [
        "track.listener = 'mine:listen' is slower than the run: 1 events dropped so far, the oldest first; training continues",
        "track.listener = 'mine:listen' missed events: 6 dropped, 0 not delivered, 0 raised an error",
    ]


def test_one_that_hangs_is_left_behind_when_the_run_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    begun, hangs = threading.Event(), threading.Event()

    def hear(event: Event) -> None:
        begun.set()
        hangs.wait()

    with OwnListener("mine:listen", lambda: hear, grace_s=0.05) as listener:
        for number in range(3):
            listener(step(number))
        begun.wait()
    assert "0 dropped, 2 not delivered, 0 raised an error; it has not returned 0.05 s after" in caplog.text
    hangs.set()


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(1)], ids=lambda error: type(error).__name__)
def test_one_that_raises_is_named_once_and_hears_what_follows(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def hear(event: Event) -> None:
        heard.append(event.step)  # type: ignore[attr-defined]
        if event.step != 3:  # type: ignore[attr-defined]
            raise error

    with OwnListener("mine:listen", lambda: hear) as listener:
        for number in range(1, 6):
            listener(step(number))
    assert heard == [1, 2, 3, 4, 5]
    said = [record.message for record in caplog.records]
    assert said[:2] == ["track.listener = 'mine:listen' raised; training continues"] * 2, "anew after it had worked"
    assert said[2:] == ["track.listener = 'mine:listen' missed events: 0 dropped, 0 not delivered, 4 raised an error"]
    assert "in hear" in caplog.text, "with its stack"


@pytest.mark.parametrize("returns", [None, 3])
def test_a_listener_that_does_not_start_is_named(returns: object, caplog: pytest.LogCaptureFixture) -> None:
    """One that does not start is named and the run trains without."""
    with OwnListener("mine:listen", lambda: returns) as listener:  # type: ignore[arg-type,return-value]
        listener._thread.join()
        listener(step(1))
    assert "'mine:listen' did not start" in caplog.text
    assert f"it returned a {type(returns).__name__} in place of a function" in caplog.text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere_at_all:listen", r"track\.listener = 'nowhere_at_all:listen': cannot be imported"),
        ("mine_raises:listen", r"cannot be imported: it raises ZeroDivisionError"),
        ("mine_has:nothing", r"cannot be imported \(module 'mine_has' has no attribute 'nothing'\)"),
        ("mine_has:NUMBER", r"is not a function; name one that returns a listener of events"),
        ("mine_has", r"is not package\.module:function"),
    ],
)
def test_a_name_that_cannot_be_called_is_refused_first(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    """A name that cannot be called is refused before anything is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "mine_raises.py").write_text("1 / 0\n")
    (tmp_path / "mine_has.py").write_text("NUMBER = 3\n")
    try:
        with pytest.raises(ConfigError, match=said):
            train(tiny.override({"track.listener": source, "run.root": "runs"}))
    finally:
        sys.modules.pop("mine_has", None)
    assert not (tmp_path / "runs").exists()


def test_a_file_that_names_one_needs_trust(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(st.config.dump(tiny.override({"track.listener": "theirs:listen"})))  # type: ignore[attr-defined]
    assert main(["train", "--config", str(file)]) == 2
    assert "track.listener = 'theirs:listen': is code that" in capsys.readouterr().err


def test_it_changes_neither_the_run_nor_what_earlier_versions_sealed(tiny: Config) -> None:
    named = tiny.override({"track.listener": "mine:listen"})
    assert st.config.fingerprint(named) == st.config.fingerprint(tiny)  # type: ignore[attr-defined]
    assert named.sources == {"track.listener": "mine:listen"}
    assert code.CODE_FIELDS[:3] == ("model.source", "optim.source", "objective.source"), "seals have this order"


def _tell(listen: Callable[[st.Run], Callable[[Event], None]], run: st.Run) -> None:
    """Two starts, as the driver tells them: steps 3 and 4 are trained twice."""
    for first, last in ((0, 4), (2, 5)):
        hear = listen(run)
        hear(Started(step=first, world_size=1))
        for number in range(first + 1, last + 1):
            hear(step(number, loss=10.0 * first + number))
        hear(Evaluated(step=last, heldout_loss=2.5, heldout_bits_per_byte=1.0, rows=1))
        hear(Stopped(step=last, status="stopped"))


@pytest.fixture
def run(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> st.Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY)
    made = Run(Folder(str(tmp_path / "runs" / "mine")))
    made.write_config(tiny)
    return made


def test_the_example_fills_tensorboard(run: st.Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _tell(code.find_code("track.listener", "examples.listeners.to_tensorboard:listen"), run)  # type: ignore[arg-type]
    found = EventAccumulator(run.folder.where("tensorboard"))
    found.Reload()
    steps = {one.step: one.value for one in found.Scalars("train/loss")}
    assert steps == {1: 1.0, 2: 2.0, 3: 23.0, 4: 24.0, 5: 25.0}
    assert found.Scalars("heldout/loss")[-1].value == 2.5


def test_the_example_fills_a_run_of_wandb(run: st.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _tell(code.find_code("track.listener", "examples.listeners.to_wandb:listen"), run)  # type: ignore[arg-type]
    assert list(Path("wandb").glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"))
