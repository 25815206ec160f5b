"""Linear layers as a CPU multiplies them fastest: LinearMethods for the core's `Linear`, and what this CPU can do."""
