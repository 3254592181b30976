"""What is imported only with an extra: a clear error where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from purgatoryd.shm_layout.errors import ExtraMissing

PATH = "where PATH is the checkout or the wheel of purgatoryd"
"""End of an advice to install, because no package index has purgatoryd."""


def need(module: str, extra: str) -> None:
    """Raises ExtraMissing unless `module` can be imported; `extra` is ours that brings it."""
    if find_spec(module) is None:
        raise ExtraMissing(module, f"pip install 'PATH[{extra}]', {PATH}")
