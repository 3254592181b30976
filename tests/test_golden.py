"""The formats match tests/support/golden.json, to the byte."""

from __future__ import annotations

import json

import golden
import pytest

from purgatoryd.shm_layout import layout

pytestmark = pytest.mark.tier("check")


def test_sizes_offsets_values_messages_and_files_are_the_golden_ones() -> None:
    assert golden.golden() == json.loads(golden.GOLDEN.read_text())


def test_the_layout_id_depends_on_bytes_and_not_on_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = layout.fields

    def renamed(name: str) -> list[tuple[str, int, object]]:
        return [(f"{field}_renamed", offset, kind) for field, offset, kind in fields(name)]

    def moved(name: str) -> list[tuple[str, int, object]]:
        return [(field, offset + (name == "pg_hot"), kind) for field, offset, kind in fields(name)]

    monkeypatch.setattr(layout, "fields", renamed)
    assert layout.layout_id() == layout.LAYOUT_ID
    monkeypatch.setattr(layout, "fields", moved)
    assert layout.layout_id() != layout.LAYOUT_ID
