"""Train a recipe as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/train.py --recipe gpu_125m --run.id mine --resume auto \\
        --corpus.source s3://bucket/text --run.root s3://bucket/runs --shards.root s3://bucket/data

Takes the options of ``springtide train``. On SIGTERM, which ``ray job stop`` sends, it saves a checkpoint before it stops.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("train"))
