"""Serve a checkpoint over HTTP as a Ray job, and each newer one. On a cluster with springtide in its image:

    ray job submit --submission-id serve-mine --no-wait --working-dir . \\
        --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' -- \\
        python jobs/serve.py s3://bucket/runs/mine --replicas 1:4

Takes the arguments of ``springtide model serve``. On SIGTERM, which ``ray job stop`` sends, it answers requests that have begun
before it stops.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("model", "serve"))
