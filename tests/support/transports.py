"""Let tests of clients run over both transports of local clients.

A pytest plugin. Tests of the files in BOTH that start daemons run with rings, and in the tier `all`
once more with daemons that give no rings, so that their clients use ZeroMQ.
"""

from __future__ import annotations

import pytest
import real_daemon
from tiers import wide

BOTH = frozenset((
    "test_batch_crash", "test_bulk_loads_daemon", "test_cancelled", "test_client",
    "test_clients_gone", "test_continuity", "test_crash", "test_faults", "test_hostile",
    "test_interrupts", "test_lots", "test_operations", "test_outage", "test_purgatory_daemon",
    "test_resharding",
))  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the parameter `transport` to the tests of the files in BOTH."""
    if metafunc.module.__name__ in BOTH and "daemon" in metafunc.fixturenames:
        metafunc.fixturenames.insert(0, "transport")  # before a fixture that starts a daemon
        metafunc.parametrize("transport", ["ring", wide("zmq")], indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the daemons of a test with rings, or without them."""
    if request.param == "zmq":
        monkeypatch.setitem(real_daemon.SETTINGS, "PURGATORYD_RING_MEMORY", "0")
