"""Cluster, nodes and their notices: start, watch, drain and end a cluster."""
