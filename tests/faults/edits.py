"""What a hand may have written into a row, as SQL expressions by column, for both databases.

What a constraint refuses is here too: a table of somebody else's may lack the constraint, and the
insert that is refused shows that ours does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Mapping

Row: TypeAlias = dict[str, str]
"""The SQL of the columns of a row that are not what the queue would have written."""

_JSON = ["'null'", "'\"text\"'", "'[]'", "'17'", '\'{"a": "x"}\'', "'{\"b\": 1}'", "'{}'"]

ON_POSTGRES: dict[str, list[str]] = {
    "task": ["'nobody knows'", "''", "repeat('x', 201)"],
    "payload": [
        *_JSON,
        "CAST(repeat('[', 2000) || repeat(']', 2000) AS jsonb)",
        "CAST('1' || repeat('0', 5000) AS jsonb)",
        "NULL",
    ],
    "meta": [*_JSON, "CAST(repeat('[', 2000) || repeat(']', 2000) AS jsonb)"],
    "errors": [
        *_JSON,
        "'[1, null, \"x\"]'",
        "(SELECT jsonb_agg(n) FROM generate_series(1, 30) AS n)",
        "NULL",
    ],
    "attempts": ["1", "3", "4", "2147483646", "2147483647", "-1"],
    "max_attempts": ["NULL", "0", "-5", "1", "2147483647"],
    "timeout_s": ["'NaN'", "'Infinity'", "'-Infinity'", "-1", "0", "1e-30", "3e38"],
    "priority": ["-2", "2", "3", "-32768"],
    "run_at": ["'infinity'", "'-infinity'", "'4713-01-01 BC'", "'294276-12-31'", "NULL"],
    "started_at": ["'infinity'", "'-infinity'"],
    "created_at": ["'infinity'", "'-infinity'"],
    "updated_at": ["'infinity'", "'-infinity'", "'4713-01-01 BC'"],
    "last_error": ["''", "repeat('x', 1000000)"],
    "status": ["'weird'", "'Pending'", "''", "NULL", "'failed'", "'succeeded'", "'cancelled'"],
    "idempotency_key": ["''", "'k'", "repeat('x', 256)"],
}
LEASES_ON_POSTGRES = ["'-infinity'", "'4713-01-01 BC'", "'epoch'", "'infinity'", "now()", "NULL"]

ON_SQLITE: dict[str, list[str]] = {
    "task": ["'nobody knows'", "''", "x'74'", "17"],
    "payload": [*_JSON, "'not json'", "''", "17", "1.5", "9e999", "x'00ff'", "x'7b7d'", "NULL"],
    "meta": [*_JSON, "'not json'", "''", "17", "x'00ff'"],
    "errors": [*_JSON, "'not json'", "''", "17", "x'00ff'", "x'5b5d'", "'[1, null]'", "NULL"],
    "attempts": ["1", "3", "4", "'many'", "1.5", "x'31'", "9223372036854775807", "-1"],
    "max_attempts": ["NULL", "0", "-5", "'many'", "1.5", "x'31'", "1e300", "9223372036854775807"],
    "timeout_s": ["'soon'", "-1", "0", "1e-30", "9e999", "-9e999", "x'00'"],
    "priority": ["-2", "2", "3", "1.5", "'high'", "x'00'"],
    "run_at": ["'infinity'", "''", "'2001-01-01'", "17", "x'00ff'", "'9999-99-99'", "NULL"],
    "started_at": ["'never'", "17", "x'00ff'"],
    "created_at": ["'never'", "17", "x'00ff'"],
    "updated_at": ["'never'", "17", "x'00ff'"],
    "last_error": ["''", "17", "x'00ff'"],
    "status": ["'weird'", "'Pending'", "''", "NULL", "17", "'failed'", "'succeeded'"],
    "idempotency_key": ["''", "'k'", "17", "x'00ff'"],
}
LEASES_ON_SQLITE = ["'2001-01-01'", "''", "17", "'never'", "x'00ff'", "NULL"]


def edited_rows(columns: Mapping[str, list[str]], leases: list[str]) -> st.SearchStrategy[Row]:
    """Draw rows with a few odd columns, some of them as if a worker had died with them."""
    edits = st.lists(
        st.sampled_from([(name, sql) for name, odd in columns.items() for sql in odd]),
        min_size=1,
        max_size=4,
        unique_by=lambda edit: edit[0],
    ).map(dict)
    running = st.sampled_from(leases).map(
        lambda until: {
            "status": "'running'",
            "locked_by": "'a worker of old'",
            "lease_expires_at": until,
        }
    )
    return edits | st.builds(lambda edit, lease: edit | lease, edits, running)
