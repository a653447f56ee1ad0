"""The revisions, oldest first. Alembic reads the folder; everybody else reads ``CHAIN``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import jobs_0001

if TYPE_CHECKING:
    from types import ModuleType

CHAIN: Final[tuple[ModuleType, ...]] = (jobs_0001,)
