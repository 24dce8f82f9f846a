"""The configuration of ``ray.serve.llm`` for an export: a YAML file that ``serve run FILE`` takes where vLLM is installed.

Source: ``ray.serve.schema.ServeDeploySchema``, and ``LLMConfig`` of ray.llm, of Ray 2.60.
"""

from __future__ import annotations

import os
from typing import Any

import yaml

from springtide.errors import ConfigError, explain
from springtide.store import Folder

_BUILDER = "ray.serve.llm:build_openai_app"
_MIRRORED = ("s3://", "gs://")
"""Stores from which ``ray.serve.llm`` copies a model."""


def serve_config(export: str, name: str, max_length: int, replicas: tuple[int, int] = (1, 1)) -> str:
    """Return the YAML that serves a folder of transformers by ``ray.serve.llm``.

    Args:
        export: folder or URL of the export, as ``model export --to hf`` writes it.
        name: what clients call the model.
        max_length: most tokens that the model reads at once.
        replicas: fewest and most replicas.

    Raises:
        ConfigError: the export is in a store that ``ray.serve.llm`` does not read.

    Examples:
        >>> from springtide.interop.ray_llm import serve_config
        >>> "import_path: ray.serve.llm:build_openai_app" in serve_config("s3://bucket/mine", "mine", 2048)
        True
    """
    url = Folder(export).url
    if Folder(export).is_local:
        source: Any = os.path.abspath(export)
    elif url.startswith(_MIRRORED):
        source = {"bucket_uri": url}
    else:
        remedy = f"export to a folder of this machine, or to one of {', '.join(_MIRRORED)}"
        raise ConfigError(explain("out", export, "is in a store that ray.serve.llm does not read", remedy))
    scaling = {"min_replicas": replicas[0], "max_replicas": replicas[1]}
    model = {
        "model_loading_config": {"model_id": name, "model_source": source},
        "engine_kwargs": {"max_model_len": max_length},
        "deployment_config": {"autoscaling_config": scaling},
    }
    application = {"name": name, "route_prefix": "/", "import_path": _BUILDER, "args": {"llm_configs": [model]}}
    # Serve would listen on all addresses
    whole = {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [application]}
    return yaml.safe_dump(whole, sort_keys=False)
