"""What the tests of payloads have in common: classes of an application, kind and hostile ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self
from uuid import UUID  # noqa: TC003 - pydantic and msgspec evaluate it

import msgspec
import pydantic
import pytest
from sqlalchemy import Column, Integer, MetaData, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, registry
from sqlmodel import Field, SQLModel

from sqlalchemy_jobs.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "s3cr3t-hunter2"  # noqa: S105 - must be in no message
HUGE = 2**70
SAMPLES = __name__


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
