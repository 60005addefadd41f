"""docs/api.md says about each field what the code does."""

import re
from pathlib import Path

import pytest

from paceline.server.schema import INFORMATIONAL, ChatRequest, CompletionRequest

DOC = Path(__file__).parents[2] / "docs" / "api.md"
ROW = re.compile(r"^\| `(\w+)` \| (\S+) \| (\S+) \|")


def documented(column: int) -> dict[str, str]:
    rows = [ROW.match(line) for line in DOC.read_text().splitlines()]
    states = {row[1]: row[2 + column] for row in rows if row}
    assert len(states) == sum(row is not None for row in rows), "a field has two rows"
    return {name: state for name, state in states.items() if state != "–"}


@pytest.mark.parametrize(("column", "kind"), [(0, ChatRequest), (1, CompletionRequest)])
def test_the_table_of_fields_is_that_of_the_code(column, kind):
    expected = dict.fromkeys(kind.__struct_fields__, "yes")
    expected |= dict.fromkeys(kind.neutral, "neutral") | dict.fromkeys(INFORMATIONAL, "noted")
    assert documented(column) == expected
