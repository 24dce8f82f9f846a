"""Preemption notices: announcements that this machine will be taken away, polled from the cloud's metadata service and from a
file. This package imports neither Ray nor torch. ``preemption.notices`` only parses text: it opens no file or connection."""

from springtide.preemption.sources import MetadataService, NoticeSource, cloud_here, left_in, open_sources, poll

__all__ = ["MetadataService", "NoticeSource", "cloud_here", "left_in", "open_sources", "poll"]
