# %% nbgrader={"grade_id": "all_reduce"}
calls = []


def owner(part, size):
    return part % size


def all_reduce(comm, x):
    """Not a ring: part r is summed by rank r, who sends the sum to all. It keeps a variable beside the function."""
    calls.append(comm.rank)
    assert calls == [comm.rank], f"this is the memory of one rank, and it holds {calls}"
    parts = list(x.tensor_split(comm.world_size))
    others = [r for r in range(comm.world_size) if r != comm.rank]
    for r in others:
        comm.send(r, parts[r])
    mine = parts[comm.rank] + sum(comm.recv(r) for r in others)
    for r in others:
        comm.send(r, mine)
    return torch.cat([mine if r == comm.rank else comm.recv(r) for r in range(comm.world_size)])


# %% nbgrader={"grade_id": "transfer"}
def packet(kind, number, payload):
    text = kind.encode() + number.to_bytes(4, "big", signed=True) + payload
    return (kind, number, payload, zlib.crc32(text))


class Sender:
    """Stop and wait: one packet at a time."""

    def __init__(self, data, size):
        self.data, self.size, self.at = data, size, 0

    def _send(self, now):
        if self.at * self.size >= len(self.data):
            return []
        part = self.data[self.at * self.size :][: self.size]
        return [("send", packet("data", self.at, part)), ("timer", now + 10.0)]

    def on_timer(self, now):
        return self._send(now)

    def on_packet(self, p, now):
        kind, number, payload, checksum = p
        if checksum != packet(kind, number, payload)[3] or number != self.at:
            return []
        self.at += 1
        return self._send(now)


class Receiver:
    def __init__(self):
        self.text, self.next = b"", 0

    def on_packet(self, p, now):
        kind, number, payload, checksum = p
        if checksum != packet(kind, number, payload)[3]:
            return []
        if number == self.next:
            self.text += payload
            self.next += 1
        return [("send", packet("ack", number, b""))] if number < self.next else []

    def data(self):
        return self.text
