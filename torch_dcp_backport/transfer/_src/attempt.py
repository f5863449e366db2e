"""What a rank made for an agreement, or the error that kept it from that. Knows no other rank."""

from __future__ import annotations

from typing import Any, Generic, Optional, TypeVar

T_co = TypeVar("T_co", covariant=True)

#: The value of an attempt before it is set: None is a value.
UNSET: Any = object()


class Attempt(Generic[T_co]):
    """What a rank made, or the error that kept it from that."""

    def __init__(self, value: T_co = UNSET, error: Optional[Exception] = None) -> None:
        self._value = value
        self.error = error

    def set(self, value: Any) -> None:
        """Say what was made, within `Call.guard`.

        Args:
            value: of the attempt's type.
        """
        self._value = value

    @property
    def value(self) -> T_co:
        """What was made. After an agreement it is there: this rank's problem would have been raised.

        Raises:
            Exception: the error that kept this rank from making it.
            RuntimeError: there is neither a value nor an error.
        """
        if self.error is not None:
            raise self.error
        if self._value is UNSET:
            raise RuntimeError("nothing was set: the code within the context did not say what it made")
        return self._value


def made_of(value: object) -> Any:
    """The value itself; of an attempt, what was made."""
    return value.value if isinstance(value, Attempt) else value
