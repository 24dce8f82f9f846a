"""Tasks of lm-evaluation-harness: our scores are those of its own model on our export, also without one, and the command runs
no code unasked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chatting import ANSWER, CHOICE, WORDS, chat_run, choices, write_task

from springtide.cli.main import main
from springtide.errors import ConfigError
from springtide.eval import TextModel
from springtide.run.exchange import export_model
from springtide.run.folder import Run
from springtide.run.text import open_text

pytestmark = pytest.mark.processes

lm_eval = pytest.importorskip("lm_eval")
PAGE = Path(__file__).parents[3] / "docs/how-to/evaluate.md"


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is fetched, and the copies of data files that ``datasets`` makes stay out of the home directory."""
    import datasets
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


def read_once(**options: Any) -> Iterator[None]:
    """For a fixture: the task files that ``options`` name, by default the package's thousands, are read once."""
    from springtide.eval import harness

    manager = harness.TaskManager(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TaskManager", lambda: manager)
        yield


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """All tasks of the package."""
    yield from read_once()


@pytest.fixture(scope="module")
def few_installed() -> Iterator[None]:
    """Two families of the package's tasks: to read them all takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    yield from read_once(include_path=[root / "sciq", root / "kobest"], include_defaults=False)


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


def scored(model: Any, files: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Task -> what the harness itself finds."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(files), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=list(names), task_manager=manager, log_samples=False)
    return {name: dict(values) for name, values in found["results"].items()}


def likeliest(model: TextModel, question: str, answers: Sequence[str]) -> int:
    """The number of the answer that a model gives the highest probability."""
    context = model.prompt_ids(question)
    logprobs = [logprob for logprob, _ in model.logprobs([(context, model.encode(f" {one}")) for one in answers])]
    return logprobs.index(max(logprobs))


def test_scores_are_those_of_their_model_on_our_export(run: Run, files: Path, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from springtide.eval.harness import Harness

    model = open_text(run.folder.url)
    found = scored(Harness(model, 5), files, "choose", "answer", "read")
    assert 0 < found["choose"]["acc,none"] < 1
    assert found["answer"]["exact_match,none"] == 0.5
    out = export_model(run, str(tmp_path / "out")).url
    theirs = HFLM(pretrained=out, device="cpu", dtype="float32", batch_size=3, add_bos_token=True)
    assert found.pop("read")["bits_per_byte,none"] > 1  # theirs has two begin-of-texts before such a text
    assert scored(theirs, files, "choose", "answer") == found
    ours = Harness(model, batch_size=4)
    pairs = [(one["question"], f" {choice}") for one in choices(8) for choice in one["choices"]]
    pairs += [("", "moon"), ("x" * 300, "tide"), ("two  ", "spaces")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    for one, other in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]


def test_a_long_text_is_read_in_windows_each_token_once(run: Run, files: Path) -> None:
    from lm_eval.api.instance import Instance

    from springtide.eval.harness import Harness

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


def test_a_model_of_ones_own_is_scored_as_by_its_log_probabilities(tmp_path: Path) -> None:
    """``model.source`` has no form in transformers."""
    from springtide.eval.harness import Harness

    own = chat_run(tmp_path, model__source="own_model:build")
    with pytest.raises(ConfigError, match=r"model\.source"):
        export_model(own, str(tmp_path / "out"))
    write_task(tmp_path / "files", "choose", documents := choices(9), **CHOICE)
    model = open_text(own.folder.url, trust_code=True)
    right = [likeliest(model, one["question"], one["choices"]) == one["answer"] for one in documents]
    found = scored(Harness(model), tmp_path / "files", "choose")
    assert found["choose"]["acc,none"] == pytest.approx(sum(right) / 9)


@pytest.mark.usefixtures("installed")
@pytest.mark.full
def test_the_command_scores_a_task_of_the_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where ``datasets`` finds a folder before it asks the Hub
    data = Path("allenai/sciq")
    data.mkdir(parents=True)
    lines, right, model = [], [], open_text(run.folder.url)
    for number in range(8):
        *wrong, answer = (f"the {WORDS[(number + one) % 6]}" for one in range(4))
        lines.append({"support": "Tides.", "question": f"What is {number}?", "correct_answer": answer})
        lines[-1] |= {f"distractor{one}": text for one, text in enumerate(wrong, 1)}
        right.append(likeliest(model, f"Tides.\nQuestion: What is {number}?\nAnswer:", [*wrong, answer]) == 3)
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    usual = ["model", "evaluate", run.folder.url, "--tasks", "sciq"]
    assert main([*usual, "--limit", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == "step-0000000007"
    assert {key: said["tasks"]["sciq"][key] for key in ("sample_len", "acc,none")} == {
        "sample_len": 4,
        "acc,none": sum(right[:4]) / 4,
    }
    assert 0 < sum(right) < 8
    assert main([*usual, "--batch-size", "3"]) == 0
    assert "|sciq |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", ","], "tasks = ',': names no task"),
        (["--tasks", "sciq", "--limit", "-1"], "limit = -1: must be at least 0"),
        (["--tasks", "sciq", "--batch-size", "0"], "batch_size = 0: must be at least 1"),
        (["--tasks", "sciq", "--step", "3"], "step = 3: has no checkpoint"),
        (["--tasks", "tides"], "tasks = 'tides': is not a task of lm-evaluation-harness"),
        (["--tasks", "files/choose.yaml"], "tasks = 'files/choose.yaml': is not a task of lm-evaluation-harness"),
        (["--tasks", "sciq"], "tasks = 'sciq': cannot be used"),
        (["--tasks", "kobest_copa"], "metric = 'f1': is code of the Hugging Face Hub"),
    ],
)
@pytest.mark.usefixtures("few_installed")
def test_what_cannot_be_evaluated_is_refused_by_name(
    run: Run,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "files", "choose", choices(3), **CHOICE)
    (tmp_path / "f1").mkdir()  # what `evaluate` runs for a metric of that name
    (tmp_path / "f1/f1.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    assert main(["model", "evaluate", run.folder.url, *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


def test_the_task_of_the_page_is_scored_from_python(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text().split("### Tasks of your own")[1]
    Path("tasks").mkdir()
    for name, kind in (("tides.yaml", "yaml"), ("tides.jsonl", "json")):
        Path("tasks", name).write_text(page.split(f"```{kind}\n")[1].split("```")[0])
    program = page.split("```python\n")[1].split("```")[0].replace("runs/RUN", run.folder.url)
    exec(compile(program, str(PAGE), "exec"), {})
    assert "|tides|" in capsys.readouterr().out


def test_without_the_package_the_error_says_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import springtide.eval

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "springtide.eval.harness", raising=False)
    monkeypatch.delattr(springtide.eval, "harness", raising=False)
    assert main(["model", "evaluate", run.folder.url, "--tasks", "choose"]) == 2
    said = capsys.readouterr().err
    assert "needs lm-evaluation-harness" in said
    assert "pip install 'springtide[evaluate]'" in said
