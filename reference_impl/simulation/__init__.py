"""The same engine without a model: how it behaves under a load, on hardware that is elsewhere or hypothetical.

    result = simulate(workload("chat", rate=4.0, num_requests=1000), Deployment(...))
    results = simulate_replicas(stream, replicas=100, cost=CalibratedCost.load(file), router="prefix")

Scheduler, blocks and prefix cache are the engine's own. The seconds of a step come from a cost: the roofline of
`theory.deployment`, or a fit to steps measured on this machine (`inferlab bench simulator calibrate`).
"""

from reference_impl.simulation.calibration import fit
from reference_impl.simulation.cost import CalibratedCost, Roofline
from reference_impl.simulation.ledger import Ledger, Result
from reference_impl.simulation.replica import Replica
from reference_impl.simulation.replicas import simulate, simulate_replicas

__all__ = [
    "CalibratedCost",
    "Ledger",
    "Replica",
    "Result",
    "Roofline",
    "fit",
    "simulate",
    "simulate_replicas",
]
