"""Answers datagrams with the name of a host: `python echo.py NAME PORT ADDRESS ...`."""

import select
import socket
import sys

name, port, *addresses = sys.argv[1:]
sockets = []
for address in addresses:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    each = socket.socket(family, socket.SOCK_DGRAM)
    each.bind((address, int(port)))
    sockets.append(each)
print("ready", flush=True)
while True:
    for ready in select.select(sockets, [], [])[0]:
        data, caller = ready.recvfrom(2048)
        ready.sendto(name.encode() + data[1:], caller)
