"""What stands between a lab's functions and the engine: a lab's shape on one side, an interface on the other.

A lab's notebook gives plain functions of tensors and numbers. Each class here turns them into one of the engine's
parts, and hands over, beside the question, what the engine's own part answers: the notebook compares the two, and names
what differs. So a notebook needs no requests, batches or plans.

    serving      an engine with such parts, from prompts to tokens
    milestone    the end of a lab: what was served with the learner's part
    sampler      lab 01: a sampler from draws of rows with the same settings
    events       lab 01: a trace as (time, kind, request)
    attention    labs 02, 04, 05: attention from one request at a time, or from block tables
    schedule     lab 03: a scheduler from one of ids and counts
    blocks       lab 04: a KV manager from functions of block tables
    speculation  lab 08: drafts and a verifier from functions of distributions
"""

from reference_impl.assembly.demo import PROMPT as DEMO_PROMPT
from reference_impl.assembly.lab_parts.attention import (
    AttentionByRequest,
    AttentionByTable,
    PagedQueries,
    RequestQueries,
)
from reference_impl.assembly.lab_parts.blocks import BlocksByTable
from reference_impl.assembly.lab_parts.events import MovingClock, events_of
from reference_impl.assembly.lab_parts.milestone import show_served
from reference_impl.assembly.lab_parts.sampler import Draw, SamplerBySettings, engine_draw, engine_probabilities
from reference_impl.assembly.lab_parts.schedule import SchedulerById, scheduler_parts
from reference_impl.assembly.lab_parts.serving import LabEngine, course_llm
from reference_impl.assembly.lab_parts.speculation import Round, Speculation, drafted_by, speculating

__all__ = [
    "DEMO_PROMPT",
    "AttentionByRequest",
    "AttentionByTable",
    "BlocksByTable",
    "Draw",
    "LabEngine",
    "MovingClock",
    "PagedQueries",
    "RequestQueries",
    "Round",
    "SamplerBySettings",
    "SchedulerById",
    "Speculation",
    "course_llm",
    "drafted_by",
    "engine_draw",
    "engine_probabilities",
    "events_of",
    "scheduler_parts",
    "show_served",
    "speculating",
]
