"""Train a recipe as a Ray job. On a cluster whose image has springtide:

    ray job submit --working-dir . -- python jobs/train.py --recipe gpu_125m --run.root s3://bucket/runs

Takes what ``springtide train`` takes; SIGTERM, as ``ray job stop`` sends it, saves a checkpoint first.
"""

import sys

from springtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
