"""The WAL's way out: from segments on the daemon's host to tables in a lake.

Two extras, neither of them needed by the daemon: `lake` (pyarrow) moves sealed segments off the
host, without a JVM; `spark` (PySpark) makes tables, audits and reports of them. Nothing here is
imported before it is used.
"""
