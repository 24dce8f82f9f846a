"""A checkpoint with its tokenizer, in a single process: encode, decode, score texts and generate texts.

Shape suffixes: B rows, L positions, V ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from springtide.checkpoint.format import read_manifest
from springtide.checkpoint.load import load
from springtide.checkpoint.retention import note_reader
from springtide.config.engine import ModelConfig
from springtide.corpus import BadChat, ChatTemplate, Tokenizer, probe
from springtide.corpus.chats import Turn
from springtide.dataset import open_dataset
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.eval.sampling import Sampling
from springtide.eval.writer import write
from springtide.hf import open_model, read_weights, their_template
from springtide.hf.export_files import MARKER
from springtide.hf.hf_files import ids_of
from springtide.hf.hf_tokenizer import tokenizer_files
from springtide.model import make, num_parameters, skeleton, whole
from springtide.shards import CHAT_TEMPLATE, TOKENIZER
from springtide.storage import Folder
from springtide.storage.host_limits import free_bytes

BATCH_SIZE = 8
"""Default number of texts that the model computes together."""
_MOST_LOGITS = 2**28
"""Most logits in memory at once, unless a single row has more."""


class Answer(NamedTuple):
    """A text that a model generated, and why it ended."""

    prompt: str
    text: str
    num_tokens: int
    ended: str
    """Why the text ended: ``end``: the model ended the document or its turn; ``stop``: at a stop string; ``length``: at the
    limit of tokens."""


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer, for scoring and generating text; from ``open_checkpoint`` or ``open_export``."""

    model: nn.Module
    vocabulary: Tokenizer
    begin: tuple[int, ...]
    """Ids that precede each text, as in training, such as begin-of-text."""
    end: int
    """The id that ends a document."""
    vocab_size: int
    max_length: int
    """Most ids that the model reads at once: the length of a row of its training data."""
    template: tuple[str, str] | None = None
    """Name and text of the chat template of the training data; None if there is none."""
    begins_chats: bool = True
    """Whether the ids of ``begin`` also precede chats."""
    ends: tuple[int, ...] = ()
    """Ids besides ``end`` that end a text, from the model's ``generation_config.json``."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without ``begin`` and ``end``."""
        [ids] = self.vocabulary.encode([text])
        return list(ids[:-1].tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        return self.vocabulary.decode(ids)

    def prompt_ids(self, prompt: str, chat: bool = False) -> list[int]:
        """Return the ids of a prompt, which the model will continue.

        Args:
            prompt: the text to continue, or with ``chat`` a user's message.
            chat: render the prompt with the chat template of the training data.

        Raises:
            ConfigError: the prompt is longer than ``max_length``, there is no chat template, or it cannot render the prompt.
        """
        try:
            ids = self._chat.prompt([Turn("user", prompt)]) if chat else self.encode(prompt)
        except BadChat as error:
            raise ConfigError(explain("prompt", prompt, error.problem, error.remedy)) from None
        found = [*(self.begin if self.begins_chats or not chat else ()), *ids] or [self.end]
        if len(found) > self.max_length:
            limit = f"has {len(found)} tokens, more than the {self.max_length} that the model reads at once"
            raise ConfigError(explain("prompt", prompt, limit, "shorten it"))
        return found

    def generate(
        self,
        prompts: Sequence[str],
        tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        chat: bool = False,
        on_text: Callable[[int, str], None] | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> list[Answer]:
        """Return the generated text after each prompt, in the order of the prompts.

        Args:
            prompts: texts to continue, or with ``chat`` a user's messages.
            tokens: most tokens of each generated text. If prompt and text exceed ``max_length``, the model no longer reads the
                oldest tokens, but still at least the last ``max_length // 2``.
            sampling: how tokens are drawn; prompt i draws with the seed plus i.
            stop: strings that end a text; the returned text does not include them.
            chat: render prompts with the chat template of the training data.
            on_text: called with the index of the prompt and each new part of its text, as the text is generated.
            batch_size: number of prompts that are continued together.

        Raises:
            ConfigError: as ``prompt_ids``, or ``tokens`` or ``batch_size`` is not positive.
        """
        _check_positive("tokens", tokens)
        _check_positive("batch_size", batch_size)
        encoded = [self.prompt_ids(prompt, chat) for prompt in prompts]
        ends = {self.end, *self.ends, *(self._chat.ends if chat else ())}
        found: list[Answer] = []
        for first in range(0, len(prompts), batch_size):
            batch = encoded[first : first + batch_size]
            seeded = dataclasses.replace(sampling, seed=(sampling.seed + first) % 2**63)
            texts = self._texts(batch, tokens, seeded, ends, stop, _from(on_text, first))
            found += [
                Answer(prompt, one.text, len(one.ids), one.ended(tokens))
                for prompt, one in zip(prompts[first : first + batch_size], texts, strict=True)
            ]
        return found

    def continued(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> list[str]:
        """Return the generated text after each prompt. Prompts are given as ids; the other arguments are as in ``generate``."""
        return [one.text for one in self._texts(prompts, tokens, sampling, {self.end, *self.ends}, stop, None)]

    def logprobs(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int = BATCH_SIZE
    ) -> list[tuple[float, bool]]:
        """Return for each continuation its log-probability after its context, and whether each of its tokens is the likeliest.

        Args:
            pairs: ids of a context, at least one id, and ids of its continuation.
            batch_size: number of pairs that are computed together, the longest pairs first.

        Raises:
            ConfigError: a pair has more than ``max_length`` + 1 ids, or ``batch_size`` is not positive.
        """
        _check_positive("batch_size", batch_size)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]) - len(pairs[number][1]))
        while order:
            longest = sum(map(len, pairs[order[0]])) - 1
            if longest > self.max_length:
                limit = f"has {longest} tokens, more than the {self.max_length} that the model reads at once"
                raise ConfigError(explain("continuation", "...", limit, "shorten its context"))
            fits = max(1, min(batch_size, _MOST_LOGITS // (max(longest, 1) * self.vocab_size)))
            chunk, order = order[:fits], order[fits:]
            for number, scored in zip(chunk, self._scored([pairs[number] for number in chunk]), strict=True):
                found[number] = scored
        return found

    @torch.no_grad()
    def _scored(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[float, bool]]:
        rows = [[*context, *continuation][:-1] for context, continuation in pairs]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[self.end] * (longest - len(row))] for row in rows], device=self._device)
        self.model.eval()
        logits_BLV: Tensor = self.model(padded)  # padding at the end changes no logit before it: attention is causal
        for row, logits_LV, (_, continuation) in zip(rows, logits_BLV, pairs, strict=True):
            wanted_L = torch.tensor(list(continuation), dtype=torch.int64, device=self._device)
            own_LV = logits_LV[len(row) - len(wanted_L) : len(row)].float()
            shares_L = own_LV.log_softmax(-1).gather(1, wanted_L[:, None])
            yield float(shares_L.sum()), bool((own_LV.argmax(-1) == wanted_L).all())

    def _texts(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampling: Sampling,
        ends: set[int],
        stop: Sequence[str],
        on_text: Callable[[int, str], None] | None,
    ) -> list[GrowingText]:
        """Generate a continuation for each prompt of one batch."""
        texts = [
            GrowingText(self.vocabulary, ids, stop, functools.partial(on_text, row) if on_text else None)
            for row, ids in enumerate(prompts)
        ]
        write(
            self.model,
            prompts,
            tokens,
            max_context=self.max_length,
            vocab_size=self.vocab_size,
            sampling=sampling,
            ends=ends,
            listen=lambda row, drawn: texts[row].add(drawn),
        )
        for text in texts:
            text.finish()
        return texts

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        if self.template is None:
            remedy = "leave chat out, or use a run whose dataset has one (corpus.chat_template)"
            raise ConfigError(
                explain("chat", True, "needs a chat template, and the data of this model has none", remedy)
            )
        name, text = self.template
        return ChatTemplate(name, text, self.vocabulary, self.begin[0] if self.begin else None)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def open_checkpoint(run: Folder, name: str, config: ModelConfig, datasets: Sequence[str] = ()) -> TextModel:
    """Load a committed checkpoint in fp32, onto the GPU if there is one.

    Args:
        run: the run's folder.
        name: name of the checkpoint.
        config: config of the model.
        datasets: URLs of the run's datasets, which all have the same tokenizer; empty for an imported model.

    Raises:
        ConfigError: this machine lacks the memory, or no tokenizer is known.
        CorpusError: the dataset cannot be read.
        CheckpointError: the checkpoint is damaged, or was trained with another tokenizer.
    """
    saved = read_manifest(run, name)
    if not datasets:
        return _imported(run, name, config)
    manifest, vocabulary = open_dataset(datasets[0])
    if saved.meta.tokenizer_digest not in ("", manifest.tokenizer_digest):
        raise CheckpointError(
            f"{name} was trained with the tokenizer {saved.meta.tokenizer_digest}, but the dataset {datasets[0]} has the "
            f"tokenizer {manifest.tokenizer_digest}: set shards.dataset to the dataset that the run trained on"
        )
    check_memory(config, manifest.vocab_size)
    model = whole(config, manifest.vocab_size, *manifest.document_ids)
    with note_reader(run, name):
        load(run, name, model)
    return TextModel(
        model=_placed(model),
        vocabulary=vocabulary,
        begin=(manifest.begin_of_text,),
        end=manifest.end_of_text,
        vocab_size=manifest.vocab_size,
        max_length=min(config.written_length, manifest.sequence_length),
        template=_template(Folder(datasets[0])),
    )


def open_export(folder: Folder) -> TextModel:
    """Load a folder of transformers, as ``springtide model export --to hf`` writes it, in fp32.

    Raises:
        ConfigError: as ``hf.open_model``, or the folder has no tokenizer, or this machine lacks the memory.
    """
    found = open_model(folder)
    if not found.tokenizer:
        raise ConfigError(explain("folder", folder.url, f"has no {TOKENIZER}", "save the tokenizer beside the model"))
    check_memory(found.model, found.model.vocab_size)
    model = skeleton(found.model, found.model.vocab_size)
    model.place(torch.device("cpu"))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_weights(found):
            parameters[name].copy_(tensor)
    return _of_others(
        model,
        found.model,
        found.tokenizer,
        folder,
        found.eos_id,
        # an export by springtide (with MARKER) was trained with begin-of-text before each text; pass its id here, because
        # tokenizer.json may not add it
        (found.bos_id,) if folder.exists(MARKER) and found.bos_id is not None else None,
        ids_of(found.generation.get("eos_token_id"), found.model.vocab_size),
    )


def check_memory(config: ModelConfig, vocab_size: int) -> None:
    """Raise ConfigError when the whole model in fp32 exceeds this machine's free memory. A user's own model is not checked,
    because its size is known only after it is built."""
    if config.source:
        return
    needed, has = 4 * num_parameters(make(config, vocab_size)), free_bytes()
    if needed > has:
        limit = f"needs {needed / 1e9:.3g} GB in one process, and this machine has {has / 1e9:.3g} GB free"
        remedy = "the workers of a run write its samples (train.sample_tokens); for more text use a larger machine"
        raise ConfigError(explain("model", f"{config.num_layers} layers of {config.dim}", limit, remedy))


def _imported(run: Folder, name: str, config: ModelConfig) -> TextModel:
    """Load an imported checkpoint, with the tokenizer in the run's folder."""
    meta = read_manifest(run, name).meta
    found, remarks = tokenizer_files(meta, [run], config.vocab_size, config.max_sequence_length)
    if TOKENIZER not in found.files:
        remedy = "import the model with its tokenizer.json, or prepare the run's dataset again"
        raise ConfigError(explain("run", run.url, "; ".join(remarks), remedy))
    probe(found.files[TOKENIZER], run.where(TOKENIZER))  # load in another process, which a hostile tokenizer may crash
    check_memory(config, config.vocab_size)
    model = whole(config, config.vocab_size)
    with note_reader(run, name):
        load(run, name, model)
    return _of_others(model, config, found.files[TOKENIZER], run, found.eos_id, None, found.end_ids)


def _of_others(
    model: nn.Module,
    config: ModelConfig,
    tokenizer: str,
    folder: Folder,
    eos_id: int | None,
    begin: tuple[int, ...] | None,
    ends: tuple[int, ...],
) -> TextModel:
    """Return the ``TextModel`` of an imported checkpoint or an export. ``begin``: ids that precede each text; None takes the
    ids that the tokenizer adds. ``ends``: ids that end a text."""
    end: int | str = "" if eos_id is None else eos_id
    vocabulary = Tokenizer.from_json(tokenizer, folder.where(TOKENIZER), end)
    if begin is None:
        plain, whole_ids = (vocabulary.tokenizer.encode("a", add_special_tokens=some).ids for some in (False, True))
        begin = tuple(whole_ids[: whole_ids.index(plain[0])]) if plain and plain[0] in whole_ids else ()
    template = _template(folder)
    return TextModel(
        model=_placed(model),
        vocabulary=vocabulary,
        begin=begin,
        end=vocabulary.end_of_text,
        vocab_size=min(vocabulary.size, config.vocab_size),
        max_length=config.written_length,
        template=template,
        begins_chats=folder.exists(MARKER) or template is None or "bos_token" in template[1],
        ends=ends,
    )


def _placed(model: nn.Module) -> nn.Module:
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _template(folder: Folder) -> tuple[str, str] | None:
    text = their_template(folder)
    return (folder.where(CHAT_TEMPLATE), text) if text else None


def _from(on_text: Callable[[int, str], None] | None, first: int) -> Callable[[int, str], None] | None:
    """Return a callback for one batch, which calls ``on_text`` with the index of the prompt instead of the row in the batch.
    ``first``: index of the batch's first prompt."""
    if on_text is None:
        return None
    return lambda row, text: on_text(first + row, text)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(explain(name, value, "must be at least 1", "give a positive number"))


# The text of a row while it is generated: find stop strings, and report the parts of the text that are final. A new id can
# change the text of the ids just before it, so these ids are "open": they are decoded again with each new id. Earlier ids are
# "settled": their text is final, and only the last few of them are decoded again.

_TAIL = 8
"""Number of ids with final text that are decoded again together with the later ids. Without them, a tokenizer may drop the
space before the first of the later ids."""
_CUT = "\ufffd"
"""Replacement character U+FFFD: stands for a character of which some bytes are missing."""
_SETTLE_AT, _MOST_OPEN = 32, 256
"""Numbers of ids whose text may still change. At the first number, the text becomes final, unless it ends within a
character. At the second number, the text becomes final even if it ends in invalid bytes."""
_MOST_BYTES = 4
"""Bytes of the longest UTF-8 character: among this many consecutive ids, at least one begins a character."""


class GrowingText:
    """The generated text after one prompt, decoded while its ids are drawn."""

    def __init__(
        self,
        vocabulary: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """``stop``: strings that end the text; ``on_text``: called with each new part of the text that is final."""
        self._vocabulary, self._prompt = vocabulary, list(prompt[-_TAIL:])
        self._stop, self._on_text = [one for one in stop if one], on_text
        self._shown = 0
        self._stopped = False
        self._settle(0, "", self._prompt, vocabulary.decode(self._prompt))
        self.ids: list[int] = []
        self.text = ""

    def add(self, drawn: int) -> bool:
        """Add an id and report new final text; return True if a stop string ends the text."""
        self.ids.append(drawn)
        if self._stop or self._on_text:
            self._read()
            self._show(len(self.text) if self._stopped else len(self.text) - self._open_end())
        return self._stopped

    def finish(self) -> None:
        """Pass the rest of the text to ``on_text``: without further ids all of it is final."""
        if not self._stopped:
            self._read()
        self._show(len(self.text))

    def ended(self, tokens: int) -> str:
        """Return why the text ended, as in ``Answer.ended``; ``tokens``: most tokens that the text may have."""
        if self._stopped:
            return "stop"
        return "length" if len(self.ids) >= tokens else "end"

    def _read(self) -> None:
        text = self._whole()
        begin = max(0, len(self._settled) - max(map(len, self._stop), default=0))  # earlier text was searched
        places = [place for one in self._stop if (place := text.find(one, begin)) >= 0]
        self._stopped = bool(places)
        self.text = text[: min(places)] if places else text
        if not places and len(self.ids) >= self._num_settled + _SETTLE_AT:
            self._settle_all(text)

    def _settle_all(self, text: str) -> None:
        """Mark ``text``, the text of all ids, as final, unless ``text`` ends within a character."""
        number = len(self.ids)
        if number >= self._num_settled + _MOST_OPEN and text.endswith(_CUT):
            number -= _TAIL  # these are invalid bytes, not an unfinished character: settle all ids but the last few
        # find a tail (the last ids with final text) that decodes to the same text alone and together with the ids after it
        for size in range(_TAIL, _TAIL + _MOST_BYTES):
            tail = self.ids[number - size : number]
            before, after = (self._vocabulary.decode(ids) for ids in (tail, [*tail, *self.ids[number:]]))
            until = len(text) - len(after) + len(before)
            is_open = number == len(self.ids) and before.endswith(_CUT)
            if (
                before
                and after.startswith(before)
                and text[:until].endswith(before)
                and text.endswith(after)
                and not is_open
            ):
                self._settle(number, text[:until], tail, before)
                break

    def _whole(self) -> str:
        """Return the text of all ids. Decodes only the ids whose text is not final, together with the few ids before them."""
        whole = self._vocabulary.decode([*self._tail, *self.ids[self._num_settled :]])
        if whole.startswith(self._before):
            return self._settled + whole[len(self._before) :]
        if not self._num_settled:
            return self._vocabulary.decode(self.ids)
        # the new id changed text that was final: decode all ids again
        self._settle(0, "", self._prompt, self._vocabulary.decode(self._prompt))
        return self._whole()

    def _settle(self, number: int, text: str, tail: list[int], before: str) -> None:
        """Set ``text`` as the final text of the first ``number`` ids. ``tail``: the ids just before all later ids, to decode
        together with them; ``before``: the text of ``tail``."""
        self._num_settled, self._settled, self._tail, self._before = number, text, tail, before

    def _open_end(self) -> int:
        """Return the number of characters at the text's end that may still change, or may be the beginning of a stop string."""
        cut = len(self.text) - len(self.text.rstrip(_CUT))
        begun = [size for one in self._stop for size in range(1, len(one)) if self.text.endswith(one[:size])]
        return max([cut, *begun])

    def _show(self, upto: int) -> None:
        if self._on_text and upto > self._shown:
            self._on_text(self.text[self._shown : upto])
            self._shown = upto
