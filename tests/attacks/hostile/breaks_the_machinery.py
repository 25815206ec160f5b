# attack: replaced parts of json, socket, torch and of the code that carries its answers
# expect: all = crashed
# base: stub

# %% last
import json
import socket
import sys

socket.socket.send = socket.socket.recv_into = json.loads = json.dumps = lambda *_, **__: 0
torch.empty = torch.from_numpy = lambda *_, **__: None
for name, module in list(sys.modules.items()):
    if name.startswith("learner_side"):
        for key in list(vars(module)):
            setattr(module, key, None)
