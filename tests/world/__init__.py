"""A deterministic world: one process, one seed, one virtual time.

It runs the real loop, core, group commit, sessions and subscribers over simulated clocks, sockets,
disks and processes, and an oracle judges every answer and every notice.
"""
