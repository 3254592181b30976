"""Let tests of clients run over both transports of local clients.

A pytest plugin. Tests of the files in BOTH that start daemons run with rings, and in the tier `all`
once more with daemons that give no rings, so that their clients use ZeroMQ. Tests of the files in
IN_PYTHON run once more with daemons that do not find the functions of libzmq, so that Python
receives each message.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import real_daemon
from tiers import wide

BOTH = frozenset((
    "test_access", "test_batch_crash", "test_bulk_loads_daemon", "test_cancelled", "test_client",
    "test_clients_gone", "test_consumer_daemon", "test_continuity", "test_crash",
    "test_disk_errors", "test_faults", "test_hostile", "test_interrupts", "test_late_daemon",
    "test_lost_names", "test_lots", "test_operation_columns", "test_operations", "test_outage",
    "test_parking_daemon",
    "test_purgatory_daemon", "test_resharding", "test_schedules_daemon", "test_shards_daemon",
    "test_uid_share",
    "test_wal_daemon",
))  # fmt: skip

IN_PYTHON = frozenset(("test_client", "test_hostile", "test_operations", "test_outage"))
HIDDEN = Path(__file__).parent / "hidden_libzmq"
"""Folder whose sitecustomize.py hides the functions of libzmq."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the parameter `transport` to the tests of the files in BOTH."""
    name = metafunc.module.__name__
    if name in BOTH and "daemon" in metafunc.fixturenames:
        in_python = [wide("zmq-in-python")] if name in IN_PYTHON else []
        metafunc.parametrize("transport", ["ring", wide("zmq"), *in_python], indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start the daemons of a test with rings, or without them. Return the parameter. The fixture
    `daemon` depends on this one; pytest would drop a fixture that nothing requests."""
    chosen = str(getattr(request, "param", "ring"))
    if chosen != "ring":
        monkeypatch.setitem(real_daemon.SETTINGS, "PURGATORYD_RING_MEMORY", "0")
    if chosen == "zmq-in-python":
        monkeypatch.setitem(real_daemon.SETTINGS, "PYTHONPATH", str(HIDDEN))
    return chosen
