# %% [markdown] nbgrader={"grade_id": "intro"}
# # A toy lab of several roles
#
# Four ranks that sum a tensor in a ring, and a sender and a receiver over a line that loses packets.
#
# **Trap (own memory):** a variable beside your functions is a rank's own; no other rank sees it.
#
# **Trap (twice):** a packet can come twice.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import zlib

import torch

# %% nbgrader={"grade_id": "tools"}
from grader.channel import Faults, Link, Network
from grader.checks import rng, roles, seed, together


class Collectives:
    """What a rank has of the network. It counts the bytes of each rank; the learner's code cannot."""

    LEARNER_SEES = ("rank", "world_size", "send", "recv")

    def __init__(self, port):
        self.rank, self.world_size, self.port = port.rank, port.num_ranks, port

    def send(self, to, x):
        self.port.send(to, x)

    def recv(self, source):
        return self.port.recv(source)


def all_reduced(tensors):
    """all_reduce of one tensor per rank: the results and the network."""
    network = Network(len(tensors))
    with roles(len(tensors)) as ranks:
        comms = [Collectives(port) for port in network.ports]
        calls = [lambda r=r: ranks[r].all_reduce(comms[r], tensors[r].clone()) for r in range(len(tensors))]
        return together(calls), network


def transferred(data, forward, backward, limit=5_000):
    """What arrives of `data` between a sender and a receiver, and the time at which nothing was left to do."""
    with roles(2) as (source, target):
        sender, receiver = source.Sender(data, 8), target.Receiver()
        now, timer = 0.0, None
        actions = [("there", action) for action in sender.on_timer(now)]
        for _ in range(limit):
            for where, (kind, value) in actions:
                if kind == "send":
                    (forward if where == "there" else backward).send(value, now)
                elif kind == "timer":
                    timer = value
            times = [t for t in (forward.next_arrival, backward.next_arrival, timer) if t is not None]
            if not times:
                break
            now = min(times)
            actions = [("back", action) for p in forward.arrived(now) for action in receiver.on_packet(p, now)]
            actions += [("there", action) for p in backward.arrived(now) for action in sender.on_packet(p, now)]
            if timer is not None and timer <= now:
                timer = None
                actions += [("there", action) for action in sender.on_timer(now)]
        return receiver.data(), now


# %% nbgrader={"grade_id": "all_reduce", "solution": true}
def all_reduce(comm, x):
    """Sum of every rank's x [n], on every rank. comm: rank, world_size, send(to, tensor), recv(source).

    A ring: no rank sends more than 2 (R - 1) / R of the bytes of x, rounded up to whole parts.
    """
    ### BEGIN SOLUTION
    rank, size = comm.rank, comm.world_size
    parts = list(x.clone().tensor_split(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        comm.send(after, parts[(rank - step) % size])
        parts[(before - step) % size] = parts[(before - step) % size] + comm.recv(before)
    for step in range(size - 1):
        comm.send(after, parts[(rank + 1 - step) % size])
        parts[(rank - step) % size] = comm.recv(before)
    return torch.cat(parts)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_sum", "grade": true, "points": 2}
# property: every rank has the sum of all.
# hint: after the first half of the ring each rank has one finished part.
tensors = [torch.full((8,), float(10**r)) for r in range(4)]
results, _ = all_reduced(tensors)
print(f"rank 0 has {results[0].tolist()}")
for rank, result in enumerate(results):
    assert torch.equal(result, torch.full((8,), 1111.0)), f"rank {rank} has {result}"
### BEGIN HIDDEN TESTS
tensors = list(torch.randint(100, (4, 12), generator=rng("check_sum")))
for rank, result in enumerate(all_reduced(tensors)[0]):
    assert torch.equal(result, sum(tensors)), f"rank {rank} has {result}, expected {sum(tensors)}"
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "check_uneven", "grade": true, "points": 1}
# property: any number of elements and ranks will do.
# hint: parts may have different sizes.
results, network = all_reduced([torch.arange(5), torch.arange(5), torch.arange(5)])
assert all(torch.equal(result, 3 * torch.arange(5)) for result in results), f"saw {results}"
assert network.num_unread == 0, f"{network.num_unread} messages were sent and never received"

# %% nbgrader={"grade_id": "check_bytes", "grade": true, "points": 1}
# property: no rank sends more than 2 (R - 1) / R of the bytes.
# hint: a part, not the whole tensor.
_, network = all_reduced([torch.zeros(16)] * 4)
most = max(network.bytes_sent_by(rank) for rank in range(4))
print(f"{network.num_messages} messages, at most {most} bytes of a rank")
assert 0 < most <= 2 * 3 * 16 * 4 / 4, f"a rank sent {most} bytes; a ring needs 96"


# %% nbgrader={"grade_id": "transfer", "solution": true}
def packet(kind, number, payload):
    """(kind, number, payload, checksum)"""
    ### BEGIN SOLUTION
    return (kind, number, payload, zlib.crc32(f"{kind}{number}".encode() + payload))
    ### END SOLUTION


class Sender:
    """Sends `data` in packets of `size` bytes; sends again what was not acknowledged after 10 units of time.

    on_packet(p, now), on_timer(now) -> [("send", packet) | ("timer", time)]; on_timer is called once at the start.
    """

    def __init__(self, data, size):
        ### BEGIN SOLUTION
        self.parts = [data[i : i + size] for i in range(0, len(data), size)]
        self.open = set(range(len(self.parts)))
        ### END SOLUTION

    def on_packet(self, p, now):
        ### BEGIN SOLUTION
        if p == packet(*p[:3]):
            self.open.discard(p[1])
        return []
        ### END SOLUTION

    def on_timer(self, now):
        ### BEGIN SOLUTION
        if not self.open:
            return []
        head = packet("size", len(self.parts), b"")
        sent = [("send", packet("data", i, self.parts[i])) for i in sorted(self.open)]
        return [("send", head), *sent, ("timer", now + 10.0)]
        ### END SOLUTION


class Receiver:
    """Acknowledges packets; data() -> what has arrived, in order."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.parts = {}
        ### END SOLUTION

    def on_packet(self, p, now):
        ### BEGIN SOLUTION
        kind, number, payload, _ = p
        if p != packet(kind, number, payload) or kind != "data":
            return []
        self.parts[number] = payload
        return [("send", packet("ack", number, b""))]
        ### END SOLUTION

    def data(self):
        ### BEGIN SOLUTION
        return b"".join(self.parts[i] for i in sorted(self.parts))
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_clean", "grade": true, "points": 1}
# property: on a good line everything arrives.
# hint: 3 packets of at most 8 bytes.
forward, backward = Link(), Link()
data, now = transferred(b"twenty characters...", forward, backward)
print(f"{forward.num_messages} packets there, {backward.num_messages} back, done at {now:.0f}")
assert data == b"twenty characters...", f"saw {data}"

# %% nbgrader={"grade_id": "check_lossy", "grade": true, "points": 2}
# property: what is lost is sent again, what comes twice counts once, and the order does not matter.
# hint: the number of a packet says where it belongs.
faults = Faults(drop=0.3, repeat=0.3, reorder=0.3, delay=(1.0, 8.0))
links = [Link(faults, seed(f"check_lossy {i}")) for i in range(2)]
text = bytes(torch.randint(256, (100,), generator=rng("check_lossy")).tolist())
data, now = transferred(text, *links)
print(f"{links[0].num_messages} packets there, {links[1].num_messages} back, done at {now:.0f}")
assert data == text, f"{len(data)} bytes arrived, and they differ from the {len(text)} that were sent"

# %% nbgrader={"grade_id": "check_corrupt", "grade": true, "points": 1}
# property: a damaged packet is not taken.
# hint: compare the checksum.
links = [Link(Faults(corrupt=0.5), seed(f"check_corrupt {i}")) for i in range(2)]
text = bytes(range(100))
data, now = transferred(text, *links)
assert data == text, f"what arrived differs in {sum(a != b for a, b in zip(data, text, strict=False))} bytes"
