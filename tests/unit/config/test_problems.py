"""A bad value is told in our words: what is wrong with it, the limit, and what the field is."""

from __future__ import annotations

from typing import Annotated, get_args

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from springtide.cli.main import main
from springtide.config import Config
from springtide.config.files import _WORDS, in_words
from springtide.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("train.seed", -1, "train.seed = -1: must be at least 0; it is: Seed of random draws"),
        ("train.seed", 1.5, "train.seed = 1.5: is not a whole number; "),
        ("train.seed", "x", "train.seed = 'x': is not a whole number; "),
        ("train.micro_batch", 0, "train.micro_batch = 0: must be at least 1, and is not one of 'auto'; "),
        ("optim.peak_lr", "fast", "optim.peak_lr = 'fast': is not a number; "),
        ("optim.peak_lr", float("inf"), "optim.peak_lr = inf: is not a finite number; "),
        ("optim.peak_lr", -1.0, "optim.peak_lr = -1.0: must be above 0"),
        ("optim.betas", [1], "optim.betas.1: is missing; "),
        ("optim.betas", "0.9", "optim.betas = '0.9': is not a list; "),
        ("train.eval_async", "maybe", "train.eval_async = 'maybe': is neither true nor false; "),
        ("elastic.grow", "x", "elastic.grow = 'x': is not one of 'when_it_pays', 'always' or 'never'; "),
        ("stream.mixture", [1], "stream.mixture = [1]: is not a table of names and values; "),
        ("run.id", "a b", "run.id = 'a b': does not match the pattern ^("),
        ("run.root", 3, "run.root = 3: is not a text; "),
        (
            "train.total",
            "abc",
            "train.total = 'abc': is not an amount of tokens: a number, optionally followed by one of k, ",
        ),
        ("train.total", "-5", "train.total = '-5': is not an amount of tokens: "),
        ("elastic.wait", "5 apples", "elastic.wait = '5 apples': is not an amount of seconds: "),
        ("elastic.wait", float("nan"), "elastic.wait = nan: is not a finite amount of seconds; "),
    ],
)
def test_no_word_is_pydantics(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        Config().override({name: value})
    assert str(told.value).startswith(said)
    for word in ("Input should", "Value error", "valid"):
        assert word not in str(told.value).partition("; it is:")[0]


def test_each_of_our_words_fits_an_error_of_pydantic() -> None:
    """A placeholder that pydantic renames would end in a KeyError, where somebody has mistyped a number."""

    class Values(BaseModel):
        short: Annotated[list[int], Field(max_length=1)] = []
        long: Annotated[list[int], Field(min_length=2)] = [1, 2]
        text: Annotated[str, Field(min_length=2, max_length=3)] = "ab"
        below: Annotated[float, Field(lt=1)] = 0.5
        most: Annotated[float, Field(le=1)] = 0.5

    with pytest.raises(ValidationError) as found:
        Values.model_validate({"short": [1, 2], "long": [1], "text": "abcd", "below": 2, "most": 2})
    assert [in_words(one) for one in found.value.errors()] == [
        *("has more than 1 values", "has fewer than 2 values", "is longer than 3 characters"),
        *("must be below 1.0", "must be at most 1.0"),
    ]
    assert ErrorDetails.__annotations__.keys() >= {"type", "msg", "ctx"}
    from pydantic_core.core_schema import ErrorType

    assert _WORDS.keys() <= set(get_args(ErrorType))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "evaluate", "runs/RUN", "--tokens", "abc"], "argument --tokens: 'abc' is not an amount of tokens"),
    ],
)
def test_the_command_line_says_the_same(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
