# fault: a sender that sends nothing.
# fails: check_clean, check_lossy, check_corrupt

# %% nbgrader={"grade_id": "transfer"}
def packet(kind, number, payload):
    """(kind, number, payload, checksum)"""
    return (kind, number, payload, zlib.crc32(f"{kind}{number}".encode() + payload))


class Sender:
    """Sends `data` in packets of `size` bytes; sends again what was not acknowledged after 10 units of time.

    on_packet(p, now), on_timer(now) -> [("send", packet) | ("timer", time)]; on_timer is called once at the start.
    """

    def __init__(self, data, size):
        self.parts = [data[i : i + size] for i in range(0, len(data), size)]
        self.open = set(range(len(self.parts)))

    def on_packet(self, p, now):
        if p == packet(*p[:3]):
            self.open.discard(p[1])
        return []

    def on_timer(self, now):
        if self.open:
            return []
        head = packet("size", len(self.parts), b"")
        sent = [("send", packet("data", i, self.parts[i])) for i in sorted(self.open)]
        return [("send", head), *sent, ("timer", now + 10.0)]


class Receiver:
    """Acknowledges packets; data() -> what has arrived, in order."""

    def __init__(self):
        self.parts = {}

    def on_packet(self, p, now):
        kind, number, payload, _ = p
        if p != packet(kind, number, payload) or kind != "data":
            return []
        self.parts[number] = payload
        return [("send", packet("ack", number, b""))]

    def data(self):
        return b"".join(self.parts[i] for i in sorted(self.parts))
