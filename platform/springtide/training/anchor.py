"""Penalties that keep the weights w near the weights w0 that a run starts from (``objective.anchor``), so that it forgets less.

    l2sp              (weight / 2) sum of     (w - w0)^2     Li, Grandvalet and Davoine, "Explicit inductive bias for transfer
                                                             learning with convolutional networks", 2018
    a Fisher's URL    (weight / 2) sum of F * (w - w0)^2     EWC: Kirkpatrick et al., "Overcoming catastrophic forgetting in
                                                             neural networks", 2017

F, the Fisher information, measures for each weight how much the loss grows when the weight changes. The penalty is added to the
loss per token. Its gradient is weight * p, with p = F (w - w0), or p = w - w0 for l2sp. It is elementwise: each rank adds it to
its own shards, at any world size and in any layout. Clipping acts on the whole gradient: the norm includes the penalty, and the
clip factor multiplies the gradients of loss and penalty. The gradient g of the loss must be multiplied by a factor c
(``correction``), which the ranks know only after the step's all-reduce. So the norm is computed from three sums that travel in
this all-reduce:

    |c g + weight p|^2 = c^2 |g|^2 + 2 c weight <g, p> + weight^2 |p|^2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from springtide.checkpoint.branch import FIELD as START
from springtide.checkpoint.branch import split
from springtide.checkpoint.format import FISHER, Manifest, Meta, checkpoints, committed, read_manifest
from springtide.checkpoint.load import Mismatch, by_tensor, check_names, read_into, read_pieces
from springtide.checkpoint.restore import Restored
from springtide.checkpoint.tensors import local, plain_name
from springtide.config import Config
from springtide.config.objective import L2SP
from springtide.distributed import gathered, rank_here
from springtide.errors import CheckpointError, ConfigError, SpringtideError, explain, redacted
from springtide.storage import Folder, digest
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult

_NUM_SUMS = 3
_FIELD, _COMPONENT, _METRIC = "objective.anchor", "anchor", "anchor_penalty"
_AGAIN = "compute it for that checkpoint: springtide train --fisher-tokens"


class Anchor(Part):
    """The penalty on a model's trainable weights. Stores this rank's shards of the start weights w0 and, for EWC, of the Fisher
    information F."""

    def __init__(self, model: nn.Module, config: Config, is_first_copy: bool = True) -> None:
        """Allocate the shards of w0 and F, which ``begin`` fills. ``model`` must be sharded already. ``is_first_copy``: True if
        this rank belongs to the first copy of the model (DDP and HSDP have several)."""
        self._config, self._is_first_copy = config, is_first_copy
        self._weight = config.objective.anchor_weight
        self._parameters = {f"model/{name}": parameter for name, parameter in trained(model).items()}
        self._origins = {name: torch.empty_like(one.detach()) for name, one in self._parameters.items()}
        has_fisher = config.objective.anchor != L2SP
        self._fishers = {name: torch.empty_like(one) for name, one in self._origins.items() if has_fisher}
        self._digests: dict[str, str] = {}
        """URL of each checkpoint that w0 and F were read from -> digest of its manifest."""

    def begin(self, found: Restored | None) -> None:
        """Read the anchor weights w0 from the checkpoint that the run started from, and the Fisher F; all ranks call it
        together. Both are read at each restart, because the run's own checkpoints do not contain them.

        Raises:
            ConfigError: w0 or F has vanished or is of another model or checkpoint, or F is negative or not finite.
            CheckpointError: the restored state was trained with other values of w0 or F.
            OSError: the store cannot be reached.
        """
        fatal: Exception | None = None
        try:
            self._load(self._config)
        except (SpringtideError, OSError) as error:
            fatal = error
        except Exception as error:  # any error: this rank must still reach ``gathered``, where all ranks wait
            fatal = RuntimeError(f"rank {rank_here()} cannot read the anchor: {type(error).__name__}: {error}")
        for problem in gathered(fatal):
            if problem is not None:
                raise problem
        if found is not None:
            check_digests(found.meta, _COMPONENT, self._digests, f"{_FIELD} would pull elsewhere")

    def describe(self, meta: Meta) -> Meta:
        return meta.adding({_COMPONENT: self._digests})

    def contribute(self, message: StepMessage, share: Share) -> None:
        message.sum(_COMPONENT, self.sums())

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Return this rank's part of three sums after backward, float64 (3,): <g, p>, |p|^2 and sum of p (w - w0). g is the
        gradient of the loss, p the pull of the penalty, w0 the start weights. Ranks outside the model's first copy return
        zeros, so that no shard counts twice."""
        device = next(iter(self._parameters.values())).device
        found = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=device)
        for gradient, pull, away in self._pulls() if self._is_first_copy else ():
            square = torch.linalg.vector_norm(pull, dtype=torch.float64).square()
            # multiply elements in fp32 and sum in float64, so that the result does not depend on where shards are cut
            found += torch.stack([_sum(gradient * pull), square, _sum(pull * away)])
        return found

    def receive(self, result: StepResult) -> None:
        """Replace the step's gradient norm by the norm of the total gradient, loss plus penalty. Also report the penalty."""
        inner, square, value = result.agreed[_COMPONENT]
        whole = result.grad_norm**2 + 2 * self._weight * result.correction * inner + self._weight**2 * square
        result.grad_norm = 0.0 if whole < 0 else math.sqrt(whole)
        result.extra[_METRIC] = self._weight / 2 * value

    @torch.no_grad()
    def add_gradients(self, clip: float) -> None:
        for gradient, pull, _ in self._pulls():
            # multiply and add in separate kernels: a fused kernel may round the last elements of a shard differently, so the
            # result would depend on where shards are cut
            gradient.add_(pull.mul_(self._weight * clip))

    def _pulls(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield three shards for each trainable tensor: its gradient, the penalty's pull p, and the distance w - w0 from the
        start weights."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                away = local(parameter.detach()) - local(self._origins[name])
                yield local(parameter.grad), local(self._fishers[name]) * away if self._fishers else away, away

    def _load(self, config: Config) -> None:
        url = config.train.start_from
        run, name = split(url)
        manifest = _manifest(run, name, START, url)
        _read(run, name, manifest, self._origins, START, url)
        self._digests = {redacted(url): digest_of(run, name, manifest)}
        if not self._fishers:
            return
        there, newest, fisher = fisher_of(config)
        _read(there, newest, fisher, self._fishers, _FIELD, config.objective.anchor)
        self._digests[redacted(config.objective.anchor)] = digest_of(there, newest, fisher)
        for name, tensor in self._fishers.items():
            if bad := what_is_bad(local(tensor)):
                raise ConfigError(explain(_FIELD, config.objective.anchor, f"contains {bad} for {name}", _AGAIN))


def check_digests(meta: Meta, component: str, digests: Mapping[str, str], problem: str) -> None:
    """Raise CheckpointError if auxiliary checkpoints, such as a teacher's, have changed since the state was saved. They are
    read at every start.

    Args:
        meta: metadata of the restored state.
        component: key of ``meta.components`` under which the digests at the time of the save are stored.
        digests: URL of each auxiliary checkpoint -> digest of its manifest now (``digest_of``).
        problem: what the change would cause, for the message.
    """
    known = meta.components.get(component)
    for url, found in digests.items():
        if isinstance(known, dict) and known.get(url, found) != found:
            was = f"{known[url]!r:.40} until step {meta.step}"
            raise CheckpointError(f"{url} was {was} and is {found} now: {problem}. Put the earlier checkpoint back")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of ``model``, by name."""
    return {plain_name(name): one for name, one in model.named_parameters() if one.requires_grad}


def what_is_bad(fisher: Tensor) -> str:
    """Describe the invalid value in a tensor of Fisher information, such as "a negative value"; empty if all values are valid.

    Examples:
        >>> what_is_bad(torch.tensor([0.0, 1.0])), what_is_bad(torch.tensor([1.0, -1.0]))
        ('', 'a negative value')
    """
    if not bool(torch.isfinite(fisher).all()):
        return "a value that is not finite"
    return "a negative value" if bool((fisher < 0).any()) else ""


def check_settings(config: Config) -> None:
    """Raise ConfigError if ``objective.anchor`` contradicts other settings. Reads no checkpoint."""
    anchor, problem = config.objective.anchor, ""
    if anchor and not config.train.start_from:
        problem = "pulls to the weights that a run starts from, and train.start_from names none"
        remedy = "name a checkpoint there, or leave it empty"
    elif anchor and config.model.adapter != "none":
        problem = f"pulls weights that model.adapter = {config.model.adapter!r} keeps as they are"
        remedy = "leave it empty, or train all weights with adapter none"
    if problem:
        raise ConfigError(explain(_FIELD, anchor, problem, remedy))


def check_fisher(config: Config, model: nn.Module) -> None:
    """Check, before the run begins, the Fisher (a stored diagonal of squared gradients) that ``objective.anchor`` names. It
    must belong to the checkpoint that the run starts from, and have a tensor for each trainable weight of ``model``. Raises
    ConfigError if it does not. Reads indexes, but no data."""
    if config.objective.anchor in ("", L2SP):
        return
    run, name, manifest = fisher_of(config)
    wanted = {f"model/{name}": parameter for name, parameter in trained(model).items()}
    _check(run, name, manifest, wanted, _FIELD, config.objective.anchor)


def fisher_of(config: Config) -> tuple[Folder, str, Manifest]:
    """Return the run folder, the checkpoint name and the manifest of the Fisher that ``config`` names. Raises ConfigError if
    that Fisher does not exist, or belongs to another checkpoint than the run starts from."""
    url, start = config.objective.anchor, config.train.start_from
    run, name = split(url)
    name = name or (committed(run) or [""])[-1]
    if not name:
        raise ConfigError(
            explain(_FIELD, url, "holds no Fisher information: nothing is committed there", f"use l2sp, or {_AGAIN}")
        )
    manifest = _manifest(run, name, _FIELD, url)
    if FISHER not in manifest.meta.labels:
        raise ConfigError(
            explain(_FIELD, url, "is a checkpoint of weights, not of Fisher information", f"use l2sp, or {_AGAIN}")
        )
    origin, step = split(start)
    if manifest.meta.labels[FISHER] != digest_of(origin, step, _manifest(origin, step, START, start)):
        of = manifest.meta.labels.get(f"{FISHER}_of", "another one")
        raise ConfigError(explain(_FIELD, url, f"is of {of}, and the run starts from {start}", _AGAIN))
    return run, name, manifest


def labels_of_fisher(run: Folder, name: str) -> dict[str, str]:
    """Return the metadata labels of a stored Fisher, which record that it was computed for checkpoint ``name`` of ``run``."""
    url = redacted(f"{run.url}/checkpoints/{name}")
    return {FISHER: digest_of(run, name, read_manifest(run, name)), f"{FISHER}_of": url}


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float64)


def digest_of(run: Folder, name: str, manifest: Manifest) -> str:
    """Return the digest of a checkpoint's manifest. The manifest lists checksums of all files, so the digest changes if any
    file changes."""
    return digest.of_bytes((checkpoints(run) / name).read(manifest.name))


def _manifest(run: Folder, name: str, field: str, url: str) -> Manifest:
    try:
        return read_manifest(run, name)
    except CheckpointError as error:
        raise _unreadable(field, url, error) from None


def _unreadable(field: str, url: str, error: CheckpointError) -> ConfigError:
    what = f"is read at every start while {_FIELD} is set, and cannot be: {error}"
    return ConfigError(explain(field, url, what, "bring it back; each checkpoint of this run needs it"))


def _read(run: Folder, name: str, manifest: Manifest, into: Mapping[str, Tensor], field: str, url: str) -> None:
    """Fill this rank's shard of each tensor of ``into`` from the checkpoint. ``field`` and ``url``: setting and value to name
    in errors."""
    try:
        pieces = [one for one in read_pieces(run, name, manifest) if one.tensor in into]
        read_into(checkpoints(run), pieces, into)
    except Mismatch as error:
        raise ConfigError(explain(field, url, str(error), _AGAIN if field == _FIELD else "name another one")) from None
    except CheckpointError as error:
        raise _unreadable(field, url, error) from None


def _check(run: Folder, name: str, manifest: Manifest, wanted: Mapping[str, Tensor], field: str, url: str) -> None:
    """Check names, shapes and types of the checkpoint's tensors against ``wanted``, as ``_read`` does, without reading data."""
    try:
        check_names(by_tensor(one for one in read_pieces(run, name, manifest) if one.tensor in wanted), wanted)
    except Mismatch as error:
        raise ConfigError(explain(field, url, str(error), _AGAIN)) from None
    except CheckpointError as error:
        raise _unreadable(field, url, error) from None
