"""Tokenizers of hub folders: a stream's text, however it is cut, and files that are refused."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unimem_jax.models import qwen3
from unimem_jax.models.hub_text import HubText, read_text

from tests.models.oracle import refusal, write_folder
from tests.models.qwen_twin import QWEN3, random_tensors
from unimem_jax.text import decode

tokenizers = pytest.importorskip("tokenizers", reason="of the extra `text`")
TRAINED_ON = ["In the beginning was the word, grün 🌍🌎 über alles 日本語 日本 ☃"] * 4
BROKEN = "\N{REPLACEMENT CHARACTER}"


def byte_level():
    """Merges over bytes, as Qwen has: a character may lie in several tokens."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator(TRAINED_ON, trainer)
    return found


def spaced():
    """Pieces that begin with a space, as Llama has; the first space of a text is left out."""
    from tokenizers import decoders, models, pre_tokenizers

    pieces = {f"▁{word}": at for at, word in enumerate(("in", "the", "world"))}
    found = tokenizers.Tokenizer(models.WordLevel(pieces | {"ly": 3}, unk_token="ly"))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return found


BYTES, SPACED = byte_level(), spaced()
VOCABULARY = BYTES.get_vocab_size()


@pytest.fixture
def folder(tmp_path):
    BYTES.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.text(max_size=40))
def test_text_comes_back_whole(text):
    found = HubText(BYTES)
    assert decode(found, found.encode(text)) == text


@given(st.lists(st.integers(0, VOCABULARY + 3)), st.data())
def test_a_stream_is_the_decoding_of_all_its_tokens_however_it_is_cut(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    stream = HubText(BYTES).stream()
    pieces = [stream.push(ids[:cut]), stream.push(ids[cut:]), stream.end()]
    assert "".join(pieces) == BYTES.decode(ids)


@given(st.lists(st.integers(0, 3), max_size=8))
def test_spaces_between_tokens_survive_streaming(ids):
    stream = HubText(SPACED).stream()
    assert "".join([*map(stream.push, ([i] for i in ids)), stream.end()]) == SPACED.decode(ids)


@given(st.text(alphabet="🌍日ü☃a", max_size=12))
def test_no_piece_holds_part_of_a_character(text):
    found = HubText(BYTES)
    stream = found.stream()
    pieces = [stream.push([token]) for token in found.encode(text)]
    assert BROKEN not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.end() == ""


def test_a_character_left_incomplete_is_marked_at_the_end():
    found = HubText(BYTES)
    stream = found.stream()
    (*known, _) = found.encode("a🦙")
    assert stream.push(known) == "a"
    assert stream.end() == BROKEN


def test_special_tokens_are_not_text():
    end = BYTES.token_to_id("<|end|>")
    assert HubText(BYTES).stream().push([end, *BYTES.encode("a").ids, end]) == "a"


def test_text_that_is_no_unicode_is_refused():
    assert "not valid Unicode at character 1" in refusal(HubText(BYTES).encode, "a\ud83d")


def test_a_model_brings_the_tokenizer_of_its_folder(folder):
    config = {**QWEN3, "vocab_size": VOCABULARY}
    _, _, text = qwen3.load(write_folder(folder, config, random_tensors(config, 0)))
    assert decode(text, text.encode("in the 世界")) == "in the 世界"


def test_a_folder_without_the_file_or_a_place_without_the_package_has_none(folder, monkeypatch):
    assert read_text(folder / "..", VOCABULARY) is None
    assert read_text(folder, VOCABULARY) is not None
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert read_text(folder, VOCABULARY) is None


def test_a_prompt_is_neither_cut_nor_filled_up_as_in_training(folder):
    trained = tokenizers.Tokenizer.from_str(BYTES.to_str())
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    trained.save(str(folder / "tokenizer.json"))
    prompt = "In the beginning was the word"
    assert read_text(folder, VOCABULARY).encode(prompt) == BYTES.encode(prompt).ids


def test_token_ids_beyond_the_vocabulary_are_refused(folder):
    message = refusal(read_text, folder, VOCABULARY - 1)
    assert f"token id {VOCABULARY - 1}, but the model's vocabulary is {VOCABULARY - 1}" in message


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    assert "is not a readable tokenizer" in refusal(read_text, folder, VOCABULARY)
