"""Train a recipe as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/train.py --recipe gpu_125m \\
        --corpus.source s3://bucket/text --run.root s3://bucket/runs

Takes the options of ``springtide train``. On SIGTERM, which ``ray job stop`` sends, it saves a checkpoint before it stops.
"""

import sys

from springtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
