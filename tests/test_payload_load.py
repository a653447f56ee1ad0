"""Payloads read back: what is built, what does not fit and where, and who is to blame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
)
from uuid import UUID

import msgspec
import pydantic
import pytest
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from sqlalchemy_jobs.errors import InvalidArgumentError
from sqlalchemy_jobs.payload import load
from tests.test_payload_samples import (
    HUGE,
    SECRET,
    Coded,
    Color,
    Level,
    Parcel,
    Shape,
    User,
    Welcome,
    refusal,
)


class Unset:
    """Stands for a value that is not there."""


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


Ids = TypeAliasType("Ids", list[int])  # what the statement makes, from Python 3.12 on


def test_a_type_statement_stands_for_its_value() -> None:
    """``type Ids = list[int]`` is as good as ``list[int]``."""
    assert load("[1]", into=Ids) == [1]
