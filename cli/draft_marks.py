"""--show_drafts: how a text shows which of its tokens were drafted, and what the draft had where it
was wrong.

DraftMarks      the marks of accepted, rejected and corrected tokens
draft_marks     the marks for this run's stdout, if it asks for them
print_legend    one line on stderr that explains them
"""

import os
import sys
from typing import NamedTuple

from cli.exits import print_status
from cli.options import Options
from cli.report import ACCEPTED, CORRECTED

END = "\033[0m"
# A rejected line break breaks no line: control characters become the symbols that stand for them.
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32)} | {ord("\n"): "↵"}


class DraftMarks(NamedTuple):
    """A form for the text of each sort of token. A rejected token stands in front of the one that
    corrects it, and so do the drafted tokens behind it, which went with it."""

    accepted: str
    rejected: str
    corrected: str

    def marked(self, text: str, origin: str, rejected: list[str]) -> str:
        """A token's text with its marks."""
        if origin == ACCEPTED and text:
            return self.accepted.format(text)
        if origin == CORRECTED:
            crossed_out = "".join(rejected).translate(CONTROL_PICTURES)
            return self.rejected.format(crossed_out) + self.corrected.format(text)
        return text


# Blue 33 and red 196 of the 256 colours can be read on black and on white, unlike a terminal's own
# blue and red; without colours, the strike and the bold type still tell which is which.
ANSI_MARKS = DraftMarks(
    f"\033[38;5;33m{{}}{END}", f"\033[9;38;5;244m{{}}{END}", f"\033[1;38;5;196m{{}}{END}"
)
# CriticMarkup's highlight and substitution, for files, pipes and NO_COLOR.
TEXT_MARKS = DraftMarks("{{=={}==}}", "{{~~{}~>", "{}~~}}")


def draft_marks(options: Options) -> DraftMarks | None:
    if not options.output.show_drafts:
        return None
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return ANSI_MARKS if has_colours else TEXT_MARKS


def print_legend(marks: DraftMarks) -> None:
    """Explain the marks on stderr. Colour codes go to a terminal alone."""
    if marks is ANSI_MARKS and not sys.stderr.isatty():
        return
    accepted = marks.accepted.format("drafted and accepted")
    corrected = marks.marked("the model's own", CORRECTED, ["drafted and rejected"])
    print_status(f"{accepted}, {corrected}, neither: not drafted")
