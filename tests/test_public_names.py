"""Public names are those of tests/support/public_names.txt."""

from __future__ import annotations

import public_names
import pytest

pytestmark = pytest.mark.tier("check")


def test_public_names_are_the_listed_ones() -> None:
    assert public_names.printed() == public_names.NAMES.read_text()
