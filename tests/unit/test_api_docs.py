"""docs/api.md says about each field what the code does."""

import re
from pathlib import Path

import pytest

from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.responses.schema import ResponseRequest
from paceline.server.schema import ChatRequest, CompletionRequest

DOC = Path(__file__).parents[2] / "docs" / "api.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*)$", re.MULTILINE)
FIELDS, RESPONSES, MESSAGES = "Fields", "The Responses API", "Anthropic's Messages API"


def documented(section: str, column: int) -> dict[str, str]:
    """Return the state of each field by a column of the table in a section."""
    (text,) = re.findall(rf"(?ms)^## {section}\n(.*?)(?=^## )", DOC.read_text())
    rows = [(name, cells.split("|")[column].strip()) for name, cells in ROW.findall(text)]
    assert len(dict(rows)) == len(rows), "a field has two rows"
    return {name: state for name, state in rows if state != "–"}


@pytest.mark.parametrize(
    ("section", "column", "kind"),
    [
        (FIELDS, 0, ChatRequest), (FIELDS, 1, CompletionRequest),
        (RESPONSES, 0, ResponseRequest),
        (MESSAGES, 0, MessageRequest), (MESSAGES, 1, CountRequest),
    ],
)  # fmt: skip
def test_the_table_of_fields_is_that_of_the_code(section, column, kind):
    expected = dict.fromkeys(kind.__struct_fields__, "yes")
    expected |= dict.fromkeys(kind.neutral, "neutral") | dict.fromkeys(kind.noted, "noted")
    assert documented(section, column) == expected
