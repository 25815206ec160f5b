"""Closed-form calculators: bytes, operations, seconds. NumPy and the standard library only; imports no other part.

units          decimal and binary sizes kept apart, rates that refuse to be mixed
model_shapes   what a model's config says about its size, and a table of known models
hardware       what a data sheet says about a device, dated
kv_cache       bytes of keys and values, memory budgets, how much context fits
latency        operation counts with and without a cache, time bounds from compute and bandwidth
drills         random exercises over all of the above, with a checker that explains

Import the module you need; this file imports nothing, so that `import reference_impl.theory` stays cheap.
"""
