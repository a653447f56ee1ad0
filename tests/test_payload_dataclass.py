"""Dataclasses as payloads: whatever load() can build, dump() can write."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from types import GenericAlias
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlalchemy_jobs import _fit, payload
from sqlalchemy_jobs.payload import dump, load
from tests.test_payload_samples import (
    SAMPLES,
    SECRET,
    Coded,
    Color,
    Hostile,
    Level,
    Plain,
    Point,
    User,
    Welcome,
    refusal,
)

ID = UUID(int=7)
AT = datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


class Mixed(Enum):
    """Choices of every type that JSON has, and of some that it has not."""

    TEXT = "text"
    NUMBER = 2
    RATIO = 2.5
    YES = True
    NOTHING = None
    LIST = [1, "a"]  # noqa: RUF012 - a member, not a default
    OBJECT = {"a": 1}  # noqa: RUF012 - see LIST
    TUPLE = (1, "a")
    HIDDEN = [(1,)]  # noqa: RUF012 - see LIST
    DAY = date(2030, 1, 2)


UNFINDABLE = (Mixed.TUPLE, Mixed.HIDDEN, Mixed.DAY)
FINDABLE = [member for member in Mixed if member not in UNFINDABLE]


class Rights(Flag):
    """Choices that add up."""

    READ = 1
    WRITE = 2


class Moment(datetime):
    """A datetime that lies, and one that is not there."""

    missing = False

    def isoformat(self, *_: object, **__: object) -> str:
        """Tell nothing."""
        return SECRET

    def __eq__(self, other: object) -> bool:
        """Be equal to nothing, like NaT."""
        return not self.missing and super().__eq__(other)

    __hash__ = datetime.__hash__


@dataclass(frozen=True)
class Line:
    """A part of a payload."""

    price: Decimal
    due: date | None = None


@dataclass
class Order:
    """A payload with a field for each place that a value can be in."""

    id: UUID
    at: datetime
    opens: time = time(8, 30)
    kind: Mixed = Mixed.TEXT
    rights: Rights = Rights.READ
    lines: list[Line] = field(default_factory=list)
    days: dict[date, list[UUID | None]] = field(default_factory=dict)
    seen: set[UUID] = field(default_factory=set)
    pairs: tuple[tuple[Plain, Decimal], ...] = ()
    choice: Literal[Mixed.NUMBER] | None = None
    note: Any = None


def test_a_dataclass_is_written_with_its_values_as_text() -> None:
    """ISO 8601 for times, the text of ids and decimals, the values of members, arrays for sets."""
    order = Order(
        id=ID,
        at=AT,
        kind=Mixed.NUMBER,
        rights=Rights.READ | Rights.WRITE,
        lines=[Line(Decimal("1.10"), date(2030, 1, 2))],
        days={date(2030, 1, 2): [ID, None]},
        seen={UUID(int=2), UUID(int=1)},
        pairs=((Plain.ONE, Decimal("-0")),),
        choice=Mixed.NUMBER,
    )
    text = dump({"orders": [order]})
    assert json.loads(text)["orders"] == [
        {
            "id": str(ID),
            "at": "2030-01-02T03:04:05.000006+00:00",
            "opens": "08:30:00",
            "kind": 2,
            "rights": 3,
            "lines": [{"price": "1.10", "due": "2030-01-02"}],
            "days": {"2030-01-02": [str(ID), None]},
            "seen": [str(UUID(int=1)), str(UUID(int=2))],
            "pairs": [[SECRET, "-0"]],
            "choice": 2,
            "note": None,
        }
    ]
    assert load(text, into=dict[str, list[Order]]) == {"orders": [order]}


def test_every_type_that_is_built_from_text_is_written_as_text() -> None:
    """Who adds a type to one of the two tables is reminded of the other."""
    assert {base for base, _ in payload._TEXTS} == set(_fit._FROM_TEXT)


# --- any dataclass


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Offsets of whole seconds: no zone has others, and Python loses some of those when it reads them.
zones = st.none() | st.integers(-86_399, 86_399).map(lambda s: timezone(timedelta(seconds=s)))
simple: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, texts),
    (int, st.integers()),
    (bool, st.booleans()),
    (UUID, st.uuids()),
    (datetime, st.datetimes(timezones=zones)),
    (date, st.dates()),
    (time, st.times(timezones=zones)),
    (Decimal, st.decimals(allow_nan=False)),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Coded, st.just(Coded.FIRST)),
    (Plain, st.just(Plain.ONE)),
    (Rights, st.integers(0, 3).map(Rights)),
]
keys = [pair for pair in simple if pair[0] not in {int, bool, Level, Rights}]
others: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (Mixed, st.sampled_from(FINDABLE).filter(lambda member: member.value is not None)),
    (Literal["a", 1, Plain.ONE], st.sampled_from(["a", 1, Plain.ONE])),
    (dict[str, Any], st.dictionaries(texts, st.integers() | st.lists(texts))),
]


def dataclass_of(members: list[tuple[Any, st.SearchStrategy[Any]]]) -> tuple[Any, Any]:
    """Return a new dataclass of fields like *members*, and the strategy of its instances."""
    kind = make_dataclass("Made", [(f"f{i}", hint) for i, (hint, _) in enumerate(members)])
    return kind, st.builds(kind, *(strategy for _, strategy in members))


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Annotations, with the strategies of their values, that contain those of *inner*."""

    def many(origin: Any, hint: Any, values: st.SearchStrategy[Any], *more: Any) -> Any:
        return GenericAlias(origin, (hint, *more)), st.lists(values, max_size=3).map(origin)

    hashable = st.sampled_from(simple)
    return st.one_of(
        inner.map(lambda x: many(list, *x)),
        inner.map(lambda x: many(tuple, *x, ...)),
        hashable.map(lambda x: many(set, *x)),
        hashable.map(lambda x: many(frozenset, *x)),
        inner.map(lambda x: (x[0] | None, st.none() | x[1])),
        st.tuples(inner, inner).map(
            lambda x: (GenericAlias(tuple, (x[0][0], x[1][0])), st.tuples(x[0][1], x[1][1]))
        ),
        st.tuples(st.sampled_from(keys), inner).map(
            lambda x: (
                GenericAlias(dict, (x[0][0], x[1][0])),
                st.dictionaries(x[0][1], x[1][1], max_size=3),
            )
        ),
        st.lists(inner, max_size=3).map(dataclass_of),
    )


annotated = st.recursive(st.sampled_from(simple + others), larger, max_leaves=8)


@given(st.lists(annotated, min_size=1, max_size=4).map(dataclass_of), st.data())
def test_any_dataclass_survives(made: tuple[Any, Any], data: st.DataObject) -> None:
    """An instance of any dataclass that load() builds is loaded as it was dumped."""
    kind, instances = made
    value = data.draw(instances)
    loaded = load(dump(value), into=kind)
    assert loaded == value
    for member in fields(kind):
        assert type(getattr(loaded, member.name)) is type(getattr(value, member.name))
    assert dump(loaded) == dump(value)


welcomes = st.builds(
    Welcome,
    user=st.builds(User, st.integers(), st.none() | texts, st.sampled_from(Color)),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    tags=st.lists(texts).map(tuple),
    scores=st.dictionaries(texts, st.integers()),
    kind=st.sampled_from(["mail", "sms"]),
)


@given(welcomes)
def test_a_dataclass_with_derived_fields_survives(welcome: Welcome) -> None:
    """What the constructor does not take is derived again."""
    assert load(dump(welcome), into=Welcome) == welcome


# --- the odd ones


class Autumn(tzinfo):
    """A zone whose clocks are always just being set back."""

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        """Give two hours, then one."""
        return timedelta(hours=2 - at.fold) if at else None

    def dst(self, at: datetime | None) -> timedelta | None:
        """Give what is more than one hour."""
        return timedelta(hours=1 - at.fold) if at else None

    def tzname(self, at: datetime | None) -> str:
        """Give a name that fits."""
        return "autumn" if at else ""


@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_that_the_clock_shows_twice_stays_the_same_instant(fold: int) -> None:
    """A time zone becomes the offset that it has at that time."""
    at = datetime(2030, 10, 27, 2, 30, tzinfo=Autumn(), fold=fold)
    loaded = load(dump(Order(ID, at)), into=Order).at
    assert loaded.utcoffset() == at.utcoffset()
    assert loaded.astimezone(UTC) == at.astimezone(UTC)


@pytest.mark.parametrize("text", ["NaN", "sNaN", "-Infinity", "1E+1000", "0.00", "9" * 5000])
def test_any_decimal_survives(text: str) -> None:
    """Digits, exponent and sign are kept."""
    assert str(load(dump(Line(Decimal(text))), into=Line).price) == text


def test_a_subclass_is_written_as_its_base_writes_it() -> None:
    """The annotation brings back the base, whatever the subclass shows to people."""
    moment = Moment(2030, 1, 2, tzinfo=UTC)
    assert load(dump(Order(ID, moment)), into=Order).at == datetime(2030, 1, 2, tzinfo=UTC)
    assert json.loads(dump(User(1, moment)))["name"] == "2030-01-02T00:00:00+00:00"  # type: ignore[arg-type]


def test_a_datetime_that_stands_for_none_is_refused() -> None:
    """NaT of pandas is a datetime by its class only."""
    moment = Moment(1, 1, 1)
    moment.missing = True
    told = refusal(dump, Order(ID, moment))
    assert told == f"payload.at: {__name__}.Moment is not JSON; convert it, e.g. str(value)"


@pytest.mark.parametrize("member", FINDABLE)
def test_a_member_is_found_by_its_value(member: Mixed) -> None:
    """Whatever JSON has a form for may be the value of a member."""
    assert load(dump(Order(ID, AT, kind=member)), into=Order).kind is member


@pytest.mark.parametrize("member", UNFINDABLE)
def test_a_member_that_load_cannot_find_is_refused(member: Mixed) -> None:
    """Its value is not what JSON makes of it."""
    told = refusal(dump, Order(ID, AT, kind=member))
    assert told.startswith(f"payload.kind: {__name__}.Mixed is a plain Enum; pass its .value")


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"a": [timedelta(1)]}, "payload.note.a[0]: datetime.timedelta is not JSON; convert it"),
        ({"a": {b""}}, "payload.note.a[0]: bytes is not JSON; convert it"),
        ({1: SECRET}, "payload.note: a key is int, not str; convert the keys, e.g. str(key)"),
        ({Level.LOW: 1}, f"payload.note: a key is {SAMPLES}.Level, not str; convert the keys"),
        ({Rights.READ: 1}, f"payload.note: a key is {__name__}.Rights, not str; convert the keys"),
        ({ID: SECRET, str(ID): 1}, "payload.note: two of the keys are the same as text"),
        ({str(ID): 1, ID: SECRET}, "payload.note: two of the keys are the same as text"),
        ({Hostile(): 1}, f"payload.note: a key is {SAMPLES}.Hostile, not str; convert the keys"),
        ({Point(1, 2): 1}, f"payload.note: a key is {SAMPLES}.Point, not str; convert the keys"),
    ],
)
def test_what_load_cannot_build_is_refused_in_a_dataclass_too(note: object, message: str) -> None:
    """Being part of a dataclass helps only where an annotation helps on the way back."""
    assert refusal(dump, Order(ID, AT, note=note)).startswith(message)


def test_a_set_is_written_in_the_same_order_by_every_process() -> None:
    """Hashes of strings differ between processes; the text must not."""
    program = (
        "from dataclasses import make_dataclass; from sqlalchemy_jobs.payload import dump;"
        "print(dump(make_dataclass('D', ['x'])({*'abcdefgh', None, 1, (2, None), (2, 'x')})))"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(written) == 1
