"""Preemption notices of this machine, polled from its cloud's metadata service and from a file. Rule: no Ray, no torch;
``preemption.notices`` parses the answers and opens nothing."""

from springtide.preemption.sources import MetadataService, NoticeSource, cloud_here, left_in, open_sources, poll

__all__ = ["MetadataService", "NoticeSource", "cloud_here", "left_in", "open_sources", "poll"]
