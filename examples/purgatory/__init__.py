"""The purgatory at work: requests that wait for what other processes do, or time out.

Each module runs by itself against a daemon: `python -m examples.purgatory.group_join [NAME]`.
"""
