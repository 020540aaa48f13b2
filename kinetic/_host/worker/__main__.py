"""The worker as a program of its own, for a worker with its own hash seed.

In: its title, four descriptors, its agent's process id. Out: see `process.main`.
"""

import socket
import sys

from kinetic._host.channel import Channel
from kinetic._host.worker import process
from kinetic._system import processes

processes.set_title(sys.argv[1])
channel, *rest = map(int, sys.argv[2:])
process.main(Channel(socket.socket(fileno=channel)), *rest)
