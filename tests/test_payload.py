"""Payloads: what is accepted, what is refused and where, and that no message shows a value."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    Self,
    TypedDict,
    TypeVar,
)
from unittest.mock import MagicMock, Mock
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError
from sqlalchemy import Column, Integer, MetaData, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, registry
from sqlmodel import Field, SQLModel

from sqlalchemy_jobs import payload
from sqlalchemy_jobs.errors import InvalidArgumentError, PayloadError
from sqlalchemy_jobs.payload import MAX_CHARACTERS, MAX_DEPTH, check_text, dump, load, storable

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "s3cr3t-hunter2"  # noqa: S105 - must be in no message
HUGE = 2**70


class Color(StrEnum):
    """The usual kind of choice."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    """A choice that is a number."""

    LOW = 1
    HIGH = 2


class Bits(IntFlag):
    """Choices that add up."""

    A = 1
    B = 2


class Plain(Enum):
    """A choice that is neither text nor number."""

    ONE = SECRET


class Coded(str, Enum):  # noqa: UP042 - a StrEnum takes its value from its text
    """A choice whose value is not its text."""

    _value_: str

    def __new__(cls, code: str, text: str) -> Self:
        """Make a member of two strings."""
        self = str.__new__(cls, text)
        self._value_ = code
        return self

    FIRST = "f", "the first"


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: int


@dataclass(frozen=True)
class User:
    """A payload within another."""

    id: int
    name: str | None = None
    color: Color = Color.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """A payload as people write them."""

    user: User
    ratio: float = 1.0
    tags: tuple[str, ...] = ()
    scores: dict[str, int] = field(default_factory=dict)
    kind: Literal["mail", "sms"] = "mail"
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Derive a field."""
        object.__setattr__(self, "length", len(self.tags))


class Shape(pydantic.BaseModel):
    """A pydantic model that round trips only when dumped and loaded with care."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    id: UUID
    at: datetime
    sides: frozenset[int] = frozenset()
    label: str = pydantic.Field(default="", alias="theLabel")
    raw: pydantic.Json[list[int]] = pydantic.Field(default_factory=list)

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        """What extra="forbid" would refuse."""
        return len(self.sides)


class Parcel(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A msgspec struct."""

    parcel_id: UUID
    sent_at: datetime | None = None
    weights: dict[int, float] = {}


class Base(DeclarativeBase):
    """The classes of an application."""


class Account(Base):
    """A mapped class."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


class Invoice(MappedAsDataclass, Base):
    """A mapped class that is a dataclass too."""

    __tablename__ = "invoice"
    id: Mapped[int] = mapped_column(primary_key=True)


class Hero(SQLModel, table=True):
    """A mapped class that is a pydantic model too."""

    id: int | None = Field(default=None, primary_key=True)


class Imperative:
    """A class that is mapped from outside."""


registry().map_imperatively(
    Imperative, Table("imperative", MetaData(), Column("id", Integer, primary_key=True))
)


class Hostile:
    """An object that raises its secret whenever it is touched."""

    def __getattr__(self, name: str) -> Any:
        """Give nothing."""
        raise ValueError(SECRET)

    def __repr__(self) -> str:
        """Tell everything."""
        return SECRET


class HostileMeta(type):
    """A class that raises its secret whenever it is touched."""

    def __getattr__(cls, name: str) -> Any:
        """Give nothing."""
        raise ValueError(SECRET)


class HostileClass(metaclass=HostileMeta):
    """See its metaclass."""


class HostileDict(dict[str, Any]):
    """A dict that lies."""

    def items(self) -> Any:
        """Raise."""
        raise ValueError(SECRET)

    __iter__ = items


class Loud(str):
    """A string that lies."""

    __slots__ = ()

    def __str__(self) -> str:
        """Tell something else."""
        return SECRET + "\0"


class Unset:
    """Stands for a value that is not there."""


def named(value: object) -> str:
    """Return the name of a parameter; pytest's own would touch the value."""
    return value[:30] if isinstance(value, str) else type(value).__name__


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the PayloadError, after a look that it shows no value."""
    with pytest.raises(PayloadError) as caught:
        function(*args, **kwargs)
    assert_tells_no_value(caught.value)
    return str(caught.value)


def assert_tells_no_value(error: BaseException | None) -> None:
    """Check the error, its cause and its context."""
    while error is not None:
        assert SECRET not in str(error)
        assert SECRET not in repr(error)
        assert SECRET not in repr(vars(error))
        assert error.__cause__ is None
        error = error.__context__


# --- dump: what is accepted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0, "0"),
        (HUGE, str(HUGE)),
        (-(10**4299), str(-(10**4299))),
        (1.5, "1.5"),
        (-0.0, "-0.0"),
        ("", '""'),
        ("ü😀\u2028\x7f\n", '"ü😀\u2028\x7f\\n"'),
        ([1, [2]], "[1,[2]]"),
        ((1, (2,)), "[1,[2]]"),
        ({"n": 1, "seq": 2}, '{"n":1,"seq":2}'),
        ({"": {}}, '{"":{}}'),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (defaultdict(list, a=[1]), '{"a":[1]}'),
        (Point(1, 2), "[1,2]"),
        (Color.RED, '"red"'),
        ({Color.RED: Level.HIGH}, '{"red":2}'),
        (Bits.A | Bits.B, "3"),
        (Coded.FIRST, '"f"'),
        (HostileDict(a=1), '{"a":1}'),
        ([Loud("x")], '["x"]'),
        ({Loud("x"): 1}, '{"x":1}'),
    ],
)
def test_json_values_are_written_compactly(value: object, text: str) -> None:
    """Everything that JSON has a form for is written in it, without spaces."""
    assert dump(value) == text


def test_subclasses_of_scalars_are_what_they_derive_from() -> None:
    """An int, float or str of a subclass is written as the base's value."""
    number = type("Number", (int,), {"__repr__": lambda _: SECRET, "__int__": lambda _: 5})(7)
    ratio = type("Ratio", (float,), {"__repr__": lambda _: SECRET})(0.5)
    assert dump([number, ratio]) == "[7,0.5]"


def test_a_dataclass_is_written_as_the_arguments_of_its_constructor() -> None:
    """Derived fields are left out, so that the text can be loaded again."""
    text = dump([Welcome(user=User(1, color=Color.BLUE), tags=("a",))])
    assert json.loads(text) == [
        {
            "user": {"id": 1, "name": None, "color": "blue"},
            "ratio": 1.0,
            "tags": ["a"],
            "scores": {},
            "kind": "mail",
        }
    ]


def test_a_pydantic_model_comes_back_as_it_was() -> None:
    """Strict mode, aliases, Json fields, computed fields and forbidden extras survive."""
    values = {"id": uuid4(), "at": datetime.now(UTC), "theLabel": "x", "raw": "[1]"}
    shape = Shape.model_validate({**values, "sides": frozenset({3})})
    assert load(dump({"shapes": [shape]}), into=dict[str, list[Shape]]) == {"shapes": [shape]}


def test_a_pydantic_model_may_be_written_by_its_aliases() -> None:
    """A payload written by hand uses the names that the model shows to the outside."""
    text = json.dumps({"id": str(UUID(int=1)), "at": "2030-01-01T00:00:00Z", "theLabel": "x"})
    assert load(text, into=Shape).label == "x"


def test_a_model_that_breaks_its_own_types_warns_nobody() -> None:
    """Pydantic's warning about it would show the value."""
    shape = Shape.model_construct(id=SECRET, at=1, label=["x"])
    assert SECRET in dump(shape)


def test_a_msgspec_struct_comes_back_as_it_was() -> None:
    """Renamed fields and keys that are numbers survive."""
    parcel = Parcel(uuid4(), datetime.now(UTC), {1: 2.5})
    assert json.loads(dump(parcel))["parcelId"] == str(parcel.parcel_id)
    assert load(dump([parcel]), into=list[Parcel]) == [parcel]


# --- dump: what is refused, and where


async def coroutine() -> None:
    """Do nothing."""


async def agenerator() -> Any:
    """Yield nothing."""
    yield


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (uuid4(), "uuid.UUID is not JSON; convert it, e.g. str(value)"),
        (datetime.now(UTC), "datetime.datetime is not JSON; convert it, e.g. str(value)"),
        (date(2030, 1, 1), "datetime.date is not JSON; convert it, e.g. str(value)"),
        (time(1), "datetime.time is not JSON; convert it, e.g. str(value)"),
        (timedelta(1), "datetime.timedelta is not JSON; convert it, e.g. value.total_seconds()"),
        (Decimal(1), "decimal.Decimal is not JSON; convert it, e.g. str(value)"),
        (SECRET.encode(), "bytes is not JSON; convert it, e.g. value.hex() or base64"),
        (bytearray(1), "bytearray is not JSON; convert it, e.g. value.hex() or base64"),
        ({SECRET}, "set is not JSON; convert it, e.g. sorted(value)"),
        (frozenset({1}), "frozenset is not JSON; convert it, e.g. sorted(value)"),
        ({"a": 1}.keys(), "dict_keys is not JSON; convert it, e.g. sorted(value)"),
        (MappingProxyType({}), "mappingproxy is not JSON; convert it, e.g. dict(value)"),
        (UserDict(), "collections.UserDict is not JSON; convert it, e.g. dict(value)"),
        (deque([1]), "collections.deque is not JSON; convert it, e.g. list(value)"),
        (range(3), "range is not JSON; convert it, e.g. list(value)"),
        ((x for x in "a"), "generator is not JSON; convert it, e.g. list(value)"),
        (len, "builtin_function_or_method is not JSON; pass what it returns"),
        (coroutine, "function is not JSON; pass what it returns"),
        (User, "type is not JSON; it is a class; pass an instance"),
        (Account, "is not JSON; it is a class; pass an instance"),
        (Fraction(1, 3), "fractions.Fraction is not JSON; pass plain data, e.g. a dict"),
        (1j, "complex is not JSON; pass plain data, e.g. a dict"),
        (object(), "object is not JSON; pass plain data, e.g. a dict"),
        (Ellipsis, "ellipsis is not JSON; pass plain data, e.g. a dict"),
        (threading.Lock(), "_thread.lock is not JSON; pass plain data, e.g. a dict"),
        (agenerator(), "async_generator is not JSON; pass plain data, e.g. a dict"),
        (Plain.ONE, f"{__name__}.Plain is a plain Enum; pass its .value, or make it a StrEnum"),
        (Account(id=1), f"{__name__}.Account is an ORM instance; pass the id, not the object"),
        (Account.__new__(Account), "is an ORM instance; pass the id, not the object"),
        (Invoice(id=1), f"{__name__}.Invoice is an ORM instance; pass the id, not the object"),
        (Hero(id=1), f"{__name__}.Hero is an ORM instance; pass the id, not the object"),
        (Imperative(), f"{__name__}.Imperative is an ORM instance; pass the id, not the object"),
        (float("nan"), "a float that is NaN or infinite, which JSON does not have; use None"),
        (float("-inf"), "a float that is NaN or infinite, which JSON does not have; use None"),
        (10**4300, "an int of more than 4300 digits; convert it, e.g. hex(value)"),
        (-(10**9000), "an int of more than 4300 digits; convert it, e.g. hex(value)"),
        (SECRET + "\0", "the string contains a NUL character, which cannot be stored"),
        (SECRET + "\ud83d\ude00", "the string contains a lone surrogate, which cannot be stored"),
        ({1: SECRET}, "a key is int, not str; convert the keys, e.g. str(key)"),
        ({None: SECRET}, "a key is NoneType, not str; convert the keys, e.g. str(key)"),
        ({Plain.ONE: 1}, f"a key is {__name__}.Plain, not str; convert the keys, e.g. str(key)"),
        ({(SECRET,): 1}, "a key is tuple, not str; convert the keys, e.g. str(key)"),
        (Hostile(), f"{__name__}.Hostile is not JSON; pass plain data, e.g. a dict"),
        (HostileClass(), f"{__name__}.HostileClass cannot be turned into JSON"),
        (Mock(), "unittest.mock.Mock is not JSON; pass what it returns"),
    ],
    ids=named,
)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda value: value, "payload"),
        (lambda value: [1, {"user": (value,)}], "payload[1].user[0]"),
        (lambda value: User(1, value), "payload.name"),
        (lambda value: OrderedDict(x=[value]), "payload.x[0]"),
    ],
)
def test_a_refused_value_is_named_by_place_type_and_way_out(
    value: object, message: str, wrap: Callable[[object], object], path: str
) -> None:
    """The error says where the value is, what it is and what to pass instead, not the value."""
    told = refusal(dump, wrap(value))
    assert told.startswith(f"{path}: ")
    assert message in told


def test_a_coroutine_is_refused_with_the_advice_to_await_it() -> None:
    """A forgotten await is the likely reason."""
    pending = coroutine()
    try:
        assert refusal(dump, [pending]).endswith(
            "coroutine is not JSON; await it and pass the result"
        )
    finally:
        pending.close()
    loop = asyncio.new_event_loop()
    try:
        assert "await it" in refusal(dump, loop.create_future())
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("name", "payload.name"),
        ("größe", "payload.größe"),
        ("odd key", 'payload["odd key"]'),
        ("", 'payload[""]'),
        ("0", 'payload["0"]'),
        ("a.b", 'payload["a.b"]'),
        ('say "hi"\\', 'payload["say \\"hi\\"\\\\"]'),
        ("it's", 'payload["it\'s"]'),
        ("line\nbreak\u202e", 'payload["line\\nbreak\\u202e"]'),
        ("x" * 40, "payload." + "x" * 40),
        ("x" * 41, 'payload["' + "x" * 39 + '…"]'),
    ],
)
def test_a_key_in_the_path_is_short_and_printable(key: str, path: str) -> None:
    """Keys come from anywhere; the path stays one readable line."""
    assert refusal(dump, {key: b""}).startswith(f"{path}: bytes")
    assert refusal(load, json.dumps({key: 1}), dict[str, str]).endswith(
        f"{path}: expected str, found an integer"
    )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("a\0", 'payload.x["a\\x00"]: the key contains a NUL character, which cannot be stored'),
        (
            Loud("\0"),
            'payload.x["\\x00"]: the key contains a NUL character, which cannot be stored',
        ),
        (
            "\ud800",
            'payload.x["\\ud800"]: the key contains a lone surrogate, which cannot be stored',
        ),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused(key: str, message: str) -> None:
    """Keys are text of the database too."""
    assert refusal(dump, {"x": {key: SECRET}}) == message


def test_the_path_starts_with_the_given_name() -> None:
    """Callers name what they check."""
    assert refusal(dump, {"a": b""}, "meta").startswith("meta.a: bytes")
    assert refusal(load, "1", str, "meta").startswith("meta does not fit str: meta: expected str")


@pytest.mark.parametrize("pack", [lambda x: [x], lambda x: {"k": x}, lambda x: (x,), User])
def test_nesting_is_bounded(pack: Callable[[object], object]) -> None:
    """A hundred levels pass and can be read again; one more is refused."""
    value: object = "leaf"
    for _ in range(MAX_DEPTH):
        value = pack(value)
    assert load(dump(value))
    assert "nested more than 100 levels deep" in refusal(dump, pack(value))
    for _ in range(100_000):
        value = pack(value)
    told = refusal(dump, value)
    assert len(told) < 400
    while isinstance(value, list | dict | tuple | User):  # or its own end would be recursive
        value = (
            value.id
            if isinstance(value, User)
            else next(iter(value.values() if isinstance(value, dict) else value))
        )


def test_a_circular_reference_is_named_where_it_begins() -> None:
    """Not by a path that goes around a hundred times."""
    inner: dict[str, Any] = {}
    inner["me"] = inner
    assert (
        refusal(dump, {"a": [1, inner]}) == "payload.a[1]: a circular reference, it contains itself"
    )
    around: list[Any] = [{}]
    around[0]["back"] = (User(around),)  # type: ignore[arg-type]
    assert "a circular reference, it contains itself" in refusal(dump, {"x": around})


@pytest.mark.parametrize("model", ["pydantic", "msgspec"])
def test_a_circular_or_unwritable_model_is_refused(model: str) -> None:
    """What the libraries raise about it is not let through, for it may show values."""

    class Node(pydantic.BaseModel):
        next: Any = None

    class Link(msgspec.Struct):
        next: Any = None

    kind = Node if model == "pydantic" else Link
    loop = kind()
    loop.next = [loop]
    for value in (loop, kind(next=Hostile()), kind(next=Account(id=1)), kind(next=Hostile)):
        told = refusal(dump, {"x": value})
        assert told.startswith("payload.x: ")
        assert f"{kind.__name__} cannot be turned into JSON (it raised " in told


def test_what_a_model_holds_is_checked_too() -> None:
    """A model can hold what the database cannot."""
    shape = Shape.model_construct(id="a\0", at=0, label=float("nan"))
    assert refusal(dump, shape).startswith("payload.id: the string contains a NUL")
    assert refusal(dump, [Parcel(uuid4(), None, {1: float("inf")})]).startswith(
        'payload[0].weights["1"]: a float that is NaN'
    )


def test_an_incomplete_dataclass_is_refused() -> None:
    """A field that was deleted has no value to write."""
    user = User.__new__(User)
    assert (
        refusal(dump, user)
        == f"payload: {__name__}.User cannot be turned into JSON (it raised AttributeError)"
    )


def test_an_enormous_payload_is_refused_before_the_database_does() -> None:
    """PostgreSQL's own refusal would abort the caller's transaction."""
    assert len(dump("x" * (MAX_CHARACTERS - 2))) == MAX_CHARACTERS
    told = refusal(dump, SECRET + "x" * MAX_CHARACTERS)
    assert "store the data elsewhere and pass a reference" in told


def test_a_stack_that_is_nearly_used_up_is_no_recursion_error() -> None:
    """However deep the caller is, the payload is what gets refused."""
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]

    def descend(levels: int) -> str:
        return descend(levels - 1) if levels else refusal(dump, value)

    depth = 0
    frame = sys._getframe()
    while frame.f_back:
        frame, depth = frame.f_back, depth + 1
    assert descend(sys.getrecursionlimit() - depth - 60) == (
        "payload: cannot be written as JSON (RecursionError)"
    )


def test_a_lower_digit_limit_is_no_value_error_of_its_own() -> None:
    """Python's limit on digits can be lowered; then the error is still ours."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert refusal(dump, [10**1000]) == "payload: cannot be written as JSON (ValueError)"
    finally:
        sys.set_int_max_str_digits(before)


# --- hypothesis


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)
anything = st.recursive(
    scalars
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs"]))
    | st.binary()
    | st.uuids()
    | st.datetimes()
    | st.decimals()
    | st.complex_numbers()
    | st.sampled_from([*Color, *Level, *Plain, User, len, Account(id=1)])
    | st.builds(MagicMock)
    | st.builds(Hostile)
    | st.builds(HostileClass)
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.sets(st.integers())
        | st.dictionaries(st.text() | st.integers() | st.none() | st.tuples(st.text()), inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(User, inner)
        | st.builds(lambda x: Shape.model_construct(id=x), inner)
        | st.builds(Parcel, inner)
    ),
    max_leaves=20,
)


@given(values)
def test_every_json_value_survives(value: Any) -> None:
    """What is dumped is what json and load() read."""
    text = dump(value)
    assert json.loads(text) == value
    assert repr(load(text)) == repr(value)
    assert load(text, into=Any) == value
    text.encode()


@given(anything)
def test_no_object_escapes_the_check(value: object) -> None:
    """Any object is either storable JSON or a PayloadError."""
    try:
        text = dump(value)
    except PayloadError as error:
        assert_tells_no_value(error)
    else:
        text.encode()
        assert "\0" not in text
        assert "\\u0000" not in text.replace("\\\\", "")
        json.loads(text, parse_constant=pytest.fail)


welcomes = st.builds(
    Welcome,
    user=st.builds(User, st.integers(), st.none() | texts, st.sampled_from(Color)),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    tags=st.lists(texts).map(tuple),
    scores=st.dictionaries(texts, st.integers()),
    kind=st.sampled_from(["mail", "sms"]),
)


@given(welcomes)
def test_every_dataclass_survives(welcome: Welcome) -> None:
    """A dataclass of JSON types is loaded as it was dumped."""
    assert load(dump(welcome), into=Welcome) == welcome


hints = st.sampled_from(
    [str, int, float, bool, None, list, dict, set, tuple, list[int], dict[str, str], set[str],
     tuple[int, ...], tuple[int, str], int | str, float | None, Literal["a", 1], Color, Level,
     User, Welcome, Shape, Parcel, UUID, datetime, date, time, Decimal, Annotated[int, "x"],
     list[User | Shape], frozenset[tuple[int, ...]], set[Any]]
)  # fmt: skip


@given(values, hints)
def test_no_value_escapes_its_annotation(value: Any, hint: Any) -> None:
    """Any value is either built into the annotation or a PayloadError."""
    try:
        load(json.dumps(value), into=hint)
    except PayloadError as error:
        assert_tells_no_value(error)


# --- load


@pytest.mark.parametrize(
    "text",
    ["", "{", SECRET, f'{{"a": "{SECRET}"', "NaN", '{"a": [Infinity]}', "-Infinity", "[" * 100_000,
     "9" * 5000, None, 5, SECRET.encode()],
)  # fmt: skip
def test_what_is_not_json_is_a_payload_error(text: Any) -> None:
    """A row that was edited by hand may hold anything."""
    assert refusal(load, text).startswith("payload is not JSON: ")
    assert refusal(load, text, into=Shape).startswith("payload is not JSON: ")


def test_without_an_annotation_the_value_is_untouched() -> None:
    """None and Any ask for nothing."""
    text = f'{{"a":[1,2.5,{HUGE},null]}}'
    assert load(text) == load(text, into=Any) == {"a": [1, 2.5, HUGE, None]}
    assert load("null") is None


class Options(TypedDict, total=False):
    """A dict with known keys."""

    name: Required[str]
    count: int


class Total(TypedDict):
    """A dict with an optional key."""

    name: str
    count: NotRequired[Annotated[int, "how many"]]


UserId = NewType("UserId", int)
T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    """Something with a parameter, which is not supported."""

    item: T


@dataclass
class Tree:
    """A type that contains itself."""

    children: list[Tree] = field(default_factory=list)


@dataclass
class Everything:
    """One field for each kind of annotation."""

    at: datetime | None = None
    day: date | None = None
    items: Sequence[int] = ()
    table: Mapping[str, list[float]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "into", "built"),
    [
        ("null", type(None), None),
        ("1", int, 1),
        (str(HUGE), int, HUGE),
        ("1", float, 1.0),
        (str(10**22), float, 1e22),
        ("true", bool, True),
        ('"x"', str, "x"),
        ("[1]", list, [1]),
        ("[1]", list[int], [1]),
        ("[1]", Sequence[int], [1]),
        ("[1,1]", set[int], {1}),
        ("[1]", frozenset[int], frozenset({1})),
        ("[1]", frozenset, frozenset({1})),
        ("[1]", tuple, (1,)),
        ("[1,2]", tuple[int, ...], (1, 2)),
        ('[1,"a"]', tuple[int, str], (1, "a")),
        ("[]", tuple[()], ()),
        ('{"a":1}', dict, {"a": 1}),
        ('{"a":1}', dict[str, int], {"a": 1}),
        ('{"red":1}', dict[Color, int], {Color.RED: 1}),
        ("null", int | None, None),
        ("1", Optional[int], 1),  # noqa: UP045 - people still write it
        ("1", int | str, 1),
        ('"1"', int | str, "1"),
        ("1", float | int, 1.0),
        ('{"id":1}', Tree | User, User(1)),
        ('"mail"', Literal["mail"], "mail"),
        ('"red"', Literal[Color.RED], Color.RED),
        ("null", Literal[None, 1], None),  # noqa: PYI061 - people may write it
        ('"red"', Color, Color.RED),
        ("2", Level, Level.HIGH),
        ('"f"', Coded, Coded.FIRST),
        (f'"{UUID(int=1)}"', UUID, UUID(int=1)),
        ('"2030-01-02T03:04:05Z"', datetime, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ('"2030-01-02 03:04:05+00:00"', datetime, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ('"2030-01-02"', date, date(2030, 1, 2)),
        ('"03:04"', time, time(3, 4)),
        ('"1.10"', Decimal, Decimal("1.10")),
        ("1", UserId, 1),
        ("1", Annotated[int, ["not hashable"]], 1),
        ('{"name":"x"}', Options, {"name": "x"}),
        ('{"name":"x","count":1}', Total, {"name": "x", "count": 1}),
        ('{"name":"x"}', Total, {"name": "x"}),
        ('{"children":[{"children":[]},{}]}', Tree, Tree([Tree(), Tree()])),
        (
            '{"at":null,"day":"2030-01-02","items":[1],"table":{"a":[1]}}',
            Everything,
            Everything(None, date(2030, 1, 2), [1], {"a": [1.0]}),
        ),
    ],
)
def test_a_fitting_value_is_built(text: str, into: Any, built: object) -> None:
    """Each kind of annotation builds what it says."""
    loaded = load(text, into=into)
    assert loaded == built
    assert type(loaded) is type(built)


@pytest.mark.parametrize(
    ("text", "into", "problem"),
    [
        ("true", int, "payload: expected int, found a boolean"),
        ("1.0", int, "payload: expected int, found a number"),
        ("true", float, "payload: expected float, found a boolean"),
        (str(10**400), float, "payload: expected float, found an integer"),
        ("1", bool, "payload: expected bool, found an integer"),
        ("1", str, "payload: expected str, found an integer"),
        ("0", type(None), "payload: expected null, found an integer"),
        (f'"{SECRET}"', list, "payload: expected list, found a string"),
        (f'["{SECRET}"]', list[int], "payload[0]: expected int, found a string"),
        ("[[]]", set, "payload: expected set, found items that no set can hold"),
        ("[1]", tuple[int, str], "payload: expected tuple[int, str], found an array of 1"),
        ("[1,1]", tuple[int, str], "payload[1]: expected str, found an integer"),
        ('{"a":"b"}', dict[str, int], "payload.a: expected int, found a string"),
        ('{"a":1}', dict[Color, int], "payload.a: expected Color, found a string"),
        ("[]", dict[str, int], "payload: expected dict[str, int], found an array"),
        ("null", int | str, "payload: expected int or str, found null"),
        (f'"{SECRET}"', int | None, "payload: expected int, found a string"),
        (f'"{SECRET}"', Literal["a"], "payload: expected Literal['a'], found a string"),
        ("true", Literal[1], "payload: expected Literal[1], found a boolean"),
        (f'"{SECRET}"', Color, "payload: expected Color, found a string"),
        ("true", Level, "payload: expected Level, found a boolean"),
        ("1.0", Level, "payload: expected Level, found a number"),
        ("[]", Color, "payload: expected Color, found an array"),
        (f'"{SECRET}"', UUID, "payload: expected UUID as text, found other text"),
        (f'"{SECRET}"', Decimal, "payload: expected Decimal as text, found other text"),
        (f'"{SECRET}"', datetime, "payload: expected datetime as text, found other text"),
        ("1", datetime, "payload: expected datetime, found an integer"),
        ("{}", Options, "payload.name: missing, expected str"),
        ('{"name":"","other":1}', Total, "payload.other: unknown field of Total"),
        ("[]", User, "payload: expected User, found an array"),
        ("{}", User, "payload.id: missing, expected int"),
        ('{"id":1,"length":1}', User, "payload.length: unknown field of User"),
        ('{"user":{"id":1},"length":1}', Welcome, "payload.length: unknown field of Welcome"),
        ('{"children":[{"children":[1]}]}', Tree,
         "payload.children[0].children[0]: expected Tree, found an integer"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_by_place_and_type(
    text: str, into: Any, problem: str
) -> None:
    """The error says where, what was wanted and what kind of value was found."""
    told = refusal(load, text, into)
    assert told.startswith("payload does not fit ")
    assert told.endswith(f": {problem}")


def test_five_problems_are_listed_and_the_others_counted() -> None:
    """A long list of faults stays a readable message."""
    told = refusal(load, json.dumps([SECRET] * 12), list[int])
    assert told.count("expected int, found a string") == 5
    assert told.endswith("; and 7 more")
    assert "more" not in refusal(load, json.dumps([SECRET] * 5), list[int])


def test_a_deeply_nested_row_is_a_payload_error() -> None:
    """A row that was edited by hand may be deeper than the stack."""
    told = refusal(load, '{"children":[' * 450 + "]}" * 450, Tree)
    assert told == "payload does not fit Tree: payload: nested too deep"


@dataclass
class Picky:
    """A dataclass that checks its values."""

    name: str

    def __post_init__(self) -> None:
        """Refuse, and say what."""
        message = f"{self.name} is refused"
        raise ValueError(message)


class PickyModel(pydantic.BaseModel):
    """A model whose validators tell everything."""

    value: str = ""
    custom: str = ""
    crash: str = ""
    color: Color = Color.RED
    kind: Literal["a"] = "a"
    number: int = 0
    uuid: UUID = UUID(int=0)
    at: date = date(2030, 1, 1)
    email: Annotated[str, pydantic.StringConstraints(pattern="^a", max_length=3)] = "a"

    @pydantic.field_validator("value", "custom", "crash")
    @classmethod
    def check(cls, value: str, info: pydantic.ValidationInfo) -> str:
        """Refuse, and say what."""
        if info.field_name == "value":
            raise ValueError(value)
        if info.field_name == "custom":
            raise PydanticCustomError("mine", "{value}", {"value": value})
        raise KeyError(value)


class Cat(pydantic.BaseModel):
    """One of two that are told apart by a tag."""

    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    """The other."""

    kind: Literal["dog"]


class Owner(pydantic.BaseModel):
    """A model that names the tag it found."""

    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class PickyStruct(msgspec.Struct, forbid_unknown_fields=True):
    """A struct whose errors show values."""

    number: int = 0
    color: Color = Color.RED
    uuid: UUID = UUID(int=0)
    name: Annotated[str, msgspec.Meta(max_length=20)] = ""
    table: dict[str, list[int]] = {}

    def __post_init__(self) -> None:
        """Refuse, and say what."""
        if self.name:
            raise ValueError("Expected `" + self.name)


@pytest.mark.parametrize(
    ("value", "into", "problem"),
    [
        ({"name": SECRET}, Picky, "payload: Picky refused it (ValueError)"),
        ({"value": SECRET}, PickyModel, "payload.value: does not fit (value_error)"),
        ({"custom": SECRET}, PickyModel, "payload.custom: does not fit (mine)"),
        ({"crash": SECRET}, PickyModel, "payload: PickyModel refused it (KeyError)"),
        ({"color": SECRET}, PickyModel, "payload.color: Input should be 'red' or 'blue'"),
        ({"kind": SECRET}, PickyModel, "payload.kind: Input should be 'a'"),
        ({"number": SECRET}, PickyModel, "payload.number: Input should be a valid integer"),
        ({"uuid": SECRET}, PickyModel, "payload.uuid: Input should be a valid UUID"),
        ({"at": SECRET}, PickyModel,
         "payload.at: does not fit (date_from_datetime_parsing)"),
        ({"email": SECRET}, PickyModel,
         "payload.email: String should have at most 3 characters"),
        ([], PickyModel, "payload: Input should be an object"),
        ({"id": str(UUID(int=1)), "at": "2030-01-01T00:00", SECRET[:2]: 1}, Shape,
         "payload.s3: Extra inputs are not permitted"),
        ({"at": "2030-01-01T00:00"}, Shape, "payload.id: Field required"),
        ({"pet": {"kind": SECRET}}, Owner, "payload.pet: does not fit (union_tag_invalid)"),
        ({"number": SECRET}, PickyStruct, "payload.number: Expected `int`, got `str`"),
        ({"color": SECRET}, PickyStruct, "payload.color: Invalid enum value"),
        ({"uuid": SECRET}, PickyStruct, "payload.uuid: Invalid UUID"),
        ({"name": SECRET}, PickyStruct, "payload: PickyStruct refused it (ValidationError)"),
        ({"name": SECRET * 5}, PickyStruct, "payload.name: Expected `str` of length <= 20"),
        ({"table": {SECRET: [1, SECRET]}}, PickyStruct,
         'payload.table["..."][1]: Expected `int`, got `str`'),
        ({SECRET: 1}, PickyStruct, "payload: Object contains unknown field"),
        ({}, Parcel, "payload: Object missing required field `parcelId`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_messages_of_validators_show_no_values(
    value: Any,
    into: Any,
    problem: str,
    nested: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Messages that only speak of the annotation are passed on; the others may hold the value."""
    if nested:
        value, into = {"in": [value]}, dict[str, list[into]]
        problem = problem.replace("payload", "payload.in[0]", 1)
    assert refusal(load, json.dumps(value), into).endswith(f": {problem}")


def test_a_lone_surrogate_in_a_row_is_a_payload_error_of_the_model() -> None:
    """SQLite may hold the escape; pydantic cannot read it."""
    assert "payload: does not fit" in refusal(load, '{"email":"\\ud800"}', PickyModel)
    assert load('["\\ud800"]', list[str]) == ["\ud800"]


@pytest.mark.parametrize("into", [complex, Unset, Box[int], bytes, "User", T, dict[str, object()]])  # type: ignore[misc]
def test_an_annotation_that_cannot_be_built_is_the_programmers_error(into: Any) -> None:
    """It is not the payload's fault, so it is another error."""
    with pytest.raises(InvalidArgumentError, match="a payload cannot be built into"):
        load('{"a":1}', into=into)


def test_an_annotation_that_names_nothing_is_the_programmers_error() -> None:
    """A name that only the type checker sees cannot be resolved at run time."""

    @dataclass
    class Broken:
        field: Nowhere  # type: ignore[name-defined]  # noqa: F821 - the point of it

    with pytest.raises(InvalidArgumentError, match="annotations of Broken cannot be resolved"):
        load('{"field":1}', into=Broken)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is of 3.12")
def test_a_type_statement_stands_for_its_value() -> None:
    """``type Ids = list[int]`` is as good as ``list[int]``."""
    names: dict[str, Any] = {}
    exec("type Ids = list[int]", names)  # noqa: S102 - a syntax error before 3.12
    assert load("[1]", into=names["Ids"]) == [1]


# --- text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "task must be a str of 1 to 20 characters, got 0"),
        (SECRET * 2, "task must be a str of 1 to 20 characters, got 28"),
        (None, "task must be a str of 1 to 20 characters, got NoneType"),
        (5, "task must be a str of 1 to 20 characters, got int"),
        (SECRET.encode(), "task must be a str of 1 to 20 characters, got bytes"),
        (SECRET + "\0", "task contains a NUL character, which cannot be stored"),
        (SECRET + "\udcff", "task contains a lone surrogate, which cannot be stored"),
        (Loud(""), "task must be a str of 1 to 20 characters, got 0"),
    ],
)
def test_text_that_cannot_be_stored_is_refused_by_name(value: object, message: str) -> None:
    """The error names the argument and what is accepted, not the value."""
    with pytest.raises(InvalidArgumentError) as caught:
        check_text(value, "task", 20)
    assert str(caught.value) == message
    assert_tells_no_value(caught.value)


@pytest.mark.parametrize("value", ["x", "x" * 20, "😀" * 20, " ", "Ü", Color.RED, Loud("a")])
def test_text_that_can_be_stored_is_returned_as_plain_str(value: str) -> None:
    """Characters are counted, not bytes, and nothing is stripped or folded."""
    checked = check_text(value, "task", 20)
    assert type(checked) is str
    assert checked == value


@given(st.text(st.characters()), st.integers(0, 100))
def test_any_text_becomes_storable(text: str, limit: int) -> None:
    """The result is short enough, encodes, and keeps the beginning and the end."""
    kept = storable(text, limit)
    assert len(kept) <= limit
    assert "\0" not in kept
    kept.encode()
    assert storable(kept, limit) == kept
    if len(text) <= limit:
        assert len(kept) == len(text)
        assert all(a in (b, "\ufffd") for a, b in zip(kept, text, strict=True))


def test_what_is_too_long_loses_its_middle() -> None:
    """The marker says how much is missing, and the end gets most of the room."""
    kept = storable("a" * 5000 + "b" * 5000, 4000)
    found = re.fullmatch(r"(a+)… \[(\d+) characters left out\] …(b+)", kept)
    assert found
    head, left_out, tail = found.groups()
    assert len(head) + int(left_out) + len(tail) == 10_000
    assert 3990 < len(kept) <= 4000
    assert len(tail) > len(head) > 900
    assert storable("abc", 2) == "ab"
    assert storable(SECRET + "\0\ud800\udfff😀", 100) == SECRET + "\ufffd\ufffd\ufffd😀"


# --- what it needs


def test_only_the_standard_library_and_the_errors_are_imported() -> None:
    """pydantic, msgspec and SQLAlchemy are recognised without being imported."""
    tree = ast.parse(Path(payload.__file__).read_text("utf-8"))
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    froms = {(n.level, n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {module for level, module in froms if level}
    theirs = names | {module for level, module in froms if not level}
    assert ours == {"errors"}
    assert {name.split(".")[0] for name in theirs} <= sys.stdlib_module_names


def test_payloads_work_without_the_optional_libraries() -> None:
    """A process that never imports pydantic or msgspec dumps and loads all the same."""
    program = (
        "import sys; from sqlalchemy_jobs.payload import dump, load;"
        "from dataclasses import make_dataclass; D = make_dataclass('D', [('a', int)]);"
        "assert load(dump(D(1)), D) == D(1);"
        "assert not {'pydantic', 'msgspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
