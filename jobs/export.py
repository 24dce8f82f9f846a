"""Export a checkpoint for transformers or PEFT as a Ray job. On a cluster with springtide in its image:

    ray job submit --working-dir . -- python jobs/export.py s3://bucket/runs/mine --to hf --out s3://bucket/exports/mine

Takes the arguments of ``springtide model export``.
"""

import sys

from springtide.cli.job import job

if __name__ == "__main__":
    sys.exit(job("model", "export"))
