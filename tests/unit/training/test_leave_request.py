"""What makes a rank under torchrun ask to leave: a notice, a signal, the end of its agent; in a real process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from springtide.training.__main__ import LEFT

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from springtide.config import Config
from springtide.distributed import Connections
from springtide.elastic import GroupRequest
from springtide.training.__main__ import LeaveRequest

file = Path(sys.argv[1])

def listening(agent=0, **notices):
    request = LeaveRequest(agent)
    request.listen(Config().override({f"elastic.{name}": value for name, value in notices.items()}).elastic, "here",
                   Connections(), poll_notices=True)
    return request

def asked(request):
    while request() is None:
        time.sleep(0.01)
    assert request() is GroupRequest.EVACUATE

file.write_text("60")
off = listening(notices="off", notice_file=str(file))
assert off() is None
noticed = listening(notices="file", notice_file=str(file).replace("here", "{node}"))
asked(noticed)
noticed.end_agent()  # no agent: nobody is asked
assert off() is None
signalled = listening(notices="off")
os.kill(os.getpid(), signal.SIGTERM)
asked(signalled)
os.kill(os.getpid(), signal.SIGTERM)
interrupted = listening(notices="off")
os.kill(os.getpid(), signal.SIGINT)
asked(interrupted)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    pass
orphan = listening(os.getppid(), notices="off")
print("waits", flush=True)
asked(orphan)
orphan.end_agent()
print("left", flush=True)
"""


def test_a_rank_asks_to_leave_for_a_notice_for_a_signal_and_when_its_agent_is_gone(tmp_path: Path) -> None:
    shell = ["sh", "-c", '"$0" -c "$1" "$2" 2>&1; true', sys.executable, PROGRAM, str(tmp_path / "notice-here")]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        said = []
        for line in agent.stdout:  # to the end: that of its child
            said.append(line.rstrip())
            if said[-1] == "waits":
                agent.send_signal(signal.SIGKILL)
    told = [line.partition(": ")[2] for line in said if "asked to leave" in line]
    ends = f"the group saves after this step and ends with status {LEFT}"
    assert [re.sub(r"\d+ s are left", "N s are left", line) for line in told] == [
        f"asked to leave (a notice was left in a file, N s are left): {ends}",
        f"asked to leave (SIGTERM): {ends}",
        f"asked to leave (SIGINT): {ends}",
        f"asked to leave (torchrun's agent has ended): {ends}",
    ], said
    assert said[-1] == "left", said
