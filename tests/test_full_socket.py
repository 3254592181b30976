"""A full socket whose peer ends: a remote subscriber's, and a daemon's for remote clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import full_socket
import pytest

pytestmark = pytest.mark.tier("test")


@pytest.mark.parametrize("which", ["subscriber", "daemon"])
def test_a_peer_that_ends_does_not_abort_a_process_with_a_full_socket(
    which: str, tmp_path: Path
) -> None:
    command = [sys.executable, full_socket.__file__, which, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
