"""Write what a teacher says of each row of a dataset, as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/label.py s3://bucket/data/DATASET \\
        --by s3://bucket/runs/teacher --what topk --k 64 --out s3://bucket/labels/teacher

Takes the arguments of ``springtide data label``. A larger dataset is labelled on all GPUs of the cluster. A job that was
stopped or killed continues when it is submitted again.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("data", "label"))
