"""Which cases of a parametrization `make test` runs; `make test-exhaustive` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def short(keep: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, marked `exhaustive` but for those in `keep`.

    `keep` names cases by their place, or those that are text by themselves.
    """
    parameters = []
    for place, case in enumerate(cases):
        values, marks = (case if isinstance(case, tuple) else (case,)), []
        if isinstance(case, type(pytest.param())):
            values, marks = case.values, [*case.marks]
        if place not in keep and not (isinstance(case, str) and case in keep):
            marks.append(pytest.mark.exhaustive)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
