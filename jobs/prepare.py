"""Turn text into a dataset as a Ray job, by tasks on all nodes. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/prepare.py --recipe gpu_125m \\
        --corpus.source s3://bucket/text --shards.root s3://bucket/data

Takes the options of ``springtide data prepare``. One that was stopped or killed continues when it is submitted again.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("data", "prepare"))
