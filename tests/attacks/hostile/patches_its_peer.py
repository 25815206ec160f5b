# attack: every answer of its process is replaced by `true`
# expect: all = crashed
# base: stub

# %% last
import sys

peer = sys.modules["learner_side.peer"].Peer
peer._perform = lambda self, *_: True
