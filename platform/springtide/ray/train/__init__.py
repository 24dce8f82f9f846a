"""Ray Train: the controller's policies, worker groups, and what runs in them."""
