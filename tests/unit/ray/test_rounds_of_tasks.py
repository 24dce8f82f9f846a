"""What failed on the cluster runs there again, and only what goes on failing in this process. Ray itself is not started."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import pyarrow as pa
import pytest
from ray.exceptions import RayTaskError, WorkerCrashedError

from springtide.errors import CorpusError
from springtide.ray.data.prepare import ItemOutcome, _run, with_retries

ITEMS = list("abcdef")
Submitted = list[list[str]]


class Here:
    """The function, as it runs in this process."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ran: list[str] = []
        self._error = error

    def __call__(self, item: str) -> None:
        self.ran.append(item)
        if self._error:
            raise self._error


def cluster(
    submitted: Submitted, outcome: Callable[[int, int, str], ItemOutcome | Exception]
) -> Callable[[Mapping[int, str]], Generator[ItemOutcome, None, None]]:
    """Stands for Ray: notes what is submitted; an outcome is that of (round, number, item), or what ends the round."""

    def submit(left: Mapping[int, str]) -> Generator[ItemOutcome, None, None]:
        submitted.append(list(left.values()))
        for number, item in left.items():
            found = outcome(len(submitted), number, item)
            if isinstance(found, Exception):
                raise found
            yield found

    return submit


def test_what_may_pass_is_submitted_again_and_nothing_else() -> None:
    submitted: Submitted = []
    here = Here()
    done = with_retries(
        here,
        ITEMS,
        cluster(
            submitted, lambda turn, number, item: ItemOutcome(number, "503" if turn < 3 and item == "b" else "", True)
        ),
    )
    assert len(list(done)) == len(ITEMS)
    assert submitted == [ITEMS, ["b"], ["b"]]
    assert here.ran == []


def test_after_three_rounds_what_still_fails_raises_its_own_error_here() -> None:
    submitted: Submitted = []
    here = Here(OSError("503 Slow Down"))
    done = with_retries(
        here,
        ITEMS,
        cluster(submitted, lambda turn, number, item: ItemOutcome(number, "503" if item in "bd" else "", True)),
    )
    for _ in range(4):
        next(done)
    with pytest.raises(OSError, match="503 Slow Down"):
        next(done)
    assert submitted == [ITEMS, ["b", "d"], ["b", "d"]]
    assert here.ran == ["b"]


def test_an_error_that_does_not_pass_is_raised_at_once() -> None:
    submitted: Submitted = []
    here = Here(CorpusError("no such column"))
    done = with_retries(
        here,
        ITEMS,
        cluster(submitted, lambda turn, number, item: ItemOutcome(number, "no" if item == "c" else "", False)),
    )
    with pytest.raises(CorpusError, match="no such column"):
        list(done)
    assert (submitted, here.ran) == ([ITEMS], ["c"])


def test_an_item_that_only_fails_there_is_made_here_and_the_others_stay_there() -> None:
    submitted: Submitted = []
    here = Here()
    done = with_retries(
        here,
        ITEMS,
        cluster(submitted, lambda turn, number, item: ItemOutcome(number, "no" if item == "c" else "", False)),
    )
    assert len(list(done)) == len(ITEMS)
    assert (submitted, here.ran) == ([ITEMS], ["c"])


@pytest.mark.parametrize(
    ("error", "submitted_again"),
    [
        (WorkerCrashedError(), 1),
        (RayTaskError("map", "trace", OSError("a dropped connection")), 1),
        (RayTaskError("map", "trace", ImportError("no such package")), 0),
    ],
)
def test_a_lost_worker_costs_what_was_not_done(error: Exception, submitted_again: int) -> None:
    submitted: Submitted = []
    here = Here()
    done = with_retries(
        here,
        ITEMS,
        cluster(submitted, lambda turn, number, item: error if (turn, item) == (1, "e") else ItemOutcome(number)),
    )
    assert len(list(done)) == len(ITEMS)
    assert submitted == [ITEMS, *[["e", "f"]] * submitted_again]
    assert here.ran == ([] if submitted_again else ["e", "f"])


def test_a_task_tells_of_each_item_whether_it_failed_and_may_pass() -> None:
    import pickle

    def function(item: str) -> None:
        if item != "fine":
            raise {"store": OSError("503"), "corpus": CorpusError("bad")}[item]

    items = ["fine", "store", "corpus"]
    batch = pa.table({"number": [4, 5, 6], "item": [pickle.dumps(item) for item in items]})
    found = [ItemOutcome(**row) for row in _run(function, batch).to_pylist()]
    assert found == [ItemOutcome(4), ItemOutcome(5, "OSError: 503", True), ItemOutcome(6, "CorpusError: bad", False)]
