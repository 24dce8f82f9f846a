"""Nodes and their notices: start, watch, drain, end a cluster."""
