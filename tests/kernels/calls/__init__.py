"""What the compile table holds: calls of every host function, each under a name that says what is special about it."""

from tests.kernels.calls import attention, experts, fused_linear, linear, rows, sampling
from tests.kernels.calls.meta import Call

CALLS: dict[str, Call] = {
    **attention.CALLS, **experts.CALLS, **fused_linear.CALLS, **linear.CALLS, **rows.CALLS, **sampling.CALLS
}  # fmt: skip
