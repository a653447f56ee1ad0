"""Payloads: Python data to JSON text when a job is enqueued, and back when it runs.

What PostgreSQL refuses would abort the caller's transaction, so everything is checked before any
SQL, and an error names the place and the way out::

    >>> dump({"user": {"id": 7, "tags": ["new"]}})
    '{"user":{"id":7,"tags":["new"]}}'
    >>> dump({"user": {"id": uuid4()}})
    PayloadError: payload.user.id: uuid.UUID is not JSON; convert it, e.g. str(value)

Accepted are None, bool, int, finite float, str, list, tuple, dict with string keys, members of
StrEnum and IntEnum, and at any depth three kinds of objects: dataclasses (what the constructor
takes: fields with ``init=False`` are derived and left out), pydantic models
(``model_dump(mode="json", round_trip=True)``) and msgspec structs.

Within a dataclass, at any depth, so are datetime, date, time, UUID and Decimal, members of any Enum
with a JSON value, sets, and keys that are text in this way: the annotations of its fields bring
them back. A plain dict has none, so there you say yourself what becomes of them.

Back, an annotation says what to build::

    >>> load('{"user_id": 7}', into=Welcome)
    Welcome(user_id=7)
    >>> load('{"user_id": "7", "x": 1}', into=Welcome)
    PayloadError: payload does not fit Welcome: payload.user_id: expected int, found a string;
    payload.x: unknown field of Welcome

pydantic and msgspec build their own classes, by their own rules. Dataclasses are built here, as
are TypedDict, list, tuple, set, dict, unions (the first that fits, in the order written), Literal,
Enum, and datetime, date, time, UUID and Decimal from their text. Nothing is guessed: ``"7"`` is no
int, ``True`` is no int, missing and unknown fields are errors. Only an int becomes a float where
one is wanted, for PostgreSQL returns 1e22 without its exponent.

No error here contains a value of the payload, not even in its cause: errors end up in logs. Keys
are part of the path. For the same reason messages of custom validators are left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections import abc
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import UUID

from ._fit import JSON_TYPES, derives, fit, named
from .errors import InvalidArgumentError, PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._fit import Step

MAX_DEPTH: Final = 100
"""Levels of nesting in a payload. More is a mistake, and Python's json reads only about 1,000."""

MAX_CHARACTERS: Final = 16 * 1024 * 1024
"""Length of a payload as JSON. Far beyond use, and below where jsonb (256 MiB, with up to 12 bytes
for a character of JSON) refuses and so aborts the caller's transaction."""

_MAX_DIGITS: Final = 4300  # Python's own limit for reading an int, unless somebody raised it
_HUGE: Final = 10**_MAX_DIGITS
_MAX_KEY: Final = 40
_MAX_PATH: Final = 300
_MAX_PROBLEMS: Final = 5


# --- Python to JSON


def dump(value: object, name: str = "payload") -> str:
    """Return *value* as compact JSON text that PostgreSQL and SQLite can store.

    Raises :class:`PayloadError`, with a path that starts with *name*.
    """
    try:
        text = _encode(_plain(value, MAX_DEPTH, None))
    except _Refusal as refusal:
        message = f"{_path(name, reversed(refusal.steps))}: {refusal.reason}"
    except (RuntimeError, ValueError) as error:
        # The stack is nearly used up, the digit limit is lowered, or a thread changes a dict.
        message = f"{name}: cannot be written as JSON ({type(error).__name__})"
    else:
        if len(text) <= MAX_CHARACTERS:
            return text
        message = (
            f"{name}: {len(text)} characters of JSON, more than {MAX_CHARACTERS}; "
            "store the data elsewhere and pass a reference"
        )
    # Outside of the handlers, so that no exception that holds the payload becomes its context.
    raise PayloadError(message)


_encode = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode


class _Refusal(Exception):  # noqa: N818 - unwinds the walk, gathering the path
    """Why a value is refused; each level on the way up adds its step."""

    def __init__(self, reason: str, culprit: object = None) -> None:
        super().__init__()
        self.reason = reason
        self.culprit = culprit
        self.steps: list[Step] = []

    def passes(self, container: object, step: Step | None) -> None:
        """Add the *step* that led from *container* to the refused value."""
        if container is self.culprit:
            self.reason = "a circular reference, it contains itself"
            self.steps.clear()
        elif step is not None:
            self.steps.append(step)


def _refuse(reason: str, culprit: object = None) -> NoReturn:
    raise _Refusal(reason, culprit)


def _plain(value: Any, room: int, owner: type[Any] | None) -> Any:
    """Return *value* rebuilt of exact builtin types, *room* levels deep at most.

    What belongs to a dataclass, its *owner*, may be of any type that annotations build from JSON.
    """
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str:
        if fault := _fault(value):
            _refuse(f"the string contains {fault}")
    elif kind is int:
        if not -_HUGE < value < _HUGE:
            _refuse(f"an int of more than {_MAX_DIGITS} digits; convert it, e.g. hex(value)")
    elif kind is float:
        if not isfinite(value):
            _refuse("a float that is NaN or infinite, which JSON does not have; use None")
    elif kind is dict:
        return _object(value.items(), value, room, owner)
    elif kind is list or kind is tuple:
        return _array(value, value, room, owner)
    elif value is not None and kind is not bool:
        return _other(value, room, owner)
    return value


def _object(
    pairs: Iterable[tuple[Any, Any]], container: Any, room: int, owner: type[Any] | None
) -> dict[str, Any]:
    if room <= 0:
        _refuse(f"nested more than {MAX_DEPTH} levels deep", container)
    plain: dict[str, Any] = {}
    step = None
    converted = False
    try:
        for key, item in pairs:
            step = key if type(key) is str else None
            if step is None:
                step = _key(key, room, owner)
                converted = True
            if fault := _fault(step):
                _refuse(f"the key contains {fault}")
            plain[step] = _plain(item, room - 1, owner)
        if converted and len(plain) < dict[Any, Any].__len__(container):
            step = None
            _refuse("two of the keys are the same as text")
    except _Refusal as refusal:
        refusal.passes(container, step)
        raise
    return plain


def _array(
    items: Iterable[Any], container: object, room: int, owner: type[Any] | None
) -> list[Any]:
    if room <= 0:
        _refuse(f"nested more than {MAX_DEPTH} levels deep", container)
    plain: list[Any] = []
    try:
        for item in items:
            plain.append(_plain(item, room - 1, owner))  # noqa: PERF401 - its length is the step
    except _Refusal as refusal:
        refusal.passes(container, len(plain))
        raise
    return plain


def _key(key: Any, room: int, owner: type[Any] | None) -> str:
    kind: type[Any] = type(key)  # pyright: ignore[reportUnknownVariableType]
    if issubclass(kind, str) and not issubclass(kind, Enum):
        return str.__str__(key)
    if issubclass(kind, str if owner is None else _OWNED_KEYS):
        text = _other(key, room, owner)
        if type(text) is str:
            return text
    _refuse(f"a key is {_kind(kind)}, not str; convert the keys, e.g. str(key)")


def _other(value: object, room: int, owner: type[Any] | None) -> Any:
    """Return what is not exactly of a JSON type as one, or refuse it."""
    try:
        return _converted(value, type(value), room, owner)
    except _Refusal:
        raise
    except Exception as error:  # noqa: BLE001 - code of the payload's classes; its message may show values
        raised = type(error).__name__
    _refuse(f"{_kind(type(value))} cannot be turned into JSON (it raised {raised})")


def _converted(value: Any, kind: type[Any], room: int, owner: type[Any] | None) -> Any:
    # First of all: mapped classes may be dataclasses or pydantic models too.
    if hasattr(kind, "__mapper__") or hasattr(kind, "_sa_class_manager"):
        _refuse(f"{_kind(kind)} is an ORM instance; pass the id, not the object")
    if derives(kind, "pydantic.main", "BaseModel"):
        # No warnings: theirs show values.
        return _plain(value.model_dump(mode="json", round_trip=True, warnings=False), room, None)
    if derives(kind, "msgspec", "Struct"):
        return _plain(sys.modules["msgspec"].to_builtins(value, str_keys=True), room, None)
    if is_dataclass(kind):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(kind) if field.init)
        return _object(pairs, value, room, kind)
    if issubclass(kind, Enum):
        return _member(value, kind, room, owner)
    return _of_subclass(value, kind, room, owner)


def _member(member: Any, kind: type[Any], room: int, owner: type[Any] | None) -> Any:
    value = member.value
    if issubclass(kind, str | int | float):
        return _plain(value, room, None)
    if owner is not None and type(value) in JSON_TYPES:
        plain = _plain(value, room, None)
        if plain == value:  # or no member would be found by it
            return plain
    _refuse(f"{_kind(kind)} is a plain Enum; pass its .value, or make it a StrEnum")


def _of_subclass(value: Any, kind: type[Any], room: int, owner: type[Any] | None) -> Any:
    # By the base's own methods: json does not use what a subclass overrides either.
    for base, exact in _SCALARS:
        if issubclass(kind, base):
            return _plain(exact(value), room, None)
    if issubclass(kind, dict):
        return _object(dict[Any, Any].items(value), value, room, owner)
    if issubclass(kind, list):
        return _array(list[Any].__iter__(value), value, room, owner)
    if issubclass(kind, tuple):
        return _array(tuple[Any, ...].__iter__(value), value, room, owner)
    if owner is not None:
        for base, text in _TEXTS:
            # pandas' NaT is a datetime that looks like one of the year 1, but for this:
            if issubclass(kind, base) and (kind is base or value == value):  # noqa: PLR0124
                return text(value)
        if issubclass(kind, set | frozenset):
            items = (set if issubclass(kind, set) else frozenset)[Any].__iter__(value)
            # In the same order in every process.
            return sorted(_array(items, value, room, owner), key=_encode)
    hint = next((hint for kinds, hint in _HINTS if issubclass(kind, kinds)), None)
    if hint is None:
        hint = "pass what it returns" if callable(value) else "pass plain data, e.g. a dict"
    _refuse(f"{_kind(kind)} is not JSON; {hint}")


_SCALARS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)

_TEXTS: Final[tuple[tuple[type, Callable[[Any], str]], ...]] = (
    (datetime, datetime.isoformat),  # before date, which it derives from
    (date, date.isoformat),
    (time, time.isoformat),
    (UUID, UUID.__str__),
    (Decimal, Decimal.__str__),
)

_OWNED_KEYS: Final = (str, Enum, *(base for base, _ in _TEXTS))

_HINTS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    ((UUID, date, time, Decimal), "convert it, e.g. str(value)"),
    (timedelta, "convert it, e.g. value.total_seconds()"),
    ((bytes, bytearray, memoryview), "convert it, e.g. value.hex() or base64"),
    (abc.Set, "convert it, e.g. sorted(value)"),
    (abc.Mapping, "convert it, e.g. dict(value)"),
    (abc.Awaitable, "await it and pass the result"),
    (type, "it is a class; pass an instance"),
    ((abc.Iterator, abc.Sequence), "convert it, e.g. list(value)"),
)


def _kind(kind: type[Any]) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# --- JSON to Python


def load(text: str, into: Any = None, name: str = "payload") -> Any:
    """Return the value of the JSON *text*, built into the annotation *into* unless that is None.

    Raises :class:`PayloadError` when the text is not JSON or does not fit, naming up to five
    places by paths that start with *name*, and :class:`InvalidArgumentError` for an annotation
    that cannot be built from JSON.
    """
    value = _parsed(text, name)
    if into is None:
        return value
    built, problems = fit(value, into)
    if not problems:
        return built
    listed = [
        f"{_path(name, at.steps() if at else ())}: {what}" for at, what in problems[:_MAX_PROBLEMS]
    ]
    if more := len(problems) - len(listed):
        listed.append(f"and {more} more")
    message = f"{name} does not fit {named(into)}: {'; '.join(listed)}"
    raise PayloadError(message)


def _no_constant(constant: str) -> Any:
    raise ValueError(constant)


_DECODER: Any = json.JSONDecoder(parse_constant=_no_constant)  # Any: typeshed has no scan_once


def _decode(text: str) -> Any:
    """``json.loads`` in half the time, for text without space around it, as databases give it."""
    try:
        value, end = _DECODER.scan_once(text, 0)
    except StopIteration:
        value, end = None, -1
    return value if end == len(text) else _DECODER.decode(text)


def _parsed(text: str, name: str) -> Any:
    # A row edited by hand holds anything, on SQLite even numbers and bytes.
    if not isinstance(text, str):
        where = f"it is {_kind(type(text))}"
    else:
        try:
            return _decode(text)
        except json.JSONDecodeError as error:
            where = f"at character {error.pos}"
        except (ValueError, RecursionError):
            where = "NaN, an infinity, a number of too many digits or too deep"
    message = f"{name} is not JSON: {where}"
    raise PayloadError(message)


# --- Text


_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")


def _fault(text: str) -> str | None:
    """Return what keeps a database from storing *text*, or None."""
    if "\0" in text:
        return "a NUL character, which cannot be stored"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "a lone surrogate, which cannot be stored"
    return None


def check_text(value: object, name: str, maximum: int) -> str:
    """Return *value* if it is a str of 1 to *maximum* characters that a database can store.

    Raises :class:`InvalidArgumentError`, naming *name*, for anything else.
    """
    wanted = f"{name} must be a str of 1 to {maximum} characters"
    if not isinstance(value, str):
        message = f"{wanted}, got {_kind(type(value))}"
        raise InvalidArgumentError(message)
    text = str.__str__(value)
    if not 1 <= len(text) <= maximum:
        message = f"{wanted}, got {len(text)}"
        raise InvalidArgumentError(message)
    if fault := _fault(text):
        message = f"{name} contains {fault}"
        raise InvalidArgumentError(message)
    return text


def storable(text: str, limit: int) -> str:
    """Return *text* as a database can store it, in at most *limit* characters.

    NUL and lone surrogates become U+FFFD. What is too long loses its middle: a traceback says
    where it began in its first lines and what happened in its last.
    """
    if len(text) > limit:
        marker = "… [{} characters left out] …"
        kept = limit - len(marker.format(len(text)))
        if kept <= 0:
            text = text[:limit]
        else:
            head = kept // 4
            marker = marker.format(len(text) - kept)
            text = text[:head] + marker + text[len(text) - (kept - head) :]
    return _UNSTORABLE.sub("\ufffd", text)


def _path(name: str, steps: Iterable[Step]) -> str:
    return storable(name + "".join(map(_shown, steps)), _MAX_PATH)


def _shown(step: Step) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    key = step if len(step) <= _MAX_KEY else step[: _MAX_KEY - 1] + "…"
    if key.isidentifier():
        return f".{key}"
    shown = (char if char.isprintable() and char not in '"\\' else repr(char)[1:-1] for char in key)
    return '["{}"]'.format("".join(shown).replace('"', '\\"'))
