"""decoding/stop_strings.py: text up to the first stop string, however it arrives."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.stop_strings import StopStrings
from loading.tokenizer import load_tokenizer


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=500)
def test_stop_strings_cut_exactly_however_text_arrives(text, stops, size):
    """Fed in pieces of any size: what comes out is the text before the stop string that begins
    earliest, whichever is complete first."""
    starts = [text.find(stop) for stop in stops if stop in text]
    want = (text[: min(starts)], True) if starts else (text, False)
    for step in (1, size):
        stream, out = StopStrings(stops), ""
        for i in range(0, len(text), step):
            out += stream.feed(text[i : i + step])
            assert want[0].startswith(out)
            if stream.stopped:
                break
        out += stream.flush()
        assert (out, stream.stopped) == want


def test_a_stop_string_that_began_earlier_wins_and_one_that_breaks_off_does_not():
    # the last: no more text comes
    for text, out in (("xabcd", "x"), ("xabce", "xa"), ("xabc", "xa")):
        stops = StopStrings(["abcd", "b"])
        pieces = [stops.feed(char) for char in text]
        assert "".join(pieces) + stops.flush() == out and stops.stopped


def test_a_long_stop_string_costs_no_more_than_the_text_that_waits():
    stops, begin = StopStrings(["x" * 300_000]), time.perf_counter()
    assert "".join(stops.feed("a xx") for _ in range(100)) + stops.flush() == "a xx" * 100
    assert time.perf_counter() - begin < 1


def test_empty_stop_strings_are_ignored():
    for empty in ([], [""], ["", ""]):
        stops = StopStrings(empty)
        assert stops.feed("a x") + stops.flush() == "a x" and not stops.stopped
    stops = StopStrings(["", "x", ""])
    assert stops.feed("a x") == "a " and stops.stopped


def test_a_visible_special_token_stays_in_the_text(sp_folder):
    """Where a parser reads marks, one that also stands in a stop string is no less a mark."""
    tokenizer = load_tokenizer(sp_folder)
    cat, dog = (tokenizer.encode(text, bos=False) for text in ("cat", "dog"))
    stream = tokenizer.stream(visible=["<s>"])
    stops = StopStrings(["<s> dog"], tokenizer.specials)
    texts = [stops.feed_token(id, stream, is_last=False) for id in (*cat, 1, *cat, 1, *dog)]
    assert "".join(texts) + stops.flush() == "cat<s> cat" and stops.stopped


def test_bytes_before_a_visible_token_are_not_its_own():
    """Half a character is released with the token behind it, and may wait with an equal one."""

    class Stream:
        texts = iter(["", "\N{REPLACEMENT CHARACTER}<s>", "<s>", "x"])

        def feed(self, id: int) -> str:
            return next(self.texts)

    stream = Stream()
    stops = StopStrings(["<s><s><s>y"], {"<s>": 1})
    text = "".join(stops.feed_token(id, stream, is_last=False) for id in (7, 1, 1, 8))
    assert text + stops.flush() == "\N{REPLACEMENT CHARACTER}<s><s>x"


def test_a_stop_string_that_names_special_tokens_ends_at_them(sp_folder):
    """They have no text. Among other characters the name matches in order; a part of a name does
    not match the token, and a text that spells the name is a text as before."""
    tokenizer = load_tokenizer(sp_folder)
    cat, dog, bos, eos = (*(tokenizer.encode(text, bos=False) for text in ("cat", "dog")), [1], [2])
    spelled = tokenizer.encode("cat<s>dog", bos=False)
    for stops, ids, last_ids, text, num_tokens in (
        (["<s>"], cat + bos + dog, {}, "cat", len(cat) + 1),
        (["cat<s>"], dog + cat + bos + dog, {}, "dog ", len(dog + cat) + 1),
        (["t<s></s> d"], cat + bos + eos + dog, {}, "ca", len(cat) + 3),
        (["</s><s>"], cat + bos + eos + bos + dog, {}, "cat", len(cat) + 3),
        (["cat</s>"], cat + eos, {2}, "", len(cat) + 1),  # with a token that ends the answer
        (["s>", "<", "<s>x", "</s>"], cat + bos + dog, {}, "cat dog", None),
        (["<s> d", "og"], cat + bos + cat + bos + dog, {}, "cat cat", len(cat + cat) + 3),
        (["<s>"], spelled, {}, "cat", None),
    ):
        filter, stream, pieces, num_fed = (
            StopStrings(stops, tokenizer.specials),
            tokenizer.stream(),
            [],
            0,
        )
        for id in ids:
            if not filter.stopped:
                pieces.append(filter.feed_token(id, stream, is_last=id in last_ids))
                num_fed += 1
        pieces.append(filter.feed(stream.flush()) + filter.flush())
        assert "".join(pieces) == text, stops
        if num_tokens is not None:
            assert (filter.stopped, num_fed) == (True, num_tokens), stops
