"""Preemption notices (that this machine will be taken away), polled from its cloud's metadata service and from a file. Rule: no
Ray, no torch; ``preemption.notices`` only parses text, and opens no file or connection."""

from springtide.preemption.sources import MetadataService, NoticeSource, cloud_here, left_in, open_sources, poll

__all__ = ["MetadataService", "NoticeSource", "cloud_here", "left_in", "open_sources", "poll"]
