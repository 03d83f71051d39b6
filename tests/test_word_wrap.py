"""cli/word_wrap.py: lines fit, breaks replace spaces alone, and pieces make no difference."""

import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.word_wrap import WordWrap, num_cells

WORDS = st.text(alphabet="abc 日本\n\U0001f436é", max_size=120)
WIDTHS = st.integers(min_value=4, max_value=40)


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join(wrap.feed(piece) for piece in pieces) + wrap.flush()


@given(st.lists(WORDS, max_size=12), WIDTHS)
def test_however_a_text_is_cut_its_lines_are_the_same(pieces, width):
    assert wrapped(pieces, width) == wrapped(["".join(pieces)], width)


@given(WORDS, WIDTHS)
def test_only_space_changes_and_only_into_line_breaks(text, width):
    result = wrapped([text], width)
    assert re.sub(r"\s", "", result) == re.sub(r"\s", "", text)
    lines = iter(result.split("\n"))
    for line in text.split("\n"):  # a line of the text is one or more lines of the result
        rest = line.lstrip(" ")
        while rest.strip():
            part = next(lines).strip(" ")
            assert part and rest.startswith(part)
            rest = rest[len(part) :].lstrip(" ")
        if not line.strip():
            next(lines)
    assert not list(lines)


@given(WORDS, WIDTHS)
def test_a_line_fits_unless_one_word_is_longer(text, width):
    for line in wrapped([text], width).split("\n"):
        assert num_cells(line.rstrip()) <= width or not re.search(r"\S\s+\S", line.strip())


def test_it_breaks_words_as_the_standard_library_does():
    text = "Once upon a time there was a little dog who liked to run in the park. " * 3
    for width in range(12, 60):
        assert wrapped([text.strip()], width) == textwrap.fill(text.strip(), width)


def test_colours_take_no_columns():
    code = "\x1b[38;5;33m"
    text = "one two three four five six"
    coloured = " ".join(f"{code}{word}\x1b[0m" for word in text.split())
    assert wrapped([coloured], 9).replace(code, "").replace("\x1b[0m", "") == wrapped([text], 9)


@pytest.mark.parametrize("text, cells", [("ab", 2), ("日本", 4), ("e\u0301", 1), ("\x1b[1mx", 1)])
def test_columns_of_characters(text, cells):
    assert num_cells(text) == cells
