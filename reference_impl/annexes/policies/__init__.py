"""Orders other than first come: a file for each. Every docstring says how far a request can be overtaken."""

from reference_impl.annexes.policies.deadline import EarliestDeadline
from reference_impl.annexes.policies.estimates import most_tokens
from reference_impl.annexes.policies.fair_share import FairShare
from reference_impl.annexes.policies.priority import ByPriority
from reference_impl.annexes.policies.shortest_first import ShortestFirst
from reference_impl.annexes.policies.skip_join import SkipJoin

__all__ = ["ByPriority", "EarliestDeadline", "FairShare", "ShortestFirst", "SkipJoin", "most_tokens"]
