"""Start, watch, drain and end a Ray cluster; handle its nodes and the notices that a node will be taken away."""
