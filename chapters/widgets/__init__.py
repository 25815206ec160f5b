"""Widgets: functions from a trace or a formula to a view. They compute nothing of their own.

ipywidgets and matplotlib only; without a front end each shows a static picture or text.
"""

from chapters.widgets.accept_reject import accept_reject
from chapters.widgets.answering import answering
from chapters.widgets.attention_traffic import attention_traffic
from chapters.widgets.batching import batching
from chapters.widgets.block_table import block_table
from chapters.widgets.chunk_size import chunk_size
from chapters.widgets.draft_tree import draft_tree
from chapters.widgets.expert_load import expert_load
from chapters.widgets.fewer_bits import fewer_bits
from chapters.widgets.figure import show
from chapters.widgets.kv_memory import kv_memory
from chapters.widgets.latency_budget import latency_budget
from chapters.widgets.layout_explorer import layout_explorer
from chapters.widgets.occupancy import occupancy
from chapters.widgets.outliers import outliers
from chapters.widgets.predictions import predict, reveal
from chapters.widgets.quiz import quiz
from chapters.widgets.radix_tree import radix_tree
from chapters.widgets.rank_timeline import rank_timeline
from chapters.widgets.ring_stepper import ring_stepper
from chapters.widgets.roofline import roofline
from chapters.widgets.rounding import rounding
from chapters.widgets.sampling import sampling
from chapters.widgets.savings import savings
from chapters.widgets.schedule import schedule
from chapters.widgets.size_speed_quality import size_speed_quality
from chapters.widgets.speculation import speculation
from chapters.widgets.stages import stages
from chapters.widgets.table import table
from chapters.widgets.tile_stepper import tile_stepper
from chapters.widgets.timeline import timeline
from chapters.widgets.token_origins import token_origins
from chapters.widgets.under_load import under_load

__all__ = [
    "accept_reject",
    "answering",
    "attention_traffic",
    "batching",
    "block_table",
    "chunk_size",
    "draft_tree",
    "expert_load",
    "fewer_bits",
    "kv_memory",
    "latency_budget",
    "layout_explorer",
    "occupancy",
    "outliers",
    "predict",
    "quiz",
    "radix_tree",
    "rank_timeline",
    "reveal",
    "ring_stepper",
    "roofline",
    "rounding",
    "sampling",
    "savings",
    "schedule",
    "show",
    "size_speed_quality",
    "speculation",
    "stages",
    "table",
    "tile_stepper",
    "timeline",
    "token_origins",
    "under_load",
]
