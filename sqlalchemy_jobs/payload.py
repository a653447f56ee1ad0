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
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from math import isfinite
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

from .errors import InvalidArgumentError, PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

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

_Step: TypeAlias = str | int


# --- Python to JSON


def dump(value: object, name: str = "payload") -> str:
    """Return *value* as compact JSON text that PostgreSQL and SQLite can store.

    Raises :class:`PayloadError`, with a path that starts with *name*.
    """
    try:
        text = _encode(_plain(value, MAX_DEPTH))
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
        self.steps: list[_Step] = []

    def passes(self, container: object, step: _Step | None) -> None:
        """Add the *step* that led from *container* to the refused value."""
        if container is self.culprit:
            self.reason = "a circular reference, it contains itself"
            self.steps.clear()
        elif step is not None:
            self.steps.append(step)


def _refuse(reason: str, culprit: object = None) -> NoReturn:
    raise _Refusal(reason, culprit)


def _plain(value: Any, room: int) -> Any:
    """Return *value* rebuilt of exact builtin types, *room* levels deep at most."""
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
        return _object(value.items(), value, room)
    elif kind is list or kind is tuple:
        return _array(value, value, room)
    elif value is not None and kind is not bool:
        return _other(value, room)
    return value


def _object(pairs: Iterable[tuple[Any, Any]], container: object, room: int) -> dict[str, Any]:
    if room <= 0:
        _refuse(f"nested more than {MAX_DEPTH} levels deep", container)
    plain: dict[str, Any] = {}
    step = None
    try:
        for key, item in pairs:
            step = key if type(key) is str else None
            if step is None:
                step = _key(key)
            if fault := _fault(step):
                _refuse(f"the key contains {fault}")
            plain[step] = _plain(item, room - 1)
    except _Refusal as refusal:
        refusal.passes(container, step)
        raise
    return plain


def _array(items: Iterable[Any], container: object, room: int) -> list[Any]:
    if room <= 0:
        _refuse(f"nested more than {MAX_DEPTH} levels deep", container)
    plain: list[Any] = []
    try:
        for item in items:
            plain.append(_plain(item, room - 1))  # noqa: PERF401 - its length is the step
    except _Refusal as refusal:
        refusal.passes(container, len(plain))
        raise
    return plain


def _key(key: object) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    _refuse(f"a key is {_kind(type(key))}, not str; convert the keys, e.g. str(key)")


def _other(value: object, room: int) -> Any:
    """Return what is not exactly of a JSON type as one, or refuse it."""
    try:
        return _converted(value, type(value), room)
    except _Refusal:
        raise
    except Exception as error:  # noqa: BLE001 - code of the payload's classes; its message may show values
        raised = type(error).__name__
    _refuse(f"{_kind(type(value))} cannot be turned into JSON (it raised {raised})")


def _converted(value: Any, kind: type[Any], room: int) -> Any:
    # First of all: mapped classes may be dataclasses or pydantic models too.
    if hasattr(kind, "__mapper__") or hasattr(kind, "_sa_class_manager"):
        _refuse(f"{_kind(kind)} is an ORM instance; pass the id, not the object")
    if _derives(kind, "pydantic.main", "BaseModel"):
        # No warnings: theirs show values.
        return _plain(value.model_dump(mode="json", round_trip=True, warnings=False), room)
    if _derives(kind, "msgspec", "Struct"):
        return _plain(sys.modules["msgspec"].to_builtins(value, str_keys=True), room)
    if is_dataclass(kind):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(kind) if field.init)
        return _object(pairs, value, room)
    if issubclass(kind, Enum):
        if not issubclass(kind, str | int | float):
            _refuse(f"{_kind(kind)} is a plain Enum; pass its .value, or make it a StrEnum")
        return _plain(value.value, room)
    return _of_subclass(value, kind, room)


def _of_subclass(value: Any, kind: type[Any], room: int) -> Any:
    # By the base's own methods: json does not use what a subclass overrides either.
    for base, exact in _SCALARS:
        if issubclass(kind, base):
            return _plain(exact(value), room)
    if issubclass(kind, dict):
        return _object(dict[Any, Any].items(value), value, room)
    if issubclass(kind, list):
        return _array(list[Any].__iter__(value), value, room)
    if issubclass(kind, tuple):
        return _array(tuple[Any, ...].__iter__(value), value, room)
    hint = next((hint for kinds, hint in _HINTS if issubclass(kind, kinds)), None)
    if hint is None:
        hint = "pass what it returns" if callable(value) else "pass plain data, e.g. a dict"
    _refuse(f"{_kind(kind)} is not JSON; {hint}")


_SCALARS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)

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


def _derives(kind: type[Any], module: str, name: str) -> bool:
    """Tell whether *kind* derives from a class that nobody needs to have imported."""
    return getattr(sys.modules.get(module), name, None) in kind.__mro__


def _kind(kind: type[Any]) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


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


def _path(name: str, steps: Iterable[_Step]) -> str:
    return storable(name + "".join(map(_shown, steps)), _MAX_PATH)


def _shown(step: _Step) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    key = step if len(step) <= _MAX_KEY else step[: _MAX_KEY - 1] + "…"
    if key.isidentifier():
        return f".{key}"
    shown = (char if char.isprintable() and char not in '"\\' else repr(char)[1:-1] for char in key)
    return '["{}"]'.format("".join(shown).replace('"', '\\"'))


# --- JSON to Python


class _At:
    """A place in the payload; the path is only written when there is something to say."""

    __slots__ = ("above", "step")

    def __init__(self, above: _At | None, step: _Step) -> None:
        self.above = above
        self.step = step

    def steps(self) -> list[_Step]:
        steps: list[_Step] = []
        at: _At | None = self
        while at is not None:
            steps.append(at.step)
            at = at.above
        return steps[::-1]


_Problem: TypeAlias = tuple[_At | None, str]
_Build: TypeAlias = "Callable[[Any, Any, _At | None, list[_Problem]], Any]"


def load(text: str, into: Any = None, name: str = "payload") -> Any:
    """Return the value of the JSON *text*, built into the annotation *into* unless that is None.

    Raises :class:`PayloadError` when the text is not JSON or does not fit, naming up to five
    places by paths that start with *name*, and :class:`InvalidArgumentError` for an annotation
    that cannot be built from JSON.
    """
    value = _parsed(text, name)
    if into is None:
        return value
    built: Any = None
    problems: list[_Problem] = []
    try:
        built = _fit(value, into, None, problems)
    except RecursionError:
        problems.append((None, "nested too deep"))
    if not problems:
        return built
    listed = [
        f"{_path(name, at.steps() if at else ())}: {what}" for at, what in problems[:_MAX_PROBLEMS]
    ]
    if more := len(problems) - len(listed):
        listed.append(f"and {more} more")
    message = f"{name} does not fit {_named(into)}: {'; '.join(listed)}"
    raise PayloadError(message)


def _no_constant(constant: str) -> Any:
    raise ValueError(constant)


_decode = json.JSONDecoder(parse_constant=_no_constant).decode


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


def _fit(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    """Return *value* built into *hint*; what does not fit is added to *problems* instead."""
    if hint is Any or hint is object or (type(value) is hint and hint in _EXACT):
        return value
    shape, build = _FORMS.get(get_origin(hint) or hint) or _form(hint)
    if shape is None or type(value) is shape:
        return build(value, hint, at, problems)
    return _misfit(value, hint, at, problems)


def _form(hint: Any) -> tuple[type | None, _Build]:
    """Return the JSON type that a class is built from, if only one will do, and its builder."""
    kind: Any = get_origin(hint) or hint
    if not isinstance(kind, type):
        if _alias(hint) is not None:
            return None, _fit_alias
    elif _derives(kind, "pydantic.main", "BaseModel"):
        return None, _fit_pydantic
    elif _derives(kind, "msgspec", "Struct"):
        return None, _fit_msgspec
    elif kind is hint:
        if is_dataclass(hint) or hasattr(hint, "__required_keys__"):
            return dict, _fit_fields
        if issubclass(kind, Enum):
            return None, _fit_enum
    message = f"a payload cannot be built into {_named(hint)}; annotate it with a dataclass, say"
    raise InvalidArgumentError(message)


def _misfit(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> None:
    problems.append((at, f"expected {_named(hint)}, found {_FOUND[type(value)]}"))


def _refused(hint: Any, error: Exception, at: _At | None, problems: list[_Problem]) -> None:
    problems.append((at, f"{_named(hint)} refused it ({type(error).__name__})"))


def _named(hint: Any) -> str:
    if hint is None or hint is NoneType:
        return "null"
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(map(_named, get_args(hint)))
    if get_origin(hint) in _QUALIFIERS:
        return _named(get_args(hint)[0])
    if get_origin(hint) is None and isinstance(hint, type):
        return hint.__name__
    return storable(str(hint).replace("typing.", ""), 80)


def _alias(hint: Any) -> Any:
    """Return what a NewType or a ``type`` statement stands for, or None."""
    return getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)


def _fit_alias(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    return _fit(value, _alias(hint), at, problems)


def _fit_qualified(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    return _fit(value, get_args(hint)[0], at, problems)


def _fit_literal(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    for choice in get_args(hint):
        plain = choice.value if isinstance(choice, Enum) else choice
        if type(plain) is type(value) and plain == value:
            return choice
    return _misfit(value, hint, at, problems)


def _fit_enum(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    with suppress(Exception):  # a _missing_ is the user's
        member = hint(value)
        if type(member.value) is type(value):  # True == 1 == 1.0
            return member
    return _misfit(value, hint, at, problems)


def _fit_exact(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    if value is None and hint is None:
        return None
    return _misfit(value, hint, at, problems)  # what fits did not come this far


def _fit_float(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    if type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    return _misfit(value, hint, at, problems)


def _fit_text(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    try:
        return _FROM_TEXT[hint](value)
    except (ValueError, ArithmeticError):
        problems.append((at, f"expected {_named(hint)} as text, found other text"))


def _fit_union(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    if value is None and len(choices) < len(get_args(hint)):
        return None
    if len(choices) == 1:
        return _fit(value, choices[0], at, problems)
    for choice in choices:
        misfits: list[_Problem] = []
        built = _fit(value, choice, at, misfits)
        if not misfits:
            return built
    return _misfit(value, hint, at, problems)


def _fit_list(value: list[Any], hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    (wanted,) = get_args(hint) or (Any,)
    return [_fit(item, wanted, _At(at, i), problems) for i, item in enumerate(value)]


def _fit_set(value: list[Any], hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    items = _fit_list(value, hint, at, problems)
    try:
        return (frozenset if frozenset in {hint, get_origin(hint)} else set)(items)
    except TypeError:
        problems.append((at, f"expected {_named(hint)}, found items that no set can hold"))


def _fit_tuple(value: list[Any], hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    wanted = (Any, ...) if hint is tuple else get_args(hint)
    if wanted[1:] == (...,):
        wanted = wanted[:1] * len(value)
    if len(value) == len(wanted):
        return tuple(_fit(value[i], kind, _At(at, i), problems) for i, kind in enumerate(wanted))
    problems.append((at, f"expected {_named(hint)}, found an array of {len(value)}"))
    return None


def _fit_dict(value: dict[str, Any], hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    wanted_key, wanted = get_args(hint) or (Any, Any)
    built: dict[Any, Any] = {}
    for key, item in value.items():
        place = _At(at, key)
        built[_fit(key, wanted_key, place, problems)] = _fit(item, wanted, place, problems)
    return built


def _fit_fields(value: dict[str, Any], hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    """Build a dataclass or a TypedDict."""
    before = len(problems)
    members = _members(hint)
    built: dict[str, Any] = {}
    for key, item in value.items():
        if key in members:
            built[key] = _fit(item, members[key][0], _At(at, key), problems)
        else:
            problems.append((_At(at, key), f"unknown field of {_named(hint)}"))
    for key, (wanted, required) in members.items():
        if required and key not in value:
            problems.append((_At(at, key), f"missing, expected {_named(wanted)}"))
    if len(problems) > before:
        return None
    try:
        return hint(**built)
    except Exception as error:  # noqa: BLE001 - a __post_init__ is the user's, and its message too
        return _refused(hint, error, at, problems)


@lru_cache(maxsize=512)
def _members(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each field, and whether the field is required."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception as error:
        message = f"the annotations of {_named(kind)} cannot be resolved: {error}"
        raise InvalidArgumentError(message) from error
    required: Collection[str] = getattr(kind, "__required_keys__", ())
    if is_dataclass(kind):
        return {
            field.name: (hints[field.name], field.default is field.default_factory is MISSING)
            for field in fields(kind)
            if field.init
        }
    # With postponed annotations, the class itself has not seen its qualifiers.
    marks = {Required: True, NotRequired: False}
    return {
        key: (hint, marks.get(get_origin(hint), key in required)) for key, hint in hints.items()
    }


def _fit_pydantic(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    # As JSON, not as Python objects: strict models and many custom types know the difference.
    validate = hint.model_validate_json
    # dump() writes the names of fields, people write aliases. Before 2.11 only aliases are known.
    both = "by_name" in (getattr(validate, "__kwdefaults__", None) or {})
    try:
        return validate(_encode(value), **({"by_alias": True, "by_name": True} if both else {}))
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - validators are the user's, and their messages too
        raised: Any = error
    try:
        details = raised.errors(include_url=False, include_context=False, include_input=False)
    except Exception:  # noqa: BLE001 - no ValidationError, or one that cannot be told
        return _refused(hint, raised, at, problems)
    for detail in details:
        place = at
        for step in detail["loc"]:
            place = _At(place, step)
        told, kind = detail["msg"], detail["type"]
        if not _PYDANTIC_TOLD.fullmatch(kind):
            told = f"does not fit ({kind})"
        problems.append((place, told.partition(", ")[0] if kind.endswith("_parsing") else told))
    return None


def _fit_msgspec(value: Any, hint: Any, at: _At | None, problems: list[_Problem]) -> Any:
    try:
        return sys.modules["msgspec"].convert(value, hint, str_keys=True)
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - a __post_init__ is the user's, and its message too
        raised = error
    message, _, where = str(raised).partition(" - at ")
    for step in re.findall(r"\.\.\.|[^.`$\[\]]+", where.removeprefix("`key` in ")):
        at = _At(at, int(step) if step.isdecimal() else step)
    told = None if raised.__cause__ else _MSGSPEC_TOLD.match(message)
    if told is None:
        return _refused(hint, raised, at, problems)
    problems.append((at, told.group()))
    return None


# The messages of the two that speak of the annotation only.
_PYDANTIC_TOLD: Final = re.compile(
    "missing|extra_forbidden|enum|literal_error|(greater|less)_than(_equal)?|string_too_(short|long)"
    "|(bool|int|float|string|list|dict|set|tuple|model|date|time|datetime|uuid|decimal)_type"
    "|(bool|int|float|date|time|datetime|uuid|decimal)_parsing"
)
_MSGSPEC_TOLD: Final = re.compile(
    "Expected .*|Object missing required field .*|Object contains unknown field"
    "|Invalid (enum value|value|UUID|RFC3339 encoded [a-z]+|base64 encoded string)"
)

_QUALIFIERS: Final = (Annotated, Required, NotRequired)

_EXACT: Final = frozenset({str, int, float, bool, NoneType})

_FOUND: Final[dict[type, str]] = {
    NoneType: "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}

_FROM_TEXT: Final[dict[type, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}

_FORMS: Final[dict[Any, tuple[type | None, _Build]]] = {
    **dict.fromkeys((str, int, bool, None, NoneType), (None, _fit_exact)),
    float: (None, _fit_float),
    **dict.fromkeys(_FROM_TEXT, (str, _fit_text)),
    Literal: (None, _fit_literal),
    **dict.fromkeys(_QUALIFIERS, (None, _fit_qualified)),
    **dict.fromkeys((Union, UnionType), (None, _fit_union)),
    **dict.fromkeys((list, abc.Sequence, abc.Collection, abc.Iterable), (list, _fit_list)),
    **dict.fromkeys((set, frozenset, abc.Set), (list, _fit_set)),
    tuple: (list, _fit_tuple),
    **dict.fromkeys((dict, abc.Mapping), (dict, _fit_dict)),
}
"""By the annotation's origin: the JSON type it is built from, if only one will do, and how."""
