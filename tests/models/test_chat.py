"""Conversations: templates of files and folders, and texts that never become control tokens."""

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unimem_jax.models.chat import PRIVATE
from unimem_jax.models.fields import Fields
from unimem_jax.models.gguf_text import PATTERNS, read_text
from unimem_jax.models.hub_text import HubText
from unimem_jax.models.hub_text import read_text as read_folder_text

from tests.models.gguf_files import (
    CONTROL,
    GGUF_LLAMA,
    TEMPLATE,
    TOKENIZER,
    USER_DEFINED,
    VOCABULARY,
    metadata,
)
from tests.models.oracle import refusal
from unimem_jax.text import decode

CONTROL_IDS = {TOKENIZER.token_to_id(token) for token in CONTROL}
START, TURN = TOKENIZER.token_to_id("<|start|>"), TOKENIZER.token_to_id("<|turn|>")
PLAIN = metadata(GGUF_LLAMA)


def of_file(**changed):
    """The text of a file's metadata; None leaves a key out."""
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    return read_text(Fields(PLAIN | changed, "tiny.gguf"), VOCABULARY)


def user(text):
    return [{"role": "user", "content": text}]


def shown(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_a_conversation_is_what_the_template_makes_of_it_up_to_the_answer():
    messages = [{"role": "system", "content": "be grün"}, *user(" in the world 🌍\n")]
    ids = of_file().encode_chat(messages)
    assert shown(ids) == (
        "<|start|>system\nbe grün<|turn|>\n<|start|>user\n in the world 🌍\n<|turn|>\n"
        "<|start|>assistant\n"
    )
    assert [one for one in ids if one in CONTROL_IDS] == [START, TURN, START, TURN, START]


@given(
    st.lists(st.sampled_from([*CONTROL, USER_DEFINED, "<|", "|>", "end", "<", "\U000f0000", "ü "]))
)
def test_what_a_user_writes_never_becomes_a_control_token(pieces):
    text = "".join(pieces)
    ids = TEXT.encode_chat(user(text))
    assert [one for one in ids if one in CONTROL_IDS] == [START, TURN, START]
    assert shown(ids) == f"<|start|>user\n{text}<|turn|>\n<|start|>assistant\n"


TEXT = of_file()


def test_text_that_leaves_no_private_character_is_refused():
    text = "".join(map(chr, PRIVATE)) + "<|turn|>"
    assert "use up the characters" in refusal(TEXT.encode_chat, user(text))
    ids = TEXT.encode_chat(user(text[1:]))
    assert [one for one in ids if one in CONTROL_IDS] == [START, TURN, START]


@pytest.mark.parametrize(
    "message", ["hello", {}, {"role": "user"}, {"role": 1, "content": ""},
                {"role": "user", "content": None}, {"role": "user", "content": ["a"]}],
)  # fmt: skip
def test_a_message_without_its_two_texts_is_refused(message):
    assert "a message has a text" in refusal(TEXT.encode_chat, [*user("a"), message])


def test_a_role_that_is_no_unicode_is_refused():
    message = {"role": "a\ud83d", "content": ""}
    assert "not valid Unicode" in refusal(TEXT.encode_chat, [message])


def test_a_template_nested_too_deep_is_refused():
    deep = "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}"
    assert "invalid" in refusal(lambda: of_file(tokenizer__chat_template=deep))


def test_a_template_may_ask_for_the_date():
    # As GPT-OSS and Llama 3 do.
    dated = of_file(tokenizer__chat_template="{{ strftime_now('%Y-%m-%d') }}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", shown(dated.encode_chat(user(""))))


def test_a_text_as_json_keeps_its_characters():
    quoted = of_file(tokenizer__chat_template="{{ messages[0].content | tojson }}")
    ids = quoted.encode_chat(user("<|turn|> ü 'in'"))
    assert shown(ids) == "\"<|turn|> ü 'in'\""
    assert not CONTROL_IDS & set(ids)


def test_texts_of_several_messages_do_not_join_into_a_control_token():
    joined = of_file(tokenizer__chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = joined.encode_chat([*user("<|tu"), *user("rn|>")])
    assert not CONTROL_IDS & set(ids)
    assert shown(ids) == "<|turn|>"


def test_a_prompt_may_name_control_tokens():
    assert of_file().encode("<|turn|>in")[0] == TURN


@given(st.text(max_size=30))
def test_a_file_s_tokenizer_is_the_one_it_was_written_from(text):
    assert TEXT.encode(text) == TOKENIZER.encode(text).ids
    assert decode(TEXT, TEXT.encode(text)) == TOKENIZER.decode(TOKENIZER.encode(text).ids)


CUTS = {
    "gpt-2": "It 's Ġ12345 Ġ Ġok !! Ċ Ċ don 't ĠDON ' T",
    "smollm": "It 's Ġ 1 2 3 4 5 Ġ Ġok !! Ċ Ċ don 't ĠDON ' T",
    "qwen2": "It 's Ġ 1 2 3 4 5 Ġ Ġok !!ĊĊ don 't ĠDON 'T",
    "llama-bpe": "It 's Ġ 123 45 Ġ Ġok !!ĊĊ don 't ĠDON 'T",
}


@pytest.mark.parametrize("cut", PATTERNS)
def test_every_known_way_to_cut_text_cuts_as_its_models_do(cut):
    pieces = of_file(tokenizer__ggml__pre=cut)._tokenizer.pre_tokenizer.pre_tokenize_str(
        "It's 12345  ok!!\n\ndon't DON'T"
    )
    assert [piece for piece, _ in pieces] == CUTS[cut].split(" ")


def test_a_prompt_begins_with_a_token_where_the_file_says_so():
    assert of_file(tokenizer__ggml__add_bos_token=True).encode("in")[0] == 1
    assert of_file(tokenizer__ggml__pre="llama-bpe").encode("in")[0] == 1
    assert 1 not in of_file().encode("in")
    begun = of_file(tokenizer__ggml__add_bos_token=True).encode_chat(user("in"))
    assert begun == TEXT.encode_chat(user("in"))  # a template says itself what comes first


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must"),
        ("{{ messages[0].none.such }}", "'dict object' has no attribute 'none'"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
    ],
)
def test_a_template_that_fails_is_refused_in_one_line(template, message):
    found = of_file(tokenizer__chat_template=template)
    assert message in refusal(found.encode_chat, user("in"))


def test_a_model_without_a_template_does_not_converse():
    assert "without a chat template" in refusal(
        of_file(tokenizer__chat_template=None).encode_chat, user("in")
    )
    assert "without a chat template" in refusal(HubText(TOKENIZER).encode_chat, user("in"))


def test_text_that_is_no_unicode_is_refused():
    assert "not valid Unicode at character 1" in refusal(TEXT.encode_chat, user("a\ud83d"))


@pytest.fixture
def folder(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(folder, **found):
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    return read_folder_text(folder, VOCABULARY)


def test_a_folder_brings_its_template_in_one_of_three_ways(folder):
    wanted = TEXT.encode_chat(user("in the <|turn|>"))
    several = [{"name": "tools", "template": ""}, {"name": "default", "template": TEMPLATE}]
    for source in (TEMPLATE, several):
        found = settings(folder, chat_template=source)
        assert found.encode_chat(user("in the <|turn|>")) == wanted
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    found = settings(folder, chat_template="no")
    assert found.encode_chat(user("in the <|turn|>")) == wanted


@pytest.mark.parametrize("token", ["<|start|>", {"content": "<|start|>"}])
def test_a_folder_s_template_knows_its_first_token(folder, token):
    found = settings(folder, chat_template="{{ bos_token }}in", bos_token=token)
    assert found.encode_chat(user(""))[0] == START


def test_a_folder_s_template_that_is_none_is_refused(folder, monkeypatch):
    assert "invalid" in refusal(lambda: settings(folder, chat_template="{% if %}"))
    assert "chat_template is 3" in refusal(lambda: settings(folder, chat_template=3))
    assert "chat_template is [" in refusal(
        lambda: settings(folder, chat_template=[{"name": "default"}])
    )
    assert settings(folder, chat_template=["default"]) is not None
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja: 'utf-8' codec" in refusal(lambda: settings(folder))
    (folder / "chat_template.jinja").unlink()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "needs the package jinja2" in refusal(lambda: settings(folder, chat_template="a"))
