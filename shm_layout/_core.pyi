"""The compiled core: its functions and structs are declared in layout.h and api.h."""

from typing import Any

ffi: Any
lib: Any
