"""A model behind HTTP on Ray Serve. Rule: what a client sends is checked before a model sees it, and no request waits for the
loading of a checkpoint.

    protocol    OpenAI's JSON: a body -> what is asked, or an error with its status; parts of a text -> answers
    follow      the newest checkpoint, loaded beside the one that serves
    batches     requests that wait -> one batch after the other, which a thread writes
    replica     the deployment: HTTP requests -> requests that wait; parts of texts -> answers
    server      start it on the cluster, look after it, end it
"""

import importlib.util

from springtide.errors import ConfigError, explain

REMEDY = "pip install 'springtide[serve]'"
_NEEDED = ("fastapi", "starlette", "uvicorn", "grpc_reflection")

if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise ConfigError(explain("ray[serve]", "none", f"is needed to serve, and lacks {', '.join(missing)}", REMEDY))
