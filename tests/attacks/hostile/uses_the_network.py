# attack: every way out: TCP, UDP, names, raw and other families, the host's local sockets; it works all the same
# expect: passed
# says: reached []

# %% first
import itertools
import os
import socket

reached = []
families = [n for n in dir(socket) if n.startswith("AF_") and n != "AF_UNIX"]
for family, kind in itertools.product(families, ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW", "SOCK_SEQPACKET")):
    try:
        sock = socket.socket(getattr(socket, family), getattr(socket, kind))
        reached.append((family, kind))
        sock.connect(("127.0.0.1", int("@PORT@")))
        sock.send(b"x")
    except OSError:
        pass
for address in ("\0@MARK@", "/run/dbus/system_bus_socket", "/var/run/docker.sock", "/run/systemd/journal/socket"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            socket.socket(socket.AF_UNIX, kind).connect(address)
            reached.append(address)
        except OSError:
            pass
try:
    reached.append(socket.getaddrinfo("example.org", 80))
except OSError:
    pass
interfaces = [name for _, name in socket.if_nameindex()] if hasattr(os, "nothing") else []
print("reached", reached + interfaces)
