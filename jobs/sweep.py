"""Sweep over a recipe as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/sweep.py --space tune_spaces/lr_and_decay.py --recipe gpu_125m --name first \\
        --corpus.source s3://bucket/text --run.root s3://bucket/runs

Takes the options of ``springtide sweep``.
"""

import sys

from springtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
