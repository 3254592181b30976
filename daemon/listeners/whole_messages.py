"""Send a message of several frames as a whole, or not at all.

A socket of libzmq that got a part of a message takes the next message for the rest of it. So all
frames get their memory before the first one is sent: then only the first send can fail.
"""

from __future__ import annotations

from typing import Any

import zmq


def send_whole(socket: zmq.Socket[bytes], *frames: Any) -> None:
    """Send a message without a wait. Raises zmq.Again, MemoryError and ZMQError; nothing is sent
    then."""
    # A copy, because the caller uses the memory of large frames again.
    *first, last = [zmq.Frame(frame, copy=True) for frame in frames]
    for frame in first:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
    socket.send(last, zmq.NOBLOCK, copy=False)
