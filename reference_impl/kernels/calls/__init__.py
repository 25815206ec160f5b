"""What the compile table holds: calls of every host function, by a name that says what is special about each."""

from reference_impl.kernels.calls import attention, experts, linear, rows, sampling
from reference_impl.kernels.calls.meta import Call

CALLS: dict[str, Call] = {**attention.CALLS, **experts.CALLS, **linear.CALLS, **rows.CALLS, **sampling.CALLS}
