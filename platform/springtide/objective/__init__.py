"""What is minimised in place of the cross-entropy of next tokens. Layer rule: an objective is a function of a micro-batch; its
results are sums over tokens or rows, never means; it knows nothing about ranks.

``objective.source`` names one that is built in (``distill``), or yours; ``springtide.objective.objective`` has the contract.
"""

from springtide.objective.next_token import next_token
from springtide.objective.objective import Columns, Objective, zeros

__all__ = ["Columns", "Objective", "next_token", "zeros"]
