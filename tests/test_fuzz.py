"""The corpus of the Python fuzz target. `make test-c` runs the corpus of the C targets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("check")

FUZZ = Path(__file__).resolve().parent / "fuzz"
CORPUS = sorted((FUZZ / "corpus" / "decoders").iterdir())
sys.path.insert(0, str(FUZZ))

import decoders  # noqa: E402  -- a program, in a folder of its own


@pytest.mark.parametrize("target", range(len(decoders.TARGETS)))
def test_every_input_is_decoded_or_refused(target: int) -> None:
    """Each input goes to each decoder, because an input found for one decoder may break another."""
    assert CORPUS
    for path in CORPUS:
        decoders.run(bytes([target]) + path.read_bytes()[1:])
