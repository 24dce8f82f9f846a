"""Evaluate a checkpoint as a Ray job, on the node of the job. On a cluster with springtide in its image:

    ray job submit --entrypoint-num-cpus 4 --working-dir . -- python jobs/evaluate.py s3://bucket/runs/mine --json

Takes the arguments of ``springtide model evaluate``.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("model", "evaluate"))
