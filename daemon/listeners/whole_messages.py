"""Send all frames of a message, or none.

A libzmq socket that has only part of a message treats the next message as the rest. All frames are
therefore allocated before the first send, so that only the first send can fail.
"""

from __future__ import annotations

from typing import Any

import zmq


def send_whole(socket: zmq.Socket[bytes], *frames: Any) -> None:
    """Send a message without waiting. Raises zmq.Again, MemoryError or ZMQError before any frame is
    sent."""
    # Copy the frames, because the caller reuses the memory of large ones.
    *first, last = [zmq.Frame(frame, copy=True) for frame in frames]
    for frame in first:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
    socket.send(last, zmq.NOBLOCK, copy=False)
