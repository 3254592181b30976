"""The TOML file of `purgatoryd run`. This is a separate module, because few daemons need a TOML
parser."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from purgatoryd.shm_layout.errors import BadPath, InvalidSetting


def read_table(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises BadPath, and InvalidSetting for invalid TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting("config", str(path), f"a TOML file: {error}", "flag") from error
