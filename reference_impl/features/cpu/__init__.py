"""Fast linear layers on a CPU: LinearMethods for the core's `Linear`, and what this CPU can do."""
