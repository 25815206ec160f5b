"""The way from a submitted notebook to a result: intake, the examiner, its processes, and the worker that carries
them."""
