"""The TOML file of `purgatoryd run`. A module of its own: few daemons have one, and it is dear to
import."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from purgatoryd.shm_layout.errors import BadPath, InvalidSetting


def read_table(path: Path) -> dict[str, Any]:
    """What the file says. Raises BadPath, and InvalidSetting if it is no TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting("config", str(path), f"a TOML file: {error}", "flag") from error
