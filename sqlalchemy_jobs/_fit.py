"""JSON values built into annotations: the half of :mod:`.payload` that runs with the job.

Its docstring says what fits what. No message here contains a value of the payload.
"""

from __future__ import annotations

import json
import re
import sys
from collections import abc
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Step: TypeAlias = str | int
"""From a container to what it holds: a key or an index."""

_MAX_NAME: Final = 80


class At:
    """A place in the payload; the path is only written when there is something to say."""

    __slots__ = ("above", "step")

    def __init__(self, above: At | None, step: Step) -> None:
        self.above = above
        self.step = step

    def steps(self) -> list[Step]:
        """Return the way here, from the outside."""
        steps: list[Step] = []
        at: At | None = self
        while at is not None:
            steps.append(at.step)
            at = at.above
        return steps[::-1]


Problem: TypeAlias = tuple[At | None, str]
"""Where, None for the value as a whole, and what does not fit there."""

_Build: TypeAlias = "Callable[[Any, Any, At | None, list[Problem]], Any]"


def fit(value: Any, into: Any) -> tuple[Any, list[Problem]]:
    """Return the JSON *value* built into the annotation *into*, and what does not fit.

    With problems, what was built is of no use. Raises :class:`InvalidArgumentError` for an
    annotation that cannot be built from JSON.
    """
    built: Any = None
    problems: list[Problem] = []
    try:
        built = _fit(value, into, None, problems)
    except RecursionError:
        problems.append((None, "nested too deep"))
    return built, problems


def _fit(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
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
    elif derives(kind, "pydantic.main", "BaseModel"):
        return None, _fit_pydantic
    elif derives(kind, "msgspec", "Struct"):
        return None, _fit_msgspec
    elif kind is hint:
        if is_dataclass(hint) or hasattr(hint, "__required_keys__"):
            return dict, _fit_fields
        if issubclass(kind, Enum):
            return None, _fit_enum
    message = f"a payload cannot be built into {named(hint)}; annotate it with a dataclass, say"
    raise InvalidArgumentError(message)


def _misfit(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> None:
    problems.append((at, f"expected {named(hint)}, found {JSON_TYPES[type(value)]}"))


def _refused(hint: Any, error: Exception, at: At | None, problems: list[Problem]) -> None:
    problems.append((at, f"{named(hint)} refused it ({type(error).__name__})"))


def named(hint: Any) -> str:
    """Return what messages call the annotation *hint*."""
    if hint is None or hint is NoneType:
        return "null"
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(map(named, get_args(hint)))
    if get_origin(hint) in _QUALIFIERS:
        return named(get_args(hint)[0])
    if get_origin(hint) is None and isinstance(hint, type):
        return hint.__name__
    name = str(hint).replace("typing.", "")
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def derives(kind: type[Any], module: str, name: str) -> bool:
    """Tell whether *kind* derives from a class that nobody needs to have imported."""
    return getattr(sys.modules.get(module), name, None) in kind.__mro__


def _alias(hint: Any) -> Any:
    """Return what a NewType or a ``type`` statement stands for, or None."""
    return getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)


def _fit_alias(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    return _fit(value, _alias(hint), at, problems)


def _fit_qualified(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    return _fit(value, get_args(hint)[0], at, problems)


def _fit_literal(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    for choice in get_args(hint):
        plain = choice.value if isinstance(choice, Enum) else choice
        if type(plain) is type(value) and plain == value:
            return choice
    return _misfit(value, hint, at, problems)


def _fit_enum(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    with suppress(Exception):  # a _missing_ is the user's
        member = hint(value)
        if type(member.value) is type(value):  # True == 1 == 1.0
            return member
    return _misfit(value, hint, at, problems)


def _fit_exact(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    if value is None and hint is None:
        return None
    return _misfit(value, hint, at, problems)  # what fits did not come this far


def _fit_float(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    if type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    return _misfit(value, hint, at, problems)


def _fit_text(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    try:
        return _FROM_TEXT[hint](value)
    except (ValueError, ArithmeticError):
        problems.append((at, f"expected {named(hint)} as text, found other text"))


def _fit_union(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    if value is None and len(choices) < len(get_args(hint)):
        return None
    if len(choices) == 1:
        return _fit(value, choices[0], at, problems)
    for choice in choices:
        misfits: list[Problem] = []
        built = _fit(value, choice, at, misfits)
        if not misfits:
            return built
    return _misfit(value, hint, at, problems)


def _fit_list(value: list[Any], hint: Any, at: At | None, problems: list[Problem]) -> Any:
    (wanted,) = get_args(hint) or (Any,)
    return [_fit(item, wanted, At(at, i), problems) for i, item in enumerate(value)]


def _fit_set(value: list[Any], hint: Any, at: At | None, problems: list[Problem]) -> Any:
    items = _fit_list(value, hint, at, problems)
    try:
        return (frozenset if frozenset in {hint, get_origin(hint)} else set)(items)
    except TypeError:
        problems.append((at, f"expected {named(hint)}, found items that no set can hold"))


def _fit_tuple(value: list[Any], hint: Any, at: At | None, problems: list[Problem]) -> Any:
    wanted = (Any, ...) if hint is tuple else get_args(hint)
    if wanted[1:] == (...,):
        wanted = wanted[:1] * len(value)
    if len(value) == len(wanted):
        return tuple(_fit(value[i], kind, At(at, i), problems) for i, kind in enumerate(wanted))
    problems.append((at, f"expected {named(hint)}, found an array of {len(value)}"))
    return None


def _fit_dict(value: dict[str, Any], hint: Any, at: At | None, problems: list[Problem]) -> Any:
    wanted_key, wanted = get_args(hint) or (Any, Any)
    built: dict[Any, Any] = {}
    for key, item in value.items():
        place = At(at, key)
        built[_fit(key, wanted_key, place, problems)] = _fit(item, wanted, place, problems)
    return built


def _fit_fields(value: dict[str, Any], hint: Any, at: At | None, problems: list[Problem]) -> Any:
    """Build a dataclass or a TypedDict."""
    before = len(problems)
    members = _members(hint)
    built: dict[str, Any] = {}
    for key, item in value.items():
        if key in members:
            built[key] = _fit(item, members[key][0], At(at, key), problems)
        else:
            problems.append((At(at, key), f"unknown field of {named(hint)}"))
    for key, (wanted, required) in members.items():
        if required and key not in value:
            problems.append((At(at, key), f"missing, expected {named(wanted)}"))
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
        message = f"the annotations of {named(kind)} cannot be resolved: {error}"
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


def _fit_pydantic(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    # As JSON, not as Python objects: strict models and many custom types know the difference.
    validate = hint.model_validate_json
    # dump() writes the names of fields, people write aliases. Before 2.11 only aliases are known.
    both = "by_name" in (getattr(validate, "__kwdefaults__", None) or {})
    try:
        return validate(json.dumps(value), **({"by_alias": True, "by_name": True} if both else {}))
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
            place = At(place, step)
        told, kind = detail["msg"], detail["type"]
        if not _PYDANTIC_TOLD.fullmatch(kind):
            told = f"does not fit ({kind})"
        problems.append((place, told.partition(", ")[0] if kind.endswith("_parsing") else told))
    return None


def _fit_msgspec(value: Any, hint: Any, at: At | None, problems: list[Problem]) -> Any:
    try:
        return sys.modules["msgspec"].convert(value, hint, str_keys=True)
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - a __post_init__ is the user's, and its message too
        raised = error
    message, _, where = str(raised).partition(" - at ")
    for step in re.findall(r"\.\.\.|[^.`$\[\]]+", where.removeprefix("`key` in ")):
        at = At(at, int(step) if step.isdecimal() else step)
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

JSON_TYPES: Final[dict[type, str]] = {
    NoneType: "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
"""The types of parsed JSON, and what messages call their values."""

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
