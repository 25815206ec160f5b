# %% [markdown] name="title"
# # Start here
#
# You will read an engine that serves a language model, run it, replace its parts with yours, and measure it.
#
# Press **Shift+Enter** four times. Each press runs one cell and moves on to the next; the fourth starts the engine.

# %% name="setup" jupyter={"source_hidden": true}
# Beside this notebook lies a folder `chapters`.
# Python would take it for the course's package of that name, here and if it has done so already in this kernel.
import os
import sys

sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != os.getcwd()]
if getattr(sys.modules.get("chapters"), "__file__", None) is None:
    sys.modules.pop("chapters", None)

# %% name="answering"
print("Loading PyTorch, the engine and its model. The first start is the slowest.")

from chapters import widgets
from reference_impl import LLM, course_model
from reference_impl.assembly.demo import demo_sampling

memory = {"block_size": 4, "num_blocks": 32, "prefix_cache": "off"}
llm = LLM(course_model("target"), dtype="float32", device="cpu", **memory)
prompts = [
    "def open_file(file):\n",
    "def read_file(filename):\n    try:\n",
    'class Queue:\n    def empty(self):\n        """',
]
widgets.answering(llm, prompts, demo_sampling(), every=4, pause=0.15)

# %% [markdown] name="seen"
# That was the course's own engine, on this machine. The model has 7 M parameters and was trained on Python's own sources,
# so it continues Python and knows nothing else. It ran slowly on purpose: the cell waits after each step. Drag the slider
# to see a step again:
#
# - **Step**: the engine runs the model once for all requests of the batch. A request's first step computes its whole
#   prompt, each later one a single token. These are prefill and decode, chapter 01.
# - **Batch**: another request arrives every four steps and joins the requests that run, which are not finished. That is
#   continuous batching, chapter 03.
# - **Blocks**: the keys and values of a text stand in blocks of four tokens, which a request takes as its text grows and
#   gives back at its end. These are the KV cache, chapter 02, and paged attention, chapter 04.
#
# Change a prompt and run the cell again.

# %% [markdown] name="map-text"
# ## The course, and where you are
#
# Each notebook asks you for a number before it shows one. After a chapter's notebooks come its
# quiz and, for most chapters, its lab: you write a part of the engine, and the engine serves text with it. Run the next
# cell whenever you come back; it reads what you have done so far.

# %% name="map"
from grader.study.course_map import course_map

course_map()

# %% [markdown] name="how"
# ## How to work here
#
# - A notebook you have opened keeps a Python process, its kernel, and memory. One that has not run anything for an hour is
#   stopped, also when its notebook is open; one that is busy is not. Nothing you have written is lost, only the values
#   of variables: run the cells again from the top (menu *Run*, *Run All Above Selected Cell*).
# - What you write here is yours. `inferlab learn --update` in a terminal brings corrections and keeps your work.
# - The same without a notebook, in a terminal: `inferlab progress`, `inferlab quiz 00`, `inferlab lab check 02`.
# - `inferlab doctor` says what this machine has, and what is missing.
