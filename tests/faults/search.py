"""How the tests that draw whole batches of jobs search.

`SQLALCHEMY_JOBS_EXAMPLES=200` searches longer, with `-o timeout=0` for pytest.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = int(os.environ.get("SQLALCHEMY_JOBS_EXAMPLES", "5"))
"""Each is of a few dozen jobs, which one worker runs."""

SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    report_multiple_bugs=False,
    # To shrink would take a worker a step; what fails is named by itself.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
