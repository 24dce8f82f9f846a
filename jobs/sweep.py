"""Sweep over a recipe as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/sweep.py --space tune_spaces/lr_and_decay.py --recipe gpu_125m --name first \\
        --resume auto --corpus.source s3://bucket/text --run.root s3://bucket/runs --shards.root s3://bucket/data

Takes the options of ``springtide sweep``. One that was stopped or killed continues when it is submitted again, each trial
from its newest checkpoint.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("sweep"))
