"""What ends a text comes in with a model and goes out: transformers stops on an export where ours stops."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from chains import write_chain
from chatting import chat_run
from published import ENDS, VOCABULARY, trl_template
from tokenizers.processors import TemplateProcessing

from springtide.corpus import Tokenizer
from springtide.errors import ConfigError
from springtide.eval.sampling import Sampling
from springtide.eval.text_model import open_export
from springtide.hf import GENERATION
from springtide.hf.hf_tokenizer import SETTINGS
from springtide.run.exchange import export_model, import_model
from springtide.run.text import open_text
from springtide.storage import Folder

pytestmark = pytest.mark.processes

transformers = pytest.importorskip("transformers")


HI = [{"role": "user", "content": "Hi"}]


def id_of(token: str, vocabulary: Tokenizer = VOCABULARY) -> int:
    return vocabulary.id_of(token, "")


def chain(folder: Path, family: str, end: str, **settings: Any) -> Path:
    """A model that writes "AB", the ``end`` of its turn, and if nobody stops it "AB" again."""
    after = {id_of("A"): id_of("B"), id_of("B"): id_of(end)}
    write_chain(folder, VOCABULARY, after, id_of("A"), trl_template(family), **settings)
    return folder


def generated(folder: Path) -> list[int]:
    """The ids that transformers writes after "Hi", at most 12."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = model.generate(**ids, max_new_tokens=12, do_sample=False)
    return list(whole[0, ids["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("family", ENDS)
def test_transformers_stops_where_we_stop(family: str, tmp_path: Path) -> None:
    end = ENDS[family][0]
    ids = {"eos_token_id": id_of("<|endoftext|>"), "bos_token_id": id_of("<|begin_of_text|>")}
    run = import_model(str(chain(tmp_path / "in", family, end, **ids)), str(tmp_path / "run"))
    out = Path(export_model(run, str(tmp_path / "out")).url)
    ours = open_export(Folder(str(out))).generate(["Hi"], 12, Sampling(temperature=0.0), chat=True)
    assert (ours[0].text, ours[0].num_tokens, ours[0].ended) == ("AB", 2, "end")
    assert generated(out) == [id_of("A"), id_of("B"), id_of(end)]


def test_a_chat_model_of_ours_ends_with_its_turn(tmp_path: Path) -> None:
    """A model that was trained on chats goes out with the end of its turns beside that of its texts."""
    out = Path(export_model(chat_run(tmp_path), str(tmp_path / "out")).url)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ends
    assert json.loads((out / GENERATION).read_text())["eos_token_id"] == ends
    assert tokenizer.eos_token == "<|im_end|>"
    [begin] = tokenizer.convert_tokens_to_ids(["<s>"])
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=True)["input_ids"] == (
        open_export(Folder(str(out))).prompt_ids("Hi", chat=True)
    )
    assert open_export(Folder(str(out))).prompt_ids("Hi", chat=True)[0] == begin


def test_all_ends_and_sampling_defaults_come_in_and_go_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = [id_of("<|endoftext|>"), id_of("<|call|>"), id_of("<|eot_id|>")]
    model = chain(tmp_path / "in", "llama3_1", "<|call|>", eos_token_id=ends)
    settings = {
        "eos_token_id": ends,
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
        "pad_token_id": 3,
        "guidance": 2,
    }
    (model / GENERATION).write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        run = import_model(str(model), str(tmp_path / "run"))
    assert "left out guidance" in caplog.text
    out = Path(export_model(run, str(tmp_path / "out")).url)
    found = json.loads((out / GENERATION).read_text())
    assert found == {key: value for key, value in settings.items() if key != "guidance"} | {"bos_token_id": None}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ends
    assert generated(out) == [id_of("A"), id_of("B"), id_of("<|call|>")]


def test_a_template_that_writes_eos_token_keeps_the_end_of_text(tmp_path: Path) -> None:
    """Phi 3 writes eos_token after the end of its last turn: as the end of the turn it would stand there twice."""
    model = chain(tmp_path / "in", "phi3", "<|end|>", eos_token_id=id_of("<|endoftext|>"))
    run = import_model(str(model), str(tmp_path / "run"))
    out = Path(export_model(run, str(tmp_path / "out")).url)
    assert json.loads((out / SETTINGS).read_text())["eos_token"] == "<|endoftext|>"


def test_a_begin_that_nothing_writes_does_not_come_in(tmp_path: Path) -> None:
    """Configs of Qwen name a begin of text, which no text has. Templates of Llama 3 write theirs."""
    begins = {"eos_token_id": id_of("<|endoftext|>"), "bos_token_id": id_of("<s>")}
    runs = {
        family: import_model(
            str(chain(tmp_path / family, family, "<|call|>", **begins)), str(tmp_path / f"run-{family}")
        )
        for family in ("qwen2_5", "llama3")
    }
    assert runs["qwen2_5"].config.corpus.begin_of_text == ""
    assert runs["llama3"].config.corpus.begin_of_text == "<s>"
    out = Path(export_model(runs["llama3"], str(tmp_path / "out")).url)
    assert json.loads((out / SETTINGS).read_text())["bos_token"] == "<s>"


def test_a_damaged_generation_config_is_refused_by_name(tmp_path: Path) -> None:
    model = chain(tmp_path / "in", "qwen2_5", "<|im_end|>", eos_token_id=id_of("<|im_end|>"))
    (model / GENERATION).write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"generation_config\.json.*JSON object"):
        import_model(str(model), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_chats_begin_as_the_template_begins_them(tmp_path: Path) -> None:
    """A tokenizer may put a begin-of-text before texts that the template of the model does not put before chats."""
    vocabulary = Tokenizer.from_json(VOCABULARY.to_json())
    vocabulary.tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", id_of("<s>"))])
    ids = {"eos_token_id": id_of("<|endoftext|>"), "bos_token_id": id_of("<s>")}
    write_chain(tmp_path / "in", vocabulary, {}, id_of("A"), trl_template("qwen2_5"), **ids)
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    assert run.config.corpus.begin_of_text == ""
    model = open_text(run.folder.url)
    assert model.prompt_ids("Hi")[0] == id_of("<s>")
    assert id_of("<s>") not in model.prompt_ids("Hi", chat=True)


@pytest.mark.parametrize(
    "settings", [{"temperature": 10**400, "do_sample": True}, {"temperature": 0.5}, {"eos_token_id": "x"}]
)
def test_sampling_that_transformers_would_refuse_does_not_go_out(settings: dict[str, Any], tmp_path: Path) -> None:
    model = chain(tmp_path / "in", "qwen2_5", "<|im_end|>", eos_token_id=id_of("<|im_end|>"))
    (model / GENERATION).write_text(json.dumps(settings))
    out = Path(export_model(import_model(str(model), str(tmp_path / "run")), str(tmp_path / "out")).url)
    found = transformers.GenerationConfig.from_pretrained(out)
    found.save_pretrained(tmp_path / "again")
    assert found.temperature is None or found.temperature == 1.0
    assert found.eos_token_id == id_of("<|im_end|>")
