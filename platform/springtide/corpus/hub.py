"""Resolve URLs of Hugging Face Hub repositories, which hold texts or models (needs the extra ``springtide[hf]``)."""

from __future__ import annotations

from typing import Any

from springtide.errors import ConfigError, CorpusError, explain, redacted

_PROTOCOL = "hf://"
_SHOWN = 200
_REMEDY = "check its name, {form}; for a private or gated one set HF_TOKEN, or log in with hf auth login"


def pinned(source: str, setting: str = "corpus.source", form: str = "hf://datasets/OWNER/NAME") -> str:
    """Add the current commit to a Hub URL, so that all processes that make a dataset read the same bytes.

    A Hub URL is ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``; without ``datasets`` it names a model. PATH is a file, a folder
    or a glob. A ``source`` that is not a Hub URL is returned unchanged.

    Args:
        setting: name of the setting that holds ``source``, for errors.
        form: an example of the setting's form, for errors.

    Raises:
        ConfigError: huggingface_hub is not installed.
        CorpusError: the repository does not exist, or the Hub cannot be reached.
    """
    if not source.lower().startswith(_PROTOCOL):
        return source
    try:
        from huggingface_hub import HfApi, HfFileSystem
    except ImportError:
        problem, remedy = "needs huggingface_hub, which is not installed", "pip install 'springtide[hf]'"
        raise ConfigError(explain(setting, redacted(source), problem, remedy)) from None
    try:
        found: Any = HfFileSystem().resolve_path(source)
        if not hasattr(found, "repo_id"):  # the URL names a storage bucket of the Hub, which has no commits
            raise ValueError("it is not in a repository")
        commit = HfApi().repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type).sha
    except Exception as error:  # the Hub client raises many types of errors, for bad URLs too
        told = (str(error).strip().splitlines() or [""])[0][:_SHOWN]
        problem = f"cannot be reached ({type(error).__name__}: {redacted(told)})"
        raise CorpusError(explain(setting, redacted(source), problem, _REMEDY.format(form=form))) from error
    kind = f"{found.repo_type}s/" if found.repo_type != "model" else ""
    return f"{_PROTOCOL}{kind}{found.repo_id}@{commit}/{found.path_in_repo}".rstrip("/")
