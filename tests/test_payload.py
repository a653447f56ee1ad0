"""Payloads: what is accepted, what is refused and where, and that no message shows a value."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unittest.mock import MagicMock, Mock
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlalchemy_jobs import _fit, payload
from sqlalchemy_jobs.errors import InvalidArgumentError, PayloadError
from sqlalchemy_jobs.payload import MAX_CHARACTERS, MAX_DEPTH, check_text, dump, load, storable
from tests.test_payload_samples import (
    HUGE,
    SAMPLES,
    SECRET,
    Account,
    Bits,
    Coded,
    Color,
    Hero,
    Hostile,
    HostileClass,
    HostileDict,
    Imperative,
    Invoice,
    Level,
    Loud,
    Parcel,
    Plain,
    Point,
    Shape,
    User,
    Welcome,
    assert_tells_no_value,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def named(value: object) -> str:
    """Return the name of a parameter; pytest's own would touch the value."""
    return value[:30] if isinstance(value, str) else type(value).__name__


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
        ({Coded.FIRST: 1}, '{"f":1}'),
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


PLACES: list[tuple[Callable[[object], object], str]] = [
    (lambda value: value, "payload"),
    (lambda value: [1, {"user": (value,)}], "payload[1].user[0]"),
    (lambda value: OrderedDict(x=[value]), "payload.x[0]"),
]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (timedelta(1), "datetime.timedelta is not JSON; convert it, e.g. value.total_seconds()"),
        (SECRET.encode(), "bytes is not JSON; convert it, e.g. value.hex() or base64"),
        (bytearray(1), "bytearray is not JSON; convert it, e.g. value.hex() or base64"),
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
        (Account(id=1), f"{SAMPLES}.Account is an ORM instance; pass the id, not the object"),
        (Account.__new__(Account), "is an ORM instance; pass the id, not the object"),
        (Invoice(id=1), f"{SAMPLES}.Invoice is an ORM instance; pass the id, not the object"),
        (Hero(id=1), f"{SAMPLES}.Hero is an ORM instance; pass the id, not the object"),
        (Imperative(), f"{SAMPLES}.Imperative is an ORM instance; pass the id, not the object"),
        (float("nan"), "a float that is NaN or infinite, which JSON does not have; use None"),
        (float("-inf"), "a float that is NaN or infinite, which JSON does not have; use None"),
        (10**4300, "an int of more than 4300 digits; convert it, e.g. hex(value)"),
        (-(10**9000), "an int of more than 4300 digits; convert it, e.g. hex(value)"),
        (SECRET + "\0", "the string contains a NUL character, which cannot be stored"),
        (SECRET + "\ud83d\ude00", "the string contains a lone surrogate, which cannot be stored"),
        ({1: SECRET}, "a key is int, not str; convert the keys, e.g. str(key)"),
        ({None: SECRET}, "a key is NoneType, not str; convert the keys, e.g. str(key)"),
        ({(SECRET,): 1}, "a key is tuple, not str; convert the keys, e.g. str(key)"),
        (Hostile(), f"{SAMPLES}.Hostile is not JSON; pass plain data, e.g. a dict"),
        (HostileClass(), f"{SAMPLES}.HostileClass cannot be turned into JSON"),
        (Mock(), "unittest.mock.Mock is not JSON; pass what it returns"),
    ],
    ids=named,
)
@pytest.mark.parametrize(
    ("wrap", "path"), [*PLACES, (lambda value: User(1, value), "payload.name")]
)
def test_a_refused_value_is_named_by_place_type_and_way_out(
    value: object, message: str, wrap: Callable[[object], object], path: str
) -> None:
    """The error says where the value is, what it is and what to pass instead, not the value."""
    told = refusal(dump, wrap(value))
    assert told.startswith(f"{path}: ")
    assert message in told


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (uuid4(), "uuid.UUID is not JSON; convert it, e.g. str(value)"),
        (datetime.now(UTC), "datetime.datetime is not JSON; convert it, e.g. str(value)"),
        (date(2030, 1, 1), "datetime.date is not JSON; convert it, e.g. str(value)"),
        (time(1), "datetime.time is not JSON; convert it, e.g. str(value)"),
        (Decimal(1), "decimal.Decimal is not JSON; convert it, e.g. str(value)"),
        ({SECRET}, "set is not JSON; convert it, e.g. sorted(value)"),
        (frozenset({1}), "frozenset is not JSON; convert it, e.g. sorted(value)"),
        (Plain.ONE, f"{SAMPLES}.Plain is a plain Enum; pass its .value, or make it a StrEnum"),
        ({Plain.ONE: 1}, f"a key is {SAMPLES}.Plain, not str; convert the keys, e.g. str(key)"),
    ],
    ids=named,
)
@pytest.mark.parametrize(("wrap", "path"), PLACES)
def test_what_a_dataclass_may_hold_is_refused_elsewhere(
    value: object, message: str, wrap: Callable[[object], object], path: str
) -> None:
    """Where no annotation brings the value back, nobody turns it into text unasked."""
    assert refusal(dump, wrap(value)).startswith(f"{path}: {message}")
    assert refusal(dump, [User(1, value), wrap(value)])  # type: ignore[arg-type]


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


def test_keys_that_are_one_as_text_are_refused() -> None:
    """Otherwise one of the two values would be lost."""
    for keys in ({Coded.FIRST: 1, "f": SECRET}, {"f": SECRET, Coded.FIRST: 1}):
        assert refusal(dump, [keys]) == "payload[0]: two of the keys are the same as text"


def test_a_key_that_poses_as_a_string_is_refused() -> None:
    """What a mock says about its class does not count."""
    assert "a key is unittest.mock.Mock, not str" in refusal(dump, {Mock(spec=str): 1})


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
        == f"payload: {SAMPLES}.User cannot be turned into JSON (it raised AttributeError)"
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
    sources = [inspect.getsource(module) for module in (payload, _fit)]
    tree = ast.parse("\n".join(sources))
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    froms = {(n.level, n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {module for level, module in froms if level}
    theirs = names | {module for level, module in froms if not level}
    assert ours == {"errors", "_fit"}
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
