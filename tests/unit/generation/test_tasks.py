"""Tasks of lm-evaluation-harness: our scores are those of its own model on our export, and no task file runs code unasked."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chatting import ANSWER, CHOICE, chat_run, choices, write_task

from springtide.app import tasks
from springtide.app.tasks import evaluate_tasks, follow_tasks
from springtide.cli.main import main
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, DamagedFile
from springtide.events import Stopped
from springtide.generation.task_files import check_task_files
from springtide.run.exchange import export_model
from springtide.run.folder import Run, open_run
from springtide.run.text import open_text
from springtide.store import Folder
from springtide.track.journal import Journal

lm_eval = pytest.importorskip("lm_eval")
METRICS = {"acc", "exact_match"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the copies of data files that ``datasets`` makes out of the home directory."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return chat_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def files(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files: one of choices, one of answers, half of which are what the model writes."""
    folder = tmp_path_factory.mktemp("tasks") / "files"
    write_task(folder, "choose", choices(), **CHOICE)
    questions = [f"Count {number * number}:" + " la" * (number % 4) for number in range(10)]
    written = run.generate(questions, 8, temperature=0, stop=["\n"])
    answers = [one.text if number % 2 else "no" for number, one in enumerate(written)]
    documents = [{"question": one, "answer": other} for one, other in zip(questions, answers, strict=True)]
    write_task(folder, "answer", documents, **ANSWER)
    rolling = [{"question": "", "answer": "The moon moves the sea. " * number} for number in (1, 3, 9)]
    metrics = [{"metric": "bits_per_byte"}]
    write_task(
        folder, "read", rolling, output_type="loglikelihood_rolling", doc_to_target="{{answer}}", metric_list=metrics
    )
    return folder


def test_scores_are_those_of_their_model_on_our_export(run: Run, files: Path, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from springtide.generation.harness import Harness, Tasks

    model = open_text(run.folder.url)
    found = Tasks(["choose", "answer"], str(files)).score(model, batch_size=5)
    assert found["choose"].samples == 24
    assert 0 < found["choose"].metrics["acc"] < 1
    assert found["answer"].metrics == {"exact_match": 0.5}
    out = export_model(run, str(tmp_path / "out")).url
    theirs = HFLM(pretrained=out, device="cpu", dtype="float32", batch_size=3, add_bos_token=True)
    manager = TaskManager(include_path=str(files), include_defaults=False)
    results = simple_evaluate(model=theirs, tasks=["choose", "answer"], task_manager=manager, log_samples=False)
    for name, scored in found.items():
        expected = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
        assert {metric: expected[metric] for metric in scored.metrics} == scored.metrics
        assert {metric: expected[f"{metric}_stderr"] for metric in scored.errors} == scored.errors
    ours = Harness(model, batch_size=4)
    pairs = [(one["question"], f" {choice}") for one in choices(8) for choice in one["choices"]]
    pairs += [("", "moon"), ("x" * 300, "tide"), ("two  ", "spaces")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    for one, other in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]


def test_a_long_text_is_read_in_windows_each_token_once(run: Run, files: Path) -> None:
    from lm_eval.api.instance import Instance

    from springtide.generation.harness import Harness

    model = open_text(run.folder.url)
    text = "The moon moves the sea. " * 9
    ids = [*model.begin, *model.encode(text)]
    most = model.max_length
    first, second = ids[: most + 1], ids[most:]
    context = ids[len(ids) - most - 1 : most + 1]
    pairs = [(first[:1], first[1:]), (context, second[1:])]
    expected = sum(logprob for logprob, _ in model.logprobs(pairs))
    [found, empty] = Harness(model, 2).loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (one,), number) for number, one in enumerate((text, ""))]
    )
    assert found == pytest.approx(expected, abs=1e-3)
    assert empty == 0


def test_the_command_keeps_scores_beside_their_checkpoint_and_in_the_report(
    run: Run, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["model", "evaluate", run.folder.url, "--task-files", str(files)]
    assert main([*usual, "--tasks", "choose, read", "--limit", "6", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == "step-0000000007"
    assert said["tasks"]["choose"]["samples"] == said["tasks"]["choose"]["limit"] == 6
    assert said["tasks"]["read"]["metrics"]["bits_per_byte"] > 1
    assert main([*usual, "--tasks", "answer", "--batch-size", "3"]) == 0
    assert "exact_match" in capsys.readouterr().out
    [kept] = open_run(run.folder.url).task_scores
    assert (kept.step, list(kept.tasks)) == (7, ["answer", "choose", "read"])
    assert kept.figures()["task/answer/exact_match"] == 0.5
    page = run.folder.read("report.html").decode()
    assert "<h2>Tasks</h2>" in page
    assert "0.5000 ± 0.1667" in page
    file = "tasks/step-0000000007.json"
    text = run.folder.read(file)
    run.folder.write(file, text.replace(b"0.5", b"NaN"))
    with pytest.raises(DamagedFile, match=r"step-0000000007\.json"):
        _ = run.task_scores
    run.write_report()
    assert "<h2>Tasks</h2>" not in run.folder.read("report.html").decode()
    run.folder.write(file, text)


def test_processes_share_the_batches_and_find_the_same_scores(run: Run, files: Path) -> None:
    names = ["choose", "answer", "read"]
    alone, shared = (
        evaluate_tasks(run, names, str(files), batch_size=3, processes=number)[0].tasks for number in (1, 2)
    )
    for name in names:
        assert shared[name].metrics == pytest.approx(alone[name].metrics, abs=1e-6)
        assert shared[name].samples == alone[name].samples


def test_checkpoints_that_come_are_evaluated_until_the_run_ends(run: Run, files: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    shutil.copytree(run.folder.path, folder.path, ignore=shutil.ignore_patterns("tasks"))  # what other tests scored
    (tmp_path / "run/checkpoints").rename(tmp_path / "checkpoints")
    growing, waited = Run(folder), []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:  # nothing is there at first
            (tmp_path / "checkpoints").rename(tmp_path / "run/checkpoints")
        else:
            with Journal(folder) as journal:
                journal(Stopped(step=StepsDone(7), status="finished", reason=""))

    found = [scores.step for scores, _ in follow_tasks(growing, ["choose"], str(files), wait=wait)]
    assert (found, len(waited)) == ([7], 2)
    assert [one.step for one in growing.task_scores] == [7]


def test_a_store_that_is_away_for_a_while_does_not_end_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, away = Folder(tmp_path / "run"), ["journal", "checkpoints", "score", "score"]
    waited: list[float] = []
    with Journal(folder) as journal:
        journal(Stopped(step=StepsDone(7), status="finished", reason=""))

    def reach(what: str) -> None:
        if away and away[0] == what:
            away.pop(0)
            raise OSError("503 Slow Down")

    class Reader(tasks.JournalReader):
        def read(self) -> bool:
            reach("journal")
            return super().read()

    class Away(Run):
        @property
        def checkpoints(self) -> list[str]:
            reach("checkpoints")
            return ["step-0000000007"]

    def score(self: object, checkpoint: str) -> tuple[str, list[str]]:
        reach("score")
        return checkpoint, []

    monkeypatch.setattr(tasks, "JournalReader", Reader)
    monkeypatch.setattr(tasks._Evaluation, "score", score)
    monkeypatch.setattr(tasks, "_tasks", lambda *_: None)
    found: list[object] = list(follow_tasks(Away(folder), ["choose"], wait=waited.append))
    assert (found, away, len(waited)) == ([("step-0000000007", [])], [], 4)
    assert [record.message for record in caplog.records] == [
        f"{folder.url}: OSError: 503 Slow Down; tried again every 5 s"
    ]

    def forbidden(self: Reader) -> bool:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(Reader, "read", forbidden)
    with pytest.raises(PermissionError, match="403 Forbidden"):
        next(follow_tasks(Away(folder), ["choose"], wait=waited.append))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "choose", "--processes", "0"], "processes = 0: must be at least 1"),
        (["--tasks", "choose", "--step", "7", "--follow"], "step = 7: names one checkpoint, and --follow"),
        (["--tasks", ","], "tasks = '': names no task"),
        (["--tasks", "choose", "--limit", "-1"], "limit = -1: must be at least 0"),
        (["--tasks", "choose", "--batch-size", "0"], "batch_size = 0: must be at least 1"),
        (["--tasks", "choose", "--step", "3"], "step = 3: has no checkpoint"),
        (["--tasks", "choose", "--task-files", "none"], "task_files = 'none': is not a folder"),
        (["--tasks", "hub", "--task-files", "files"], "tasks = 'hub': cannot be used"),
        (["--tasks", "hub", "--task-files", "files"], "nothing is fetched"),
        (["--tasks", "escape", "--task-files", "files"], "tasks = 'escape': cannot be used (SecurityError"),
        (["--tasks", "code", "--task-files", "coded"], "names code to run: !function helper.documents"),
        (
            ["--tasks", "scored", "--task-files", "scored"],
            "scored.yaml': names code to run: metric: evil.py; use a metric",
        ),
        (["--tasks", "kobest_copa"], "metric = 'f1': names code to run"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(
    run: Run,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "files", "hub", [], **{**CHOICE, "dataset_path": "springtide/nowhere", "dataset_kwargs": {}})
    escape = "{{ question.__class__.__mro__[1].__subclasses__() }}"
    write_task(tmp_path / "files", "escape", choices(3), **{**CHOICE, "doc_to_text": escape})
    coded = tmp_path / "coded"
    coded.mkdir()
    (coded / "helper.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\ndef documents(*_): pass\n")
    (coded / "code.yaml").write_text("task: code\ndataset_path: json\nprocess_docs: !function helper.documents\n")
    write_task(tmp_path / "scored", "scored", choices(3), **{**CHOICE, "metric_list": [{"metric": "evil.py"}]})
    for name in ("evil.py", "f1/f1.py"):  # what `evaluate` runs for a metric of that name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    options = options if "--task-files" in options else [*options, "--task-files", "files"]
    assert main(["model", "evaluate", run.folder.url, *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: a\nclass: !function b.C\n", "names code to run: class: b.C|!function b.C"),
        ("task: a\nclass: b.C\n", "names code to run: class: b.C"),
        ("task: a\nmetric_list: [{metric: ./evil}]\n", "names code to run: metric: ./evil"),
        (
            "task: a\nmetric_list: [{metric: acc}, {metric: evil}]\n",
            "run: metric: evil; use a metric of .*--trust-code",
        ),
        ("task: a\nmetric_list: [{metric: evil.py}]\n", r"one\.yaml': names code to run: metric: evil\.py"),
        ("x: &m {metric: evil}\nmetric_list: [{<<: *m}]\n", "names code to run: metric: evil"),
        ("metric_list: [{metric: acc, hf_evaluate: yes}]\n", "names code to run: metric: hf_evaluate: yes"),
        ("task: a\ninclude: _shared\n", "_shared.*names code to run: !function x.y"),
        ("task: a\ninclude: nowhere\n", "nowhere.*cannot be read"),
        ("task: [", "is not YAML"),
        ("a: &a [*a]\nb: !!python/object:os.x 1\n", "names code to run: .*python/object:os.x"),
        ("[" * 400, "is not YAML"),
        ("#" * (2**20 + 1), "has more than 1,048,576 bytes"),
        ("a: " + "[" * 5000, "brackets nest deeper than 200"),
        ("include: none.yaml", r"none\.yaml.*cannot be read .*; correct the include of .*one\.yaml"),
        ('include: "a\\0"', r"cannot be read \(.*null byte.*; correct the include of .*one\.yaml"),
    ],
)
def test_code_is_found_without_running_it(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "_shared").write_text("process_docs: !function x.y\n")
    (tmp_path / "plain.yaml").write_text("task: plain\nmetric_list: [{metric: acc, hf_evaluate: false}]\n")
    check_task_files(str(tmp_path), METRICS)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "_shared").write_text("process_docs: !function x.y\n")
    (tmp_path / "deep" / "one.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_task_files(str(tmp_path), METRICS)
    if "names code" in said:
        check_task_files(str(tmp_path), METRICS, trust_code=True)


def test_without_the_package_the_error_says_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import springtide.generation

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "springtide.generation.harness", raising=False)
    monkeypatch.delattr(springtide.generation, "harness", raising=False)
    assert main(["model", "evaluate", run.folder.url, "--tasks", "choose"]) == 2
    said = capsys.readouterr().err
    assert "needs lm-evaluation-harness" in said
    assert "pip install 'springtide[evaluate]'" in said
