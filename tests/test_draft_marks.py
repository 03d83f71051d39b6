"""cli/draft_marks.py: colours that can be read, marks that lose nothing, a legend that fits."""

import re
import sys
import types

import pytest
from rich.color import Color

from cli.draft_marks import ANSI_MARKS, TEXT_MARKS, draft_marks, print_legend
from cli.report import ACCEPTED, BONUS, CORRECTED, PLAIN_TOKEN


def luminance(red: int, green: int, blue: int) -> float:
    """As WCAG defines it."""
    parts = []
    for value in (red / 255, green / 255, blue / 255):
        parts.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("mark", ANSI_MARKS, ids=ANSI_MARKS._fields)
def test_colours_can_be_read_on_black_and_on_white(mark):
    """A contrast of 3.5 on both; a terminal's own blue has 1.9 on black."""
    number = re.search(r"38;5;(\d+)m", mark)[1]
    light = luminance(*Color.parse(f"color({number})").get_truecolor())
    contrasts = [(light + 0.05) / 0.05, 1.05 / (light + 0.05)]
    assert min(contrasts) >= 3.5
    blue = luminance(0, 0, 238)  # xterm's
    assert (blue + 0.05) / 0.05 < 2.6, "the control"


@pytest.mark.parametrize("marks", [ANSI_MARKS, TEXT_MARKS], ids=["terminal", "file"])
def test_a_rejected_control_character_is_shown_and_obeyed_by_no_terminal(marks):
    rejected = "".join(map(chr, range(32)))
    text = marks.marked("own", CORRECTED, [rejected[:9], rejected[9:]])
    symbols = text[len(marks.rejected.partition("{}")[0].replace("{{", "{")) :][:32]
    assert len({*symbols}) == 32 and symbols[10] == "↵"
    assert not any(ord(symbol) < 32 for symbol in symbols)
    assert text.endswith(marks.corrected.format("own"))


@pytest.mark.parametrize("marks", [ANSI_MARKS, TEXT_MARKS], ids=["terminal", "file"])
def test_tokens_that_were_not_drafted_have_no_marks(marks):
    for origin in (PLAIN_TOKEN, BONUS):
        assert marks.marked("{text}", origin, []) == "{text}"
    assert marks.marked("", ACCEPTED, []) == ""  # a part of a character
    assert "{text}" in marks.marked("{text}", ACCEPTED, [])


def test_colours_go_to_terminals_alone(monkeypatch, capsys):
    options = types.SimpleNamespace(output=types.SimpleNamespace(show_drafts=True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert draft_marks(options) is TEXT_MARKS  # capsys is no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert draft_marks(options) is ANSI_MARKS
    monkeypatch.setenv("NO_COLOR", "1")
    assert draft_marks(options) is TEXT_MARKS
    options.output.show_drafts = False
    assert draft_marks(options) is None
    print_legend(ANSI_MARKS)  # whose codes a log would keep
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_legend(ANSI_MARKS)
    assert "\x1b[9;38;5;244mdrafted and rejected\x1b[0m" in capsys.readouterr().err
