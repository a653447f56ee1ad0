"""Exceptions as code of other people raises them, kind and hostile ones, to be drawn by hypothesis.

An :class:`Error` says how to raise one and what must be found in the text that is kept of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from sqlalchemy_jobs import PermanentJobError, RetryAfter

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Error:
    """How to make an exception, what its text must hold, and whether it ends the job at once."""

    make: Callable[[], BaseException]
    name: str
    said: str = ""
    final: bool = False

    def __repr__(self) -> str:
        return f"Error({self.name}, {self.said[:50]!r})"


class Mute(Exception):  # noqa: N818 - a test's own
    """Cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("not even this")

    __repr__ = __str__


class Evil(Exception):  # noqa: N818 - a test's own
    """Ends the program that looks at it."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Untouchable(Exception):  # noqa: N818 - a test's own
    """Raises whatever is asked of it, its class included."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Impostor(Exception):  # noqa: N818 - a test's own
    """Says that it is of another class."""

    @property
    def __class__(self) -> Any:
        return RetryAfter

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise NotImplementedError


class Nameless(type):
    """A class that does not tell its name, nor anything else."""

    def __getattribute__(cls, name: str) -> Any:
        raise ZeroDivisionError(name)


class Anonymous(Mute, metaclass=Nameless):
    """Tells neither its name nor anything else."""


class Odd:
    """An object that cannot be printed."""

    def __repr__(self) -> str:
        raise ValueError("not even this")


def _plain(kind: type[BaseException], text: str) -> Error:
    return Error(lambda: kind(text), kind.__name__, text, final=kind is PermanentJobError)


def _again(text: str) -> Error:
    return Error(lambda: RetryAfter(0, text), "RetryAfter", text)


def _caused(error: Error, text: str) -> Error:
    def make() -> BaseException:
        made = ValueError(text)
        made.__cause__ = error.make()
        return made

    return Error(make, "ValueError", text)


def _cyclic(length: int, text: str) -> Error:
    def make() -> BaseException:
        ring = [ValueError(f"{text}{i}") for i in range(length)]
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            one.__cause__ = other
            one.__context__ = other
        return ring[0]

    return Error(make, "ValueError", text)


def _noted(notes: str, text: str) -> Error:
    def make() -> BaseException:
        made = ValueError(text)
        made.__notes__ = NOTES[notes]
        return made

    return Error(make, "ValueError", text)


def _group(errors: list[Error], text: str) -> Error:
    def make() -> BaseException:
        return BaseExceptionGroup(text, [error.make() for error in errors])

    return Error(make, "ExceptionGroup", text)


def _nested(depth: int) -> Error:
    def make() -> BaseException:
        made: BaseException = ValueError("innermost")
        for _ in range(depth):
            made = ExceptionGroup("around", [made])  # type: ignore[type-var]
        return made

    return Error(make, "ExceptionGroup")


def _recursion() -> BaseException:
    def descend() -> None:
        descend()

    try:
        descend()
    except RecursionError as error:
        return error
    raise AssertionError


def _syntax(text: str, place: tuple[Any, ...]) -> Error:
    return Error(lambda: SyntaxError(text, place), "SyntaxError")


ODD_CHARACTERS = ["\0", "\ud800", "\udfff", "\u202e", "\r", "'", '"', "%", ":x", "{jobs}", "\\"]

texts = st.lists(
    st.sampled_from([*ODD_CHARACTERS, "\U0001f600", "\u00e9", "a"]) | st.characters(), max_size=12
).map("".join)
"""Any text, often with what a database refuses, a driver interprets, or a terminal obeys."""

_kinds: list[type[BaseException]] = [
    ValueError,
    OSError,
    MemoryError,
    AssertionError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    PermanentJobError,
]
NOTES: dict[str, Any] = {
    "texts": ["a\0b", "\ud800"],
    "no texts": [1, None, Odd(), Mute()],
    "no list": 7,
    "odd": Odd(),
    "dict": {"a": 1},
}
_places = st.sampled_from(
    [("f\0", 1, 2, "t\ud800"), ("f", "x", None, 7), (None, None, None, None), ("f", 1, -5, "\0")]
)

errors: st.SearchStrategy[Error] = st.recursive(
    st.builds(_plain, st.sampled_from(_kinds), texts)
    | st.builds(_again, texts)
    | st.builds(_noted, st.sampled_from(sorted(NOTES)), texts)
    | st.builds(_cyclic, st.integers(1, 4), texts)
    | st.builds(_syntax, texts, _places)
    | st.builds(_nested, st.sampled_from([1, 50, 900]))
    | st.sampled_from(
        [
            Error(Mute, "Mute"),
            Error(Evil, "Evil"),
            Error(lambda: ValueError(Odd()), "ValueError"),
            Error(lambda: KeyError("\0\ud800"), "KeyError"),
            Error(StopIteration, "StopIteration"),
            Error(_recursion, "RecursionError"),
            Error(Untouchable, "Untouchable"),
            Error(Impostor, "Impostor"),
            Error(Anonymous, ""),
        ]
    ),
    lambda inner: (
        st.builds(_caused, inner, texts)
        | st.builds(_group, st.lists(inner, min_size=1, max_size=3), texts)
    ),
    max_leaves=4,
)
HUGE = Error(lambda: ValueError("\0" * 50_000_000), "ValueError", "\ufffd" * 1000)
