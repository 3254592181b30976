"""The daemon's sockets, and the code that decides which peers may use them.

`transport.py` declares the interface that the loop uses, `sockets.py` implements it with ZeroMQ. A
peer passes three checks: `acl.py` makes the kernel refuse the connections of some users, `zap.py`
and `admission_control.py` admit or cut off connections, `access.py` holds the uids that may connect
and administer. No module here imports the loop, or the objects that it serves.
"""
