"""Find the names that a module of the tests imports from the product."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def product_imports(module: ModuleType) -> dict[str, object]:
    """Return the names that a module imports from the package, with their values."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    return {
        name.name: vars(module)[name.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("purgatoryd")
        for name in node.names
    }
