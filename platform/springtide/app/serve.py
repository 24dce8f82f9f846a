"""Serve the model of a run, or of an export, over HTTP."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from springtide.checkpoint.format import step_of
from springtide.config import RUN_CONFIG, Config
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run
from springtide.run.text import open_text, text_model
from springtide.run.trust import check_model_code
from springtide.store import Folder

if TYPE_CHECKING:
    from springtide.generation import TextModel
    from springtide.on_ray.serve.follow import Source
    from springtide.on_ray.serve.server import Server, Serving

EXPORT = "export"
"""What stands for the checkpoint of a folder of transformers."""
_LOOK_S = 1.0
"""Time between two looks at what serves [s]."""


@contextlib.contextmanager
def server(
    path: str, how: Serving, name: str = "", step: int | None = None, poll_s: float = 10.0, trust_code: bool = False
) -> Iterator[Server]:
    """Serve a model over HTTP in the block, as OpenAI's API has it, on the cluster that this process is connected to, else that
    of RAY_ADDRESS, else a private one.

    Args:
        path: path or URL of a run's folder, or of a folder of transformers, such as an export.
        how: address, replicas and batches.
        name: what clients call the model; if empty: the folder's name.
        step: step of the run's checkpoint; None: the newest, and each newer one as soon as it is committed.
        poll_s: time between two looks for a newer checkpoint [s].
        trust_code: run the code of the user's own model if the config names one (``model.source``); needed unless you
            started the run with the same code.

    Raises:
        ConfigError: the folder has no model, a value is out of its limits, a part is not installed, or the port is taken.
        SpringtideError: no replica could start.
    """
    from springtide.on_ray.cluster.session import cluster, has_cluster  # Ray loads only when needed
    from springtide.on_ray.serve.server import serving

    source = source_of(path, name, step, poll_s, trust_code)
    size = {"elastic.max_workers": how.replicas[1], "elastic.cpus_per_worker": max(how.cpus, 0.01)}
    is_private = not has_cluster()
    with cluster(Config().override(size), dashboard=False), serving(source, how, is_private) as found:
        yield found


def source_of(
    path: str, name: str = "", step: int | None = None, poll_s: float = 10.0, trust_code: bool = False
) -> Source:
    """Return where replicas get the model from; arguments and errors as for ``server``."""
    from springtide.on_ray.serve.follow import Source

    folder = Folder(path)
    called = name or folder.url.rstrip("/").rsplit("/", 1)[-1]
    if not folder.exists(RUN_CONFIG):
        if step is not None:
            raise ConfigError(explain("step", step, "is for runs, and this is another folder", "leave it out"))
        return Source(called, functools.partial(str, EXPORT), functools.partial(_open_export, path))
    run = Run(folder)
    check_model_code(folder, run.config, trust_code)  # here, where the user reads what is wrong
    newest = run.checkpoint_at(step)
    if step is not None:
        return Source(called, functools.partial(str, newest), functools.partial(_open, run, trust_code))
    if poll_s <= 0:
        raise ConfigError(explain("poll", poll_s, "must be above 0", "give a time, such as 10s"))
    return Source(called, run.checkpoint_at, functools.partial(_open, run, trust_code), poll_s)


def _open(run: Run, trust_code: bool, name: str) -> TextModel:
    return text_model(run, step_of(name), trust_code)


def _open_export(path: str, name: str) -> TextModel:
    return open_text(path)


def serve_until_stopped(path: str, how: Mapping[str, Any], say: Callable[[str], None], **more: Any) -> None:
    """Serve a model until SIGINT or SIGTERM, and tell each change of what serves.

    Args:
        path: as for ``server``.
        how: fields of ``Serving``.
        say: called with each line.
        more: other arguments of ``server``.

    Raises:
        ConfigError, SpringtideError: as ``server``.
    """
    from springtide.on_ray.cluster.stop_signals import stop_signals
    from springtide.on_ray.serve.server import Serving, watch

    # in this order: Ray has handlers of its own, which come with the cluster
    with contextlib.suppress(KeyboardInterrupt), server(path, Serving(**how), **more) as found, stop_signals() as asked:
        say(f"{found.url} (Ctrl-C ends it)")
        watch(found, say, lambda: asked.wait(_LOOK_S))
        say("ending; requests that have begun are answered")
