"""Closed-form calculators: bytes, operations, seconds. NumPy and the standard library only; imports no other part.

units          decimal and binary sizes kept apart, rates that cannot be mixed up
model_shapes   what a model's config says about its size, and a table of known models
hardware       what a data sheet says about a device, dated; its memory hierarchy
links          bytes per second between devices, hosts and nodes, in one direction; seconds per message; topologies
kv_cache       bytes of keys and values, memory budgets, how much context fits
latency        operation counts with and without a cache, time bounds from compute and bandwidth
roofline       arithmetic intensity of matrices, attention and whole steps; which of a device's limits binds
attention_traffic  values that attention moves over a whole prompt, unfused and tiled
online_softmax  a softmax over pieces, merged
collectives    alpha-beta cost of communication, tensor parallelism
pipeline       a model in stages: schedules, bubbles, what one token takes
schedules      collectives message by message, to be drawn, and in closed form
experts        experts over ranks: the busiest rank, replicas, placement, capacity
queueing       waiting against load: Little's law and queues with a closed form
prefix_cache   what hits save
speculative    tokens of a step with drafts, and when they pay
quantization   bits, errors and sizes of formats
fusion         bytes that a fused chain of operations saves
occupancy      warps, registers and shared memory of an SM
warp           lanes, banks and branches of a warp
mixtures       mixtures of experts: a table beside the models
rank_parts     what the busiest rank of a layout has of a model
layout_costs   bytes, seconds and messages of one layout: tensor, pipeline, data and expert parallelism
choices        what a layout gives under a load
plan           which layout of a model on so many GPUs, and why
names          rows of the tables by what a person types
deployment     a model on a device: times of a step and of a prompt
cost           price per token, fleets, the throughput a deployment can have
adapters       size of low-rank adapters
drills         random exercises over all of the above, with a checker that explains

Import the module you need; this file imports nothing, so that `import reference_impl.theory` stays cheap.
"""
