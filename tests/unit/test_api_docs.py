"""docs/api.md says about each field what the code does."""

import re
from pathlib import Path

import pytest

from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.schema import ChatRequest, CompletionRequest

DOC = Path(__file__).parents[2] / "docs" / "api.md"
ROW = re.compile(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", re.MULTILINE)
FIELDS, MESSAGES = "Fields", "Anthropic's Messages API"


def documented(section: str, column: int) -> dict[str, str]:
    """Return the state of each field by a column of the table in a section."""
    (text,) = re.findall(
        rf"^## {section}\n(.*?)(?=^## )", DOC.read_text(), re.MULTILINE | re.DOTALL
    )
    rows = ROW.findall(text)
    states = {row[0]: row[1 + column] for row in rows}
    assert len(states) == len(rows), "a field has two rows"
    return {name: state for name, state in states.items() if state != "–"}


@pytest.mark.parametrize(
    ("section", "column", "kind"),
    [
        (FIELDS, 0, ChatRequest), (FIELDS, 1, CompletionRequest),
        (MESSAGES, 0, MessageRequest), (MESSAGES, 1, CountRequest),
    ],
)  # fmt: skip
def test_the_table_of_fields_is_that_of_the_code(section, column, kind):
    expected = dict.fromkeys(kind.__struct_fields__, "yes")
    expected |= dict.fromkeys(kind.neutral, "neutral") | dict.fromkeys(kind.noted, "noted")
    assert documented(section, column) == expected
