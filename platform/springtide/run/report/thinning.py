"""Curves with fewer points: the least and the greatest value of every bucket of steps, so that no peak is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

BUCKETS = 1000
"""Most buckets of a curve: about the width of a page in pixels."""

Points = list[tuple[float, float]]


def bucket_steps(last_step: float) -> int:
    """Return the steps of a bucket, a power of two: buckets stay where they are while a run grows, until they double.

    >>> bucket_steps(1000), bucket_steps(1001), bucket_steps(1_000_000)
    (1, 2, 1024)
    """
    bucket = 1
    while last_step > BUCKETS * bucket:
        bucket *= 2
    return bucket


def thin(x: np.ndarray, y: np.ndarray, bucket: int) -> Points:
    """Return the points with the least and the greatest value of each bucket.

    Args:
        x: steps, ascending, of shape (T,).
        y: values of the same shape; those that are not finite are not drawn.
        bucket: steps of a bucket.
    """
    x, y, begins = _buckets(x, y, bucket)
    if len(begins) == len(x):
        return list(zip(x.tolist(), y.tolist(), strict=True))
    parts = [(begin, y[begin:end]) for begin, end in itertools.pairwise([*begins.tolist(), len(y)])]
    at = np.unique([begin + place for begin, part in parts for place in (part.argmin(), part.argmax())])
    return list(zip(x[at].tolist(), y[at].tolist(), strict=True))


def mean(x: np.ndarray, y: np.ndarray, bucket: int) -> Points:
    """Return the mean of each bucket, at the mean of its steps; arguments as for ``thin``."""
    x, y, begins = _buckets(x, y, bucket)
    if not len(x):
        return []
    counts = np.diff(begins, append=len(x))
    middles, values = np.add.reduceat(x, begins) / counts, np.add.reduceat(y, begins) / counts
    return list(zip(middles.tolist(), values.tolist(), strict=True))


def smooth(points: Sequence[tuple[float, float]], parts: int = 50) -> list[tuple[float, float]]:
    """Return the moving average over 1/``parts`` of the curve; centered, so that it does not lag. NaN is ignored."""
    values = np.array([y for _, y in points])
    known = np.isfinite(values)
    reach = len(values) // parts // 2
    window = np.ones(2 * reach + 1)
    totals = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)] if len(values) else values
    counts = np.convolve(known.astype(float), window)[reach : reach + len(values)] if len(values) else values
    return [(x, total / count) for (x, _), total, count in zip(points, totals, counts, strict=True) if count]


def some(items: Sequence[tuple[float, float]], most: int) -> Points:
    """Return at most ``most`` items at even distances, the last among them."""
    every = -(-len(items) // most) or 1
    return list(items[::-1][::every][::-1])


def _buckets(x: np.ndarray, y: np.ndarray, bucket: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the finite points, and where each bucket begins among them."""
    known = np.abs(y) < 1e300  # sums of a bucket stay finite; NaN is not less
    if not known.all():
        x, y = x[known], y[known]
    if not len(x):
        return x, y, np.empty(0, np.int64)
    first, last = x[0] // bucket, x[-1] // bucket
    if last - first < len(x):
        return x, y, np.unique(np.searchsorted(x, np.arange(first, last + 1) * bucket))
    return x, y, np.flatnonzero(np.diff(x // bucket, prepend=first - 1))
