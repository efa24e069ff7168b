"""Text from tokens: bytes, pieces of a stream, and stop texts over token boundaries."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unimem_jax.errors import UsageError
from unimem_jax.text import ByteText, StopText, decode


@st.composite
def cut(draw, items):
    """A sequence and the same sequence in consecutive parts, some of them empty."""
    whole = draw(items)
    marks = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    edges = [0, *marks, len(whole)]
    return whole, [whole[a:b] for a, b in itertools.pairwise(edges)]


BYTES = st.binary(max_size=30) | st.text(max_size=12).map(str.encode)


@given(cut(BYTES))
def test_pieces_of_any_bytes_join_to_the_decoding_of_all(parted):
    whole, parts = parted
    stream = ByteText().stream()
    pieces = [stream.push(part) for part in parts] + [stream.end()]
    assert "".join(pieces) == whole.decode("utf-8", "replace")
    assert decode(ByteText(), whole) == whole.decode("utf-8", "replace")


@given(cut(st.text(max_size=12).map(str.encode)))
def test_a_piece_of_a_whole_text_never_holds_a_broken_character(parted):
    whole, parts = parted
    stream = ByteText().stream()
    pieces = [stream.push(part) for part in parts]
    assert "�" not in "".join(pieces) or "�" in whole.decode()
    assert stream.end() == ""


def test_a_text_becomes_the_start_token_and_its_bytes():
    assert ByteText(0).encode("hé") == [0, 104, 0xC3, 0xA9]
    assert ByteText().encode("a") == [97]


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UsageError, match="not valid Unicode at character 2"):
        ByteText(0).encode("ab\udcff")


def test_an_id_that_is_no_byte_becomes_the_replacement_character():
    assert decode(ByteText(), [104, 300, 105, -1]) == "h�i�"


def cut_by_twin(text, stops):
    """The text before the stop that is complete after the fewest characters: tried one by one."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


SMALL = st.text(alphabet="ab", max_size=14)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


@given(cut(SMALL), STOPS)
@example(("abab", ["abab"]), ["bab", "a"])  # one stop begins first, another is complete first
@example(("baab", ["ba", "ab"]), ["baab", "aa"])
def test_a_text_ends_before_the_first_stop_however_it_is_cut(parted, stops):
    whole, parts = parted
    wanted, is_found = cut_by_twin(whole, stops)
    stop = StopText(stops)
    pieces = []
    for part in parts:
        pieces.append(stop.push(part))
        # What was given out is never taken back.
        assert wanted.startswith("".join(pieces))
    assert stop.is_found == is_found
    pieces.append(stop.end())
    assert "".join(pieces) == wanted


@given(SMALL, STOPS)
def test_no_more_is_held_back_than_a_stop_could_need(text, stops):
    stop = StopText(stops)
    given_out = "".join(stop.push(character) for character in text)
    if not stop.is_found:
        assert len(text) - len(given_out) < max(map(len, stops), default=1)
