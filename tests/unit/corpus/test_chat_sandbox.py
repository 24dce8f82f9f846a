"""Chat templates in a child process: limits, escapes, and a child that dies, lies or is shared."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from springtide.corpus import chat_sandbox
from springtide.corpus.chat_sandbox import BEGIN, END, Rendering, Sandbox
from springtide.corpus.chats import BadChat

pytestmark = pytest.mark.processes

HONEST = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
RENDERED = "user: Hi\nassistant: Hello\n"


def loop(body: str, start: str) -> str:
    """Repeat with ``n.s``, which is ``start``. ``n.one`` in it keeps Jinja from computing it when it compiles."""
    turns = "{% for a in range(99999) %}{% for b in range(99999) %}"
    return f"{{% set n = namespace(one=1) %}}{{% set n.s = {start} %}}{turns}{body}{{% endfor %}}{{% endfor %}}"


def nest(name: str) -> str:
    """Put tuples of 2 ** 60 parts, all of them the same one, into the name."""
    doubled = f"{{% set {name}.s = ({name}.s, {name}.s) %}}"
    return f"{{% set {name} = namespace(s=(1,)) %}}{{% for _ in range(60) %}}{doubled}{{% endfor %}}"


CPU, MEMORY, OUTPUT = "of CPU time", "of memory", "writes more than 1 MiB"
EITHER = f"{CPU}|{MEMORY}"
WITHOUT_END = {
    "{{ 5|round(-300000000) }}": CPU,
    "{{ [1]|slice(2000000000)|list|length }}": CPU,
    nest("a") + nest("b") + "{{ a.s == b.s }}": CPU,
    nest("a") + "{{ {a.s: 1} }}": CPU,
    nest("a") + "{{ a.s }}": EITHER,
    nest("a") + "{{ a.s | tojson }}": EITHER,
    loop("{% set n.s = n.s + n.s %}", "1"): CPU,
    loop("{% set n.s = n.s + n.s %}", "[1]"): EITHER,
    loop("{{ 'b' in n.s }}", "'a' * n.one * 10**7"): CPU,
    loop("{{ 1 in n.s }}", "[2] * n.one * 10**6"): CPU,
    loop("{{ n.s[1:] | length }}", "'a' * n.one * 10**7"): CPU,
    loop("", "1"): CPU,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": CPU,
    "{{ 9 ** (9 ** 9) }}": EITHER,
    "{{ [1]|batch(2000000000, 'x')|first|length }}": MEMORY,
    "{% set n = namespace(s=[]) %}{% set t = 'ab' * 10**6 %}"
    "{% for a in range(100) %}{% set n.s = [n.s, t.split('a'), t | list] %}{% endfor %}": EITHER,
    "{{ 'x' * 10**10 }}": MEMORY,
    "{{ '%10000000000d' % 1 }}": MEMORY,
    "{{ 'x' | center(10**10) }}": MEMORY,
    loop("{% set n.s = n.s ~ n.s %}", "'x'"): EITHER,
    loop("{% set n.s = n.s.replace('x', 'xx') %}", "'x'"): EITHER,
    "{% for a in range(99999) %}{{ 'x' * 10**6 }}{% endfor %}": MEMORY,
    "{% for a in range(30) %}{{ 'x' * 10**6 }}{% endfor %}": OUTPUT,
    "{% for a in range(10**9) %}{% endfor %}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself too often",
}
"""Template -> what it is refused for."""
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].mro }}",
    "{{ ('' | attr('__class__')).mro }}",
    "{{ ([''] | map(attribute='__class__') | first).mro }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ range.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ dict.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.parent }}",
    "{{ '{0.__class__.mro}'.format(1) }}",
    "{{ '{x.__class__.mro}'.format_map({'x': 1}) }}",
    "{{ namespace(__class__=1) }}",
    "{% set n = namespace() %}{% set n.__init__ = 1 %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
]


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[chat_sandbox._Renderer]:
    """A renderer of this test's own, which has started no child."""
    made = chat_sandbox._Renderer()
    monkeypatch.setattr(chat_sandbox, "_RENDERER", made)
    yield made
    made.close()


def render(text: str) -> str:
    [found] = Sandbox(text).render([Rendering(MESSAGES)], {})
    return found


def _child(renderer: chat_sandbox._Renderer) -> psutil.Process:
    assert renderer._child is not None
    return psutil.Process(renderer._child._process.pid)


PROGRAM = """
import json, resource, sys
from springtide.corpus import chat_sandbox
from springtide.corpus.chat_sandbox import Rendering, Sandbox
from springtide.corpus.chats import BadChat

def used_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

templates, honest, messages = json.load(sys.stdin)
found, before = [], used_s()
for text, wanted in templates.items():
    chat_sandbox.CPU_S = 0.2 if "CPU" in wanted else 2.0
    try:
        problem = "rendered " + next(Sandbox(text).render([Rendering(messages)], {}))[:100]
    except BadChat as error:
        problem = error.problem
    [after] = Sandbox(honest).render([Rendering(messages)], {})
    found.append((problem, used_s() - before, after))
    before = used_s()
chat_sandbox._RENDERER.close()
print(json.dumps((found, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)))
"""


def test_templates_without_end_are_refused_in_bounded_time_and_memory() -> None:
    """Each input of a security review, in one process that renders an honest chat after each."""
    given = json.dumps((WITHOUT_END, HONEST, MESSAGES))
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, check=True)
    found, peak_kib = json.loads(done.stdout)
    for (text, wanted), (problem, cpu_s, after) in zip(WITHOUT_END.items(), found, strict=True):
        assert any(one in problem for one in wanted.split("|")), (text, problem)
        assert cpu_s < (1.2 if "CPU" in wanted else 3), text  # a second for the start of a child
        assert after == RENDERED
    assert peak_kib < 300 * 2**10
    assert chat_sandbox.CPU_S + 1 <= 3


@pytest.mark.parametrize("text", ESCAPES)
def test_the_sandbox_holds(text: str) -> None:
    with pytest.raises(BadChat):
        render(text)


def test_a_refused_rendering_names_the_limit_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "CPU_S", 0.1)
    with pytest.raises(BadChat, match=r"template .*0\.1 s of CPU"):
        render("{{ 5|round(-300000000) }}")
    with pytest.raises(BadChat, match=r"template .*256 MiB of memory"):
        render("{{ 'x' * 10**9 }}")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("line\n{% if %}", 2, "Expected an expression"),
        (f"{{{{ '{BEGIN}' }}}}", 1, "U\\+FDD0"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", 1, "nested too deeply"),
        ("{% for a in messages %}" * 30 + "{% endfor %}" * 30, 1, "too many statically nested blocks"),
    ],
)
def test_a_template_that_does_not_compile_has_its_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(SyntaxError, match=problem) as caught:
        Sandbox(text)
    assert caught.value.lineno == line


def test_marks_stand_around_the_answer() -> None:
    sandbox = Sandbox("{{ bos }}a{% generation %}b{% endgeneration %}c{{ add_generation_prompt }}")
    assert sandbox.has_marks
    assert not Sandbox(HONEST).has_marks
    renderings = [Rendering(MESSAGES, marks=True), Rendering(MESSAGES, prompt=True)]
    assert [*sandbox.render(renderings, {"bos": "<s>"})] == [f"<s>a{BEGIN}b{END}cFalse", "<s>abcTrue"]


def test_text_is_passed_as_it_is() -> None:
    content = '\x00\x1f"\\\n\u2028é😀\ud800' * 9
    [found] = Sandbox("{{ messages[0].content }}{{ '\\ud800' }}").render([Rendering([{"content": content}])], {})
    assert found == content + "\ud800"


def test_the_limits_grow_with_the_chat() -> None:
    content = "\n" + "é" * 10**7  # 20 MB: more than a small chat may write
    [found] = Sandbox(HONEST).render([Rendering([{"role": "user", "content": content}])], {})
    assert len(found) == len("user: \n") + len(content)


def test_the_rendering_that_fails_is_named_within_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "CPU_S", 0.1)
    sandbox = Sandbox(
        "{% if messages[0].content == 'loop' %}{{ messages|length|round(-300000000) }}{% endif %}" + HONEST
    )
    loops = [{"role": "user", "content": "loop"}]
    texts = sandbox.render([Rendering(each) for each in (MESSAGES, MESSAGES, loops, MESSAGES)], {})
    assert [next(texts), next(texts)] == [RENDERED, RENDERED]
    with pytest.raises(BadChat, match="CPU time"):
        next(texts)


def test_each_rendering_of_a_request_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "CPU_S", 0.5)
    slow = "{% for a in range(1000) %}{% for b in range(500) %}{% endfor %}{% endfor %}x"  # some 20 to 50 ms
    assert [*Sandbox(slow).render([Rendering([])] * 40, {})] == ["x"] * 40


def test_chats_share_requests_and_stay_in_order() -> None:
    chats = [[{"role": "user", "content": f"{number} " * (number % 200)}] for number in range(3000)]
    texts = Sandbox(HONEST).render(map(Rendering, chats), {})
    assert [*texts] == [f"user: {chat[0]['content']}\n" for chat in chats]
    assert not [*Sandbox(HONEST).render([], {})]


def test_a_killed_child_is_replaced(renderer: chat_sandbox._Renderer) -> None:
    sandbox = Sandbox(HONEST)
    child = _child(renderer)
    child.kill()
    child.wait()
    assert [*sandbox.render([Rendering(MESSAGES)], {})] == [RENDERED]
    assert _child(renderer) != child


def test_a_child_has_no_credentials_and_writes_nothing(renderer: chat_sandbox._Renderer) -> None:
    Sandbox(HONEST)
    child = _child(renderer)
    assert child.environ().keys() <= {"LD_LIBRARY_PATH", "LC_CTYPE"}
    assert os.getsid(child.pid) == child.pid  # Ctrl-C does not reach it
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        assert child.rlimit(kind) == (0, 0)
    assert child.rlimit(resource.RLIMIT_NOFILE)[1] == child.num_fds()


REPLY = "import sys; sys.stdin.buffer.read(32); sys.stdout.buffer.write({}); sys.stdout.flush(); sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise SystemExit(3)", "ended its process twice, with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended its process twice, with status -9"),
        (REPLY.format("(2**40).to_bytes(8, 'big')"), "what is no reply"),
        (REPLY.format("(2).to_bytes(8, 'big') + b'{]'"), "what is no reply"),
        (REPLY.format("(11).to_bytes(8, 'big') + b'{\"text\": 1}'"), "what is no reply"),
        (REPLY.format("(99999).to_bytes(8, 'big') + b'[' * 99999"), "what is no reply"),
        ("import sys; sys.stdin.read()", "got no reply within 0.3 s"),
    ],
)
def test_a_child_is_not_trusted(
    program: str, problem: str, renderer: chat_sandbox._Renderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(program)
    with monkeypatch.context() as patched:
        patched.setattr(chat_sandbox, "_PROGRAM", tmp_path / "child.py")
        if "0.3" in problem:
            patched.setattr(chat_sandbox, "_SILENCE_S", 0.3)
        with pytest.raises(BadChat, match=problem):
            Sandbox(HONEST)
    assert render(HONEST) == RENDERED


SHORT_OF_MEMORY = """
import json, struct, sys
number = 0
while head := sys.stdin.buffer.read(32):
    request = json.loads(sys.stdin.buffer.read(struct.unpack("!QdQQ", head)[0]))
    number += 1
    is_short = number > 1 or request["template"] == "large"
    texts = [{"memory": True} if is_short else {"text": "fine"} for _ in request["renderings"]]
    for reply in [{"has_marks": False}, *texts]:
        data = json.dumps(reply).encode()
        sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
    sys.stdout.flush()
"""
"""A child whose memory is enough for its first request only, and never for one template."""


def test_memory_that_an_earlier_chat_has_left_refuses_no_other(
    renderer: chat_sandbox._Renderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rendering that runs short of memory in a used child is tried again in a new one."""
    (tmp_path / "child.py").write_text(SHORT_OF_MEMORY)
    with monkeypatch.context() as patched:
        patched.setattr(chat_sandbox, "_PROGRAM", tmp_path / "child.py")
        sandbox, large = Sandbox(HONEST), Sandbox("large")
        for _ in range(3):
            assert [*sandbox.render([Rendering(MESSAGES)], {})] == ["fine"]
        with pytest.raises(BadChat, match="of memory"):
            [*large.render([Rendering(MESSAGES)], {})]
    assert renderer._child is None
    assert render(HONEST) == RENDERED


def test_threads_share_a_child(renderer: chat_sandbox._Renderer) -> None:
    found: dict[int, list[str]] = {}

    def use(number: int) -> None:
        barrier.wait()
        found[number] = [render(f"{number} {one} " + HONEST) for one in range(50)]

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {one} {RENDERED}" for one in range(50)] for number in range(2)}


def test_a_forked_process_starts_its_own_child(renderer: chat_sandbox._Renderer) -> None:
    """And can do so while a thread of its parent holds the lock."""
    sandbox = Sandbox(HONEST)
    mine, theirs = multiprocessing.Pipe()

    def use() -> None:
        assert renderer._child is None
        theirs.recv()
        texts = [*sandbox.render([Rendering(MESSAGES)] * 500, {})]
        theirs.send((texts, _child(renderer).pid))
        theirs.recv()

    with renderer._lock:
        process = multiprocessing.get_context("fork").Process(target=use, daemon=True)
        process.start()
    mine.send("go")
    assert [*sandbox.render([Rendering(MESSAGES)] * 500, {})] == [RENDERED] * 500
    texts, pid = mine.recv()
    assert texts == [RENDERED] * 500
    assert pid != _child(renderer).pid
    mine.send("end")
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("end", ["exits", "is killed"])
def test_no_child_outlives_its_parent(end: str) -> None:
    program = (
        "import sys\nfrom springtide.corpus import chat_sandbox\n"
        "chat_sandbox.Sandbox('x')\nprint(chat_sandbox._RENDERER._child._process.pid, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        if end == "is killed":
            parent.send_signal(signal.SIGKILL)
        parent.stdin.close()
        assert select.select([child], [], [], 60)[0]
        os.close(child)
