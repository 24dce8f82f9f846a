"""NVIDIA's profilers see the profiled steps, named, and no others."""

from __future__ import annotations

import pytest
import torch
from stepping import done_step, work_of

from springtide.distributed import alone
from springtide.events import Profiled
from springtide.storage import Folder
from springtide.training.profile import Profile, StepRanges, tools_of


class Recorder:
    """A profiler that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None:
        self.heard.append("start")

    def stop(self) -> None:
        self.heard.append("stop")

    def push(self, name: str) -> None:
        self.heard.append(f"+{name}")

    def pop(self) -> None:
        self.heard.append("-")


def stepped(profile: Profile, steps: range) -> list[str]:
    """What it yields in these steps, by kind."""
    found = []
    for step in steps:
        profile.before_step(work_of(step - 1))
        profile.before_update()
        found += [event.kind for event in profile.after_step(done_step(step))]
    return found


def test_only_the_profiled_steps_are_captured_each_with_its_parts(tmp_path: object) -> None:
    heard = Recorder()
    profile = Profile(2, alone(torch.device("cpu")), Folder(str(tmp_path)), heard)
    assert stepped(profile, range(1, 8)) == [Profiled.kind]
    profile.close()
    a_step = ["+compute", "-", "+update", "-", "-"]
    assert heard.heard == [
        *("start", "+between steps", "-"),
        *("+step 4", *a_step, "+between steps", "-"),
        *("+step 5", *a_step, "+between steps", "-", "stop"),
    ]


@pytest.mark.parametrize("moment", ["before_step", "before_update", "after_step"])
def test_whatever_is_open_is_ended_when_training_ends_early(moment: str) -> None:
    heard = Recorder()
    ranges = StepRanges(heard)
    ranges.end()
    assert heard.heard == []
    ranges.begin()
    ranges.before_step(1)
    _ = {"before_step": lambda: None, "before_update": ranges.before_update, "after_step": ranges.after_step}[moment]()
    ranges.end()
    ranges.end()
    assert heard.heard[-1] == "stop"
    assert heard.heard.count("-") == sum(word.startswith("+") for word in heard.heard)


def test_devices_of_other_makers_have_no_such_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools_of(torch.device("cpu")) is None
    assert tools_of(torch.device("cuda", 0)) is not None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert tools_of(torch.device("cuda", 0)) is None
