"""The step's message: named fields that all ranks of a group agree on, summed over the ranks in one all-reduce.

    message.sum("loss", nats)         a sum over ranks; for a tensor (n,), n sums
    message.any("saving", True)       True if it is True on any rank
    message.by_rank("speed", 0.2)     the value of each rank
    message.digest("samples", n)      a sum of 64-bit integers modulo 2**64

Parts (features of a step) add the fields. Every rank adds the same fields in the same order, so a field has the same position
in the all-reduced tensor on every rank. The ranks compare their fields in the first step of a group. If the fields differ, all
ranks raise an error that names the rank. If a part fails or adds other fields in a later step, its rank sends a failure flag
and zeros of the expected length. Then, too, all ranks raise an error that names this rank, so no rank hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from springtide.distributed import World, gathered, sum_over_ranks
from springtide.errors import SpringtideError

_LIMBS = 4
_LIMB_BITS = 16
_FAILED = "failed"

Fields = tuple[tuple[str, str, int, bool], ...]
"""Name, kind and length of each field, and whether its values are on the device."""


class PartFailed(RuntimeError):
    """A rank's message has other fields than rank 0's message, or than the group's first message. The fields come from the
    parts (features of a step) of the rank."""


class PeerFailed(PartFailed):
    """A part (a feature of the training step) raised an error on another rank, which raises the original error."""


class FieldsOfGroup:
    """Remembers in ``known`` which fields the messages of a worker group have; None before the first message."""

    def __init__(self) -> None:
        self.known: Fields | None = None


class StepMessage:
    """The message of one rank in one step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fields: dict[str, tuple[str, int, bool]] = {}
        self._on_device: list[Tensor] = []
        """Values that stay on the device until the all-reduce."""
        self._on_host: list[float] = []
        self._failure: Exception | None = None
        self.any(_FAILED, False)

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add a field that is summed over ranks: a number, a scalar tensor, or each element of a tensor (n,)."""
        if isinstance(value, Tensor):
            self._add(name, "sums" if value.dim() else "sum", value)
        else:
            self._add(name, "sum", [float(value)])

    def any(self, name: str, value: bool) -> None:
        """Add a flag to the message. After the exchange, the flag is True on all ranks if it is True on any rank."""
        self._add(name, "any", [float(value)])

    def by_rank(self, name: str, value: Tensor | float) -> None:
        """Add this rank's value, a number or a scalar tensor. All ranks get the values of all ranks, in rank order."""
        rank, size = self._world.rank, self._world.size
        if isinstance(value, Tensor):
            slots = torch.zeros(size, dtype=torch.float64, device=self._world.device)
            slots[rank] = value
            self._add(name, "by_rank", slots)
        else:
            self._add(name, "by_rank", [float(value) if one == rank else 0.0 for one in range(size)])

    def digest(self, name: str, value: int) -> None:
        """Add an unsigned 64-bit integer, summed over ranks modulo 2**64. The sum is exact, because float64 sums of its four
        16-bit limbs are exact."""
        self._add(name, "digest", [float(value >> _LIMB_BITS * limb & (2**_LIMB_BITS - 1)) for limb in range(_LIMBS)])

    def collect(self, source: str, contribute: Callable[[], None]) -> None:
        """Call ``contribute``, which adds fields. If it raises, ``exchange`` raises that error on this rank. The other ranks
        then raise an error that names this rank and ``source``."""
        try:
            contribute()
        except Exception as error:
            self._failure, self._source = self._failure or error, source

    def exchange(self, group: FieldsOfGroup) -> Agreed:
        """Sum the fields over all ranks in one all-reduce and return the sums. All ranks call it together. This is the step's
        only wait for the device. ``group``: remembers the fields of the worker group's first message; later messages must have
        the same fields. Below, a part is a feature of the step that adds fields.

        Raises:
            Exception: the error that a part raised on this rank, or a SpringtideError that a part raised on another rank.
            PeerFailed: a part raised any other error on another rank.
            PartFailed: the fields differ between ranks, or from the fields of the group's first step.
            CollectiveError: the all-reduce returned garbage.
        """
        fields: Fields = tuple((name, *rest) for name, rest in self._fields.items())
        if group.known is None:
            self._compare(fields)
            group.known = fields
        if fields != group.known and not self._failure:
            self._failure = PartFailed(
                f"other fields than in the group's first step: {_difference(fields, group.known)}"
            )
        if self._failure:
            self._send_zeros(group.known)
        device = self._world.device
        numbers = torch.tensor(self._on_host, dtype=torch.float64, device=device)
        sums = sum_over_ranks(torch.cat([*self._on_device, numbers]), self._world)
        agreed = Agreed(_read(group.known, sums))
        if agreed[_FAILED]:
            self._raise(gathered(self._told()))
        return agreed

    def _add(self, name: str, kind: str, values: Tensor | list[float]) -> None:
        if name in self._fields:
            raise ValueError(f"two parts add the field {name!r} to the step's message")
        if isinstance(values, Tensor):
            one = values.detach().to(self._world.device, torch.float64).reshape(-1)
            self._fields[name] = kind, len(one), True
            self._on_device.append(one)
        else:
            self._fields[name] = kind, len(values), False
            self._on_host += values

    def _compare(self, fields: Fields) -> None:
        """Compare the fields of all ranks. Raises on all ranks if a part failed on any rank or the fields differ."""
        mine = self._told(), fields
        everyone = [mine] if self._world.size == 1 else gathered(mine)
        self._raise([failure for failure, _ in everyone])
        first = everyone[0][1]
        for rank, (_, theirs) in enumerate(everyone):
            if theirs != first:
                difference = _difference(theirs, first)
                raise PartFailed(f"rank {rank}: other fields than rank 0: {difference}; start the same code")

    def _told(self) -> Exception | None:
        """Return the error that the other ranks raise because of this rank; None if no part failed on this rank."""
        error = self._failure
        if error is None or isinstance(error, PartFailed | SpringtideError):
            return error
        return PeerFailed(f"{self._source} raised {type(error).__name__}: {error}")

    def _raise(self, failures: Sequence[Exception | None]) -> None:
        """Raise if a part has failed on some rank. ``failures``: the result of ``_told`` on each rank."""
        if self._failure is not None and not isinstance(self._failure, PartFailed):
            raise self._failure
        for rank, failure in enumerate(failures):
            if isinstance(failure, PartFailed):
                raise type(failure)(f"rank {rank}: {failure}")
            if failure is not None:
                raise failure

    def _send_zeros(self, fields: Fields) -> None:
        """Replace the added values by zeros and set the failure flag. The other ranks wait for a message with the length of
        ``fields``."""
        on_device = sum(length for _, _, length, is_on_device in fields if is_on_device)
        self._on_device = [torch.zeros(on_device, dtype=torch.float64, device=self._world.device)]
        self._on_host = [
            float(name == _FAILED)
            for name, _, length, is_on_device in fields
            for _ in range(length * (not is_on_device))
        ]


class Agreed(dict[str, Any]):
    """The values that all ranks have after the exchange, by field name. The kind of a field decides the type of its value: a
    sum gives a float, or a tuple of floats for a tensor (n,); ``by_rank`` a tuple of floats; ``any`` a bool; ``digest`` an
    int."""


def _read(fields: Fields, sums: list[float]) -> dict[str, Any]:
    found = dict[str, Any]()
    # the summed tensor has all values from devices first, then all values from hosts. Next index to read in each half:
    begins = [0, sum(length for _, _, length, is_on_device in fields if is_on_device)]
    for name, kind, length, is_on_device in fields:
        place = not is_on_device
        values = sums[begins[place] : begins[place] + length]
        begins[place] += length
        match kind:
            case "sum":
                found[name] = values[0]
            case "any":
                found[name] = values[0] > 0
            case "digest":
                found[name] = sum(int(limb) << _LIMB_BITS * at for at, limb in enumerate(values)) % 2**64
            case _:
                found[name] = tuple(values)
    return found


def _difference(fields: Fields, expected: Fields) -> str:
    """Return a text with the first fields that differ between the two messages: name, kind and length."""
    more, less = (
        [f"{name} ({kind}, {length})" for name, kind, length, place in one if (name, kind, length, place) not in other]
        for one, other in ((fields, expected), (expected, fields))
    )
    if not more and not less:
        return "the same ones in another order"
    return f"{', '.join(more[:3]) or 'none'} in place of {', '.join(less[:3]) or 'none'}"
