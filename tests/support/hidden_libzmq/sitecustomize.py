"""Hide the functions of libzmq from a daemon. Its Python runs this file first."""

import ctypes
import os
from typing import Any

_open = ctypes.CDLL


def _hiding(name: Any, *arguments: Any, **named: Any) -> ctypes.CDLL:
    if named.get("mode", 0) & os.RTLD_NOLOAD:
        raise OSError(f"{name} is hidden by a test")
    return _open(name, *arguments, **named)


ctypes.CDLL = _hiding  # type: ignore[misc, assignment]
