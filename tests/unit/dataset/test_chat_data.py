"""Datasets of chats: what is predicted, how they are packed, what is dropped, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared import contents, prepare, small

from springtide.cli.main import main
from springtide.config import Config
from springtide.corpus.chats import NO_CHAT, NO_ROLE, NO_TEXT, REFUSED
from springtide.dataset import Map, in_process, make_dataset, open_dataset, silent
from springtide.dataset.chats import THOUGHTS_LEFT
from springtide.errors import ConfigError, CorpusError
from springtide.shards import HELDOUT, TRAIN, SplitReader, ids_of, is_predicted
from springtide.storage import Folder

pytestmark = pytest.mark.processes

ANSWERS = {f"question {number}": f"answer {number * 7}" for number in range(200)}


def chats() -> list[dict[str, Any]]:
    system = {"role": "system", "content": "Add. " * 20}  # so long that the chats are near-duplicates as texts
    return [
        {"messages": [system, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in ANSWERS.items()
    ]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def of_chats(root: Path, source: Path, **changes: Any) -> Config:
    return small(
        root,
        source,
        **{
            "corpus__tokenizer": "bytes",
            "corpus__chat_template": "chatml",
            "shards__sequence_length": 400,
            "shards__packing": "best_fit",
            "shards__mask_across_documents": True,
            **changes,
        },
    )


def rows_of(url: str, split: str) -> np.ndarray:
    manifest, _ = open_dataset(url)
    return SplitReader(Folder(url), manifest, split).read(np.arange(manifest.splits[split].rows)).tokens


def spelled(url: str, tokens: np.ndarray) -> str:
    return str(open_dataset(url)[1].tokenizer.decode(ids_of(tokens).tolist(), skip_special_tokens=False))


def test_only_answers_are_predicted_and_chats_stay_whole(tmp_path: Path) -> None:
    """Only answers are predicted and every chat is whole in one row."""
    url = prepare(of_chats(tmp_path / "data", write_lines(tmp_path / "chats.jsonl", chats()))).shards.dataset
    manifest, vocabulary = open_dataset(url)
    found: dict[str, str] = {}
    for split in (TRAIN, HELDOUT):
        num_bytes = 0
        for row in rows_of(url, split):
            for chat in spelled(url, row).split("<|endoftext|>"):
                if chat:
                    system, asked, answer = _turns(chat)
                    assert system.startswith("Add. ")
                    found[asked] = answer
            num_bytes += int(vocabulary.byte_lengths()[row[is_predicted(row)]].sum())
            predicted = spelled(url, row[is_predicted(row)])
            assert predicted == "".join(f"{answer}<|im_end|>" for answer in _answers(spelled(url, row)))
        assert num_bytes == manifest.splits[split].num_bytes
    assert found == ANSWERS
    assert not any(manifest.source["dropped"].values())
    assert Folder(url).read("chat_template.jinja")
    assert vocabulary.id_of("<|im_start|>", "") < vocabulary.size


def _turns(chat: str) -> list[str]:
    return [turn.partition("\n")[2].removesuffix("<|im_end|>\n") for turn in chat.split("<|im_start|>")[1:]]


def _answers(row: str) -> list[str]:
    return [part.partition("<|im_end|>")[0] for part in row.split("<|im_start|>assistant\n")[1:]]


def test_parquet_gzip_and_any_number_of_processes_give_the_same_tokens(tmp_path: Path) -> None:
    lines = prepare(of_chats(tmp_path / "a", write_lines(tmp_path / "a.jsonl", chats()))).shards.dataset
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    pq.write_table(
        pa.Table.from_pylist([{**chat, "n": 1} for chat in chats()]), tmp_path / "c.parquet", row_group_size=30
    )
    for name in ("b.jsonl.gz", "c.parquet"):
        config = of_chats(tmp_path / name[0], tmp_path / name)
        backwards: Map = lambda function, items: in_process(function, items[::-1])  # noqa: E731
        url = make_dataset(config.corpus, config.shards, silent, backwards)
        for split in (TRAIN, HELDOUT):
            assert np.array_equal(rows_of(url, split), rows_of(lines, split))


def test_chats_that_cannot_be_trained_on_are_dropped_and_counted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "?"}
    added = [
        {"messages": []},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": "long " * 100}]},
        chats()[0],
    ]
    source = write_lines(tmp_path / "chats.jsonl", [*chats(), *added])
    url = prepare(of_chats(tmp_path / "data", source)).shards.dataset
    source_of = open_dataset(url)[0].source
    counted = {reason: count for reason, count in source_of["dropped"].items() if count}
    assert counted == {
        "chat without messages": 1,
        "chat without an answer": 1,
        "chat longer than a row": 1,
        "duplicate": 1,
    }
    assert sum(split.documents for split in open_dataset(url)[0].splits.values()) == len(ANSWERS)
    again = prepare(of_chats(tmp_path / "again", source)).shards.dataset
    assert contents(again) == contents(url)


def test_text_and_chats_may_stand_beside_each_other(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", chats())
    write_lines(tmp_path / "text.jsonl", [{"text": f"A text of number {number}. " * 9} for number in range(60)])
    changes = {
        "corpus__sources": {
            "chats": str(tmp_path / "chats.jsonl"),
            "text": {"source": str(tmp_path / "text.jsonl"), "chat_template": "", "fim": 0.5},
        },
        "corpus__near_duplicates": False,
    }
    url = prepare(of_chats(tmp_path / "data", tmp_path, **changes)).shards.dataset
    manifest, _ = open_dataset(url)
    assert {*manifest.sources} == {"chats", "text"}
    text = [row for row in rows_of(url, TRAIN) if "A text of" in spelled(url, row)]
    assert all("<|im_start|>" not in spelled(url, row) for row in text)
    assert all("A text" in spelled(url, row[is_predicted(row)]) for row in text)


def test_chats_stay_apart_from_other_chats(tmp_path: Path) -> None:
    quoted = "one two three four five six seven eight nine ten eleven twelve thirteen"
    added = [{"prompt": f"Go on: {quoted} {number}", "completion": str(number)} for number in range(3)]
    source = write_lines(tmp_path / "chats.jsonl", [*chats(), *added])
    first = prepare(of_chats(tmp_path / "first", write_lines(tmp_path / "first.jsonl", chats()[:150]))).shards.dataset
    benchmark = write_lines(tmp_path / "benchmark.jsonl", [{"prompt": quoted, "completion": "fourteen"}])
    changes = {"corpus__apart_from": [first, {"source": str(benchmark), "chat_template": "chatml"}]}
    changes |= {"corpus__tokenizer": f"{first}/tokenizer.json", "shards__heldout_fraction": 0.2}
    url = prepare(of_chats(tmp_path / "data", source, **changes)).shards.dataset
    dropped = {reason: count for reason, count in open_dataset(url)[0].source["dropped"].items() if count}
    held_out = open_dataset(first)[0].splits[HELDOUT].documents
    assert dropped.pop("held out by corpus.apart_from") == held_out
    assert 5 < dropped.pop("trained on by corpus.apart_from") < 40  # of a fifth, those that the first one trains on
    assert dropped == {"quotes corpus.apart_from": 3}


@pytest.mark.parametrize(
    ("bad", "reason", "problem"),
    [
        ({"messages": [{"role": "narrator", "content": "a"}]}, NO_ROLE, "message 0: role = 'narrator' is not one of"),
        ({"messages": [{"role": "user"}]}, NO_TEXT, "message 0: content is missing; add it"),
        ({"question": "a"}, NO_CHAT, "holds no chat: it has question"),
        ([], NO_CHAT, "is a list, not an object"),
    ],
)
def test_a_bad_chat_is_counted_and_named_with_its_line(tmp_path: Path, bad: Any, reason: str, problem: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [*chats()[:100], bad, *chats()[100:]])
    source = open_dataset(prepare(of_chats(tmp_path / "data", path)).shards.dataset)[0].source
    assert source["dropped"][reason] == 1
    [broken] = source["broken"]
    assert broken["name"] == f"{path}, line 101"
    assert broken["sample"].startswith(problem)


def test_a_bad_chat_of_a_table_is_named_with_its_row(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "narrator", "content": "a"}]},
        *({"messages": one["messages"][1:]} for one in chats()),
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "bad.parquet")
    source = open_dataset(prepare(of_chats(tmp_path / "data", tmp_path / "bad.parquet")).shards.dataset)[0].source
    assert source["dropped"][NO_ROLE] == 1
    assert source["broken"][0]["name"].endswith("bad.parquet, row group 0, row 0")


def test_chats_that_the_template_refuses_are_counted(tmp_path: Path) -> None:
    """The chats between them are laid out as without them."""
    asked = chats()
    refused = {"prompt": "no", "completion": "b"}
    path = write_lines(
        tmp_path / "chats.jsonl", [one for chat in asked for one in (refused, chat)][: len(asked)] + asked
    )
    mine = tmp_path / "mine.jinja"
    mine.write_text(
        "{% for m in messages %}\n{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    manifest, _ = open_dataset(
        prepare(of_chats(tmp_path / "data", path, corpus__chat_template=str(mine))).shards.dataset
    )
    assert manifest.source["dropped"][REFUSED] == len(asked) // 2
    [example] = [one for one in manifest.source["examples"] if one["reason"] == REFUSED][:1]
    assert "line 2 of the template: not this" in example["sample"]
    assert sum(split.documents for split in manifest.splits.values()) == len(asked)


def test_thoughts_that_a_template_leaves_out_are_counted(tmp_path: Path) -> None:
    records = chats()
    for record in records[:30]:
        record["messages"][-1]["reasoning_content"] = "I count."
    records[0]["messages"][-1]["content"] = "I count. 3"  # which shows them
    source = write_lines(tmp_path / "chats" / "a.jsonl", records)
    found = prepare(of_chats(tmp_path / "datasets", source))
    assert open_dataset(found.shards.dataset)[0].source["edits"] == {THOUGHTS_LEFT: 29}
    assert main(["inspect", found.shards.dataset]) == 0


def test_a_changed_template_makes_another_dataset(tmp_path: Path) -> None:
    path, mine = write_lines(tmp_path / "chats.jsonl", chats()), tmp_path / "mine.jinja"
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    mine.write_text(text)
    config = of_chats(tmp_path / "data", path, corpus__chat_template=str(mine))
    first = prepare(config).shards.dataset
    mine.write_text(text + "\nBye")
    assert prepare(config).shards.dataset != first


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shards__packing": "concat"}, r"shards\.packing = 'concat': cuts chats where a row is full"),
        (
            {"corpus__chat_template": "chatmll"},
            r"corpus\.chat_template = 'chatmll': is neither model nor one of chatml, llama3, plain",
        ),
        ({"corpus__fim": 0.5}, r"corpus\.fim = 0\.5: is for texts, and corpus\.chat_template = 'chatml' says"),
        ({"corpus__quality": ["c4"]}, r"corpus\.quality"),
        ({"corpus__deduplicate": "lines"}, r"corpus\.deduplicate = 'lines'"),
    ],
)
def test_settings_that_do_not_go_with_chats_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = write_lines(tmp_path / "chats.jsonl", chats())
    with pytest.raises(ConfigError, match=problem):
        prepare(of_chats(tmp_path / "data", path, **changes))
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_without_the_template_s_tokens_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", chats())
    first = prepare(of_chats(tmp_path / "data", path)).shards.dataset
    changes = {"corpus__tokenizer": f"{first}/tokenizer.json", "corpus__chat_template": "llama3"}
    with pytest.raises(ConfigError, match=r"<\|start_header_id\|>, <\|end_header_id\|>, <\|eot_id\|>"):
        prepare(of_chats(tmp_path / "data", path, **changes))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_without_a_template_are_told_to_need_one(tmp_path: Path, kind: str) -> None:
    path = write_lines(tmp_path / "chats.jsonl", chats())
    if kind == "parquet":
        path = tmp_path / "chats.parquet"
        pq.write_table(pa.Table.from_pylist(chats()), path)
    where = "line 1" if kind == "jsonl" else "row group 0, row 0"
    with pytest.raises(CorpusError, match=rf"corpus\.chat_template = '': .*{where} .*chat"):
        prepare(small(tmp_path / "data", path))


def test_chats_in_a_text_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chats.txt").write_text("user: hi")
    with pytest.raises(CorpusError, match=r"chats\.txt': .*JSON lines"):
        prepare(of_chats(tmp_path / "data", tmp_path / "chats.txt"))


def test_a_readme_beside_chats_is_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "set" / "data" / "chats.jsonl", chats())
    (tmp_path / "set" / "README.md").write_text("About these chats.")
    url = prepare(of_chats(tmp_path / "data", tmp_path / "set")).shards.dataset
    manifest, _ = open_dataset(url)
    assert manifest.source["documents"] == len(ANSWERS)
    assert manifest.source["left_out"] == ["README.md"]


def test_chats_that_are_all_too_long_say_what_to_raise(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chats())
    told = r"shards\.sequence_length = 64: 200 of the 200 records of .*chats\.jsonl are chats longer than a row; raise"
    with pytest.raises(CorpusError, match=told):
        prepare(of_chats(tmp_path / "data", source, shards__sequence_length=64))
