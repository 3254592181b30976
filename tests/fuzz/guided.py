"""Run decoders.py under atheris (dependency group `fuzz`), which searches for failing inputs.

python tests/fuzz/guided.py [libFuzzer's options] [folders of inputs]
"""

from __future__ import annotations

import os
import sys

import atheris

with atheris.instrument_imports(include=["purgatoryd", "decoders", "tomllib"]):
    import decoders

for name in [name for name in os.environ if name.startswith("PURGATORYD_")]:
    del os.environ[name]
atheris.Setup(sys.argv, decoders.run)
atheris.Fuzz()
