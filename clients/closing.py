"""Base classes for objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self


class Closing(ABC):
    """An object that is closed at the end of its `with` block, even after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClosing:
    """An object that `async with` closes."""

    if not TYPE_CHECKING:  # a type checker reports `with`, because it finds no such methods

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} needs `async with` instead of `with`")

        def __exit__(self, *_: object) -> None:
            """Do nothing: Python looks up this method before it calls __enter__()."""
