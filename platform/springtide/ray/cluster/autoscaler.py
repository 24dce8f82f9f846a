"""What Ray's autoscaler can provide: whether it starts nodes by their labels, and whether it can meet what is requested.

Ray has one request of resources for the whole cluster; its ``AutoscalingCoordinator``, an actor that Ray Train and Ray Data
share, adds up those of all runs. The autoscaler meets all of it or nothing: a single worker for which no kind of node is left
keeps it from starting any.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

from ray.exceptions import RayError

from springtide.ray._ray_private import GcsClient, GetClusterStatusReply, is_autoscaler_v2

_ANSWER_S = 2.0


class Provision(Enum):
    """What the autoscaler can do with the cluster's request."""

    FEASIBLE = "it starts what is requested"
    INFEASIBLE = (
        "no kind of node that Ray's autoscaler may still start has room for all that the cluster's runs request"
    )
    WITHOUT_LABELS = (
        "Ray's autoscaler of version 1 cannot choose nodes by label (RAY_enable_autoscaler_v2=1 on the head)"
    )
    MISSING = "the cluster has no autoscaler that starts nodes"
    UNKNOWN = "the head does not answer"


def provision(gcs: str) -> Provision:
    """Return what the autoscaler of the cluster with its GCS at ``gcs`` says of the newest request that it has seen. This
    process is connected to the cluster."""
    try:
        client = _client(gcs)
        if not is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
            return Provision.WITHOUT_LABELS
        reply = GetClusterStatusReply()
        reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_S))
    except (RayError, OSError, RuntimeError):
        return Provision.UNKNOWN
    if not reply.HasField("autoscaling_state"):
        return Provision.MISSING
    return (
        Provision.INFEASIBLE if reply.autoscaling_state.infeasible_cluster_resource_constraints else Provision.FEASIBLE
    )


@functools.cache
def _client(gcs: str) -> Any:
    return GcsClient(address=gcs)  # each has a connection of its own
