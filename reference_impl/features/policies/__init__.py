"""Policies other than first come, a file for each. Every docstring says how far a request can be overtaken."""

from reference_impl.features.policies.deadline import EarliestDeadline
from reference_impl.features.policies.estimates import most_tokens
from reference_impl.features.policies.fair_share import FairShare
from reference_impl.features.policies.priority import ByPriority
from reference_impl.features.policies.shortest_first import ShortestFirst

__all__ = ["ByPriority", "EarliestDeadline", "FairShare", "ShortestFirst", "most_tokens"]
