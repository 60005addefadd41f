"""What a long command says of itself."""

import io

from paceline.cli.stages import show_stages


def test_a_stage_is_one_line_where_nobody_looks(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with show_stages() as shown:
        shown.show("first", 0, 2)
        step = shown.within("second")
        step("a", 0, 2)
        step("b", 1, 2)
    assert stderr.getvalue() == "paceline: first\npaceline: second\n"
