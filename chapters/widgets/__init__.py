"""Widgets: functions from a trace or a formula to a view. They compute nothing of their own.

ipywidgets and matplotlib only; without a front end each shows a static picture or text.
"""

from chapters.widgets.figure import show
from chapters.widgets.kv_memory import kv_memory
from chapters.widgets.predictions import predict, reveal
from chapters.widgets.quiz import quiz
from chapters.widgets.savings import savings
from chapters.widgets.timeline import timeline

__all__ = ["kv_memory", "predict", "quiz", "reveal", "savings", "show", "timeline"]
