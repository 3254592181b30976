"""Examples of the purgatory: requests that wait for events of other processes, or time out.

Each module runs by itself against a daemon: `python -m examples.purgatory.group_join [NAME]`.
"""
