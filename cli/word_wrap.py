"""Word wrap for a text that comes in pieces.

WordWrap        pieces -> the same text, broken at words to fit a terminal's width
num_cells       the columns of a terminal that a text takes

A word is held back until the next one begins, because only then is its width known. Scripts without
spaces, such as Chinese, break between any two characters.
"""

import re
import unicodedata

# East Asian scripts and emoji, which a line may break between.
WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60"
    "\U0001f300-\U0003ffff"
)
# A line break, a word with the space in front of it, or space that ends a line.
PARTS = re.compile(rf"\n|[^\S\n]*(?:[{WIDE}]|[^\s{WIDE}]+)|[^\S\n]+")
ESCAPES = re.compile("\x1b\\[[0-9;]*m")  # a terminal's codes for colours
CELLS = {"W": 2, "F": 2}  # by East Asian width; all others take one


def num_cells(text: str) -> int:
    """The columns that a text takes: none a colour, or a mark that joins the character before."""
    characters = ESCAPES.sub("", text)
    marks = [c for c in characters if unicodedata.category(c) in ("Mn", "Me", "Cf")]
    cells = sum(CELLS.get(unicodedata.east_asian_width(c), 1) for c in characters)
    return cells - len(marks)


class WordWrap:
    """Breaks lines longer than `width` columns at spaces, which the break replaces. A word that is
    longer than a line stays whole: the terminal breaks it."""

    def __init__(self, width: int):
        self.width = width
        self.column = 0
        self.rest = ""  # a part that the next piece may continue

    def feed(self, text: str) -> str:
        """What may be written now that this piece has come."""
        *parts, self.rest = PARTS.findall(self.rest + text) or [""]
        return "".join(map(self.place, parts))

    def flush(self) -> str:
        """What waited, at the end of the text."""
        rest = self.rest
        self.rest = ""
        return self.place(rest)

    def place(self, part: str) -> str:
        """A part, on a new line if it does not fit on this one."""
        word = part.lstrip()
        if part == "\n":
            self.column = 0
            return part
        begin = self.column
        self.column += num_cells(part.expandtabs())
        if begin and word and self.column > self.width:
            self.column = num_cells(word)
            return "\n" + word
        return part
