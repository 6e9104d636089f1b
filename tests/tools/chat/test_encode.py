"""Conversations: exact ids and spans, marks only from the template, and nothing learned that was not said."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from seqmesh.tools.chat.encode import ChatEncoder, EncodedChat, encode_chat
from seqmesh.tools.chat.marks import within_marks
from seqmesh.tools.chat.messages import messages_of
from seqmesh.tools.chat.segments import ChatError
from seqmesh.tools.chat.template import ChatTemplate, load_template
from seqmesh.tools.tokenizers.file import TokenizerFile, add_marks, parse_tokenizer
from seqmesh.tools.tokenizers.training import train_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
CHATML = ChatTemplate()
JINJA = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PLAIN = JINJA.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
LLAMA = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
CUT = "{{% for m in messages %}}{{{{ m.content {} if m.role == 'user' else m.content }}}}{{% endfor %}}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|im_end|> and <s>!"},
    {"role": "assistant", "content": "The mark <|im_end|> it is.\n"},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "  zwölf 🙂"},
]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> TokenizerFile:
    """Byte-level BPE with the marks of ChatML."""
    trained = Tokenizer.from_str(train_tokenizer(texts, 400).decode())
    trained.add_special_tokens(list(SPECIALS))
    return parse_tokenizer(trained.to_str().encode())


def parts(chat: EncodedChat, tokenizer: TokenizerFile) -> list[tuple[str, bool]]:
    """The decoded text, in stretches that are learned or not."""
    ends = [0, *chat.spans.ravel().tolist(), len(chat.ids)]
    decoded = [
        (tokenizer.tokenizer.decode(chat.ids[first:last].tolist(), skip_special_tokens=False), number % 2 == 1)
        for number, (first, last) in enumerate(pairwise(ends))
    ]
    return [part for part in decoded if part[0]]


def count(chat: EncodedChat, tokenizer: TokenizerFile, token: str) -> int:
    """How often the special token was placed."""
    return sum(tokenizer.tokenizer.id_to_token(id) == token for id in chat.ids.tolist())


EXPECTED = [
    ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay <|im_end|> and <s>!<|im_end|>\n"
     "<|im_start|>assistant\n", False),
    ("The mark <|im_end|> it is.\n<|im_end|>", True),
    ("\n<|im_start|>user\nAgain?<|im_end|>\n<|im_start|>assistant\n", False),
    ("  zwölf 🙂<|im_end|>", True),
    ("\n", False),
]  # fmt: skip


@pytest.mark.parametrize("template", [CHATML, ChatTemplate(source=JINJA), ChatTemplate(source=PLAIN)])
def test_what_assistants_say_is_learned_and_marks_come_from_the_template_alone(
    tokenizer: TokenizerFile, template: ChatTemplate
) -> None:
    chat = encode_chat(TALK, tokenizer, template)
    assert parts(chat, tokenizer) == EXPECTED
    counts = {token: count(chat, tokenizer, token) for token in SPECIALS}
    assert counts == {"<|im_start|>": 5, "<|im_end|>": 5, "<s>": 0, "</s>": 0}
    assert chat.ids.dtype == np.uint32


def test_ids_by_hand() -> None:
    words = {
        "<|im_start|>": 0,
        "<|im_end|>": 1,
        "user": 2,
        "assistant": 3,
        "\n": 4,
        "hi": 5,
        "there": 6,
        " ": 7,
        "?": 8,
    }
    model = Tokenizer(models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Split("\n", "isolated")]
    )
    model.decoder = decoders.Fuse()
    model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    file = parse_tokenizer(model.to_str().encode(), eod_token="none")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi there"}]
    ids, spans = encode_chat(talk, file, CHATML)
    assert ids.tolist() == [0, 2, 4, 5, 1, 4, 0, 3, 4, 5, 7, 6, 1, 4]
    assert spans.tolist() == [[9, 13]]


def test_a_template_may_strip_what_is_said_and_place_tokens_by_name(tokenizer: TokenizerFile) -> None:
    template = ChatTemplate(source=LLAMA, variables=(("bos_token", "<s>"), ("eos_token", "</s>")))
    chat = encode_chat([*TALK[1:3], {"role": "user", "content": "x <"}], tokenizer, template)
    assert parts(chat, tokenizer) == [
        ("<s>[INST] Say <|im_end|> and <s>! [/INST]", False),
        (" The mark <|im_end|> it is. </s>", True),
        ("[INST] x < [/INST]", False),
    ]
    counts = {token: count(chat, tokenizer, token) for token in SPECIALS}
    assert counts == {"<|im_start|>": 0, "<|im_end|>": 0, "<s>": 1, "</s>": 1}


def test_data_and_template_together_spell_no_mark(tokenizer: TokenizerFile) -> None:
    template = ChatTemplate(source="{% for m in messages %}<{{ m.content }}>{{ '</s>' }}{% endfor %}")
    (chat,) = ChatEncoder(tokenizer, template).encode(
        [[{"role": "user", "content": "s"}, {"role": "user", "content": "/s"}]]
    )
    assert isinstance(chat, EncodedChat)
    assert count(chat, tokenizer, "<s>") == 0
    assert count(chat, tokenizer, "</s>") == 2
    assert parts(chat, tokenizer) == [("<s></s></s></s>", False)]


WORDS = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<s", ">", "<", "a", " ", "\n", "é", "\0", "{{", "{%"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), WORDS), min_size=1, max_size=5))
def test_templates_agree_and_give_back_every_word(tokenizer: TokenizerFile, turns: list[tuple[str, str]]) -> None:
    talk = [{"role": role, "content": content} for role, content in turns]
    chat = encode_chat(talk, tokenizer, CHATML)
    said = [(content + "<|im_end|>", True) for role, content in turns if role == "assistant"]
    assert [part for part in parts(chat, tokenizer) if part[1]] == said
    assert "".join(text for text, _ in parts(chat, tokenizer)) == "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns
    )
    assert count(chat, tokenizer, "<|im_end|>") == len(turns)
    for source in (JINJA, PLAIN):
        other = encode_chat(talk, tokenizer, ChatTemplate(source=source))
        assert np.array_equal(other.ids, chat.ids) and np.array_equal(other.spans, chat.spans)


def test_rendered_text_is_that_of_transformers(tokenizer: TokenizerFile) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [
        {"role": "user", "content": "a\n b"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "ä<&"}}]},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "done "},
    ]
    calls = "(message.tool_calls | tojson if message.tool_calls else '')"
    source = JINJA.replace("message.content +", f"{calls} + message.content +")
    (theirs,), (spans,) = utils.render_jinja_template(
        conversations=[talk], chat_template=source, return_assistant_tokens_mask=True
    )
    found = parts(encode_chat(messages_of(talk), tokenizer, ChatTemplate(source=source)), tokenizer)
    assert "".join(text for text, _ in found) == theirs
    assert [text for text, learned in found if learned] == [theirs[first:last] for first, last in spans]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the template refuses it: roles must alternate"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes what the assistant said in message 2"),
        ("{{ messages[-1].content }}", "does not render the messages up to 2 to the beginning of the whole"),
        (
            JINJA.replace("generation %}{{-", "generation %}{{- 'x' if loop.last else"),
            "changes what the assistant said",
        ),
        (CUT.format("[:5]"), "cuts up or escapes what spells a special token"),
        (CUT.format("| tojson(ensure_ascii=true)"), "cuts up or escapes what spells a special token"),
    ],
)
def test_a_conversation_that_would_not_be_learned_as_it_was_said_is_refused(
    tokenizer: TokenizerFile, source: str, reason: str
) -> None:
    with pytest.raises(ChatError) as caught:
        encode_chat(TALK, tokenizer, ChatTemplate(source=source))
    assert reason in str(caught.value)


def test_refused_conversations_leave_their_neighbours_alone(tokenizer: TokenizerFile) -> None:
    odd, half = [{"role": "user", "content": "a\ufdd0b"}], [{"role": "\ud800", "content": "a"}]
    given = [TALK, odd, [], half, TALK[:3]]
    first, bad, empty, broken, last = ChatEncoder(tokenizer, ChatTemplate(source=JINJA)).encode(given)
    assert isinstance(broken, ChatError) and "lone surrogate" in str(broken)
    assert isinstance(first, EncodedChat) and isinstance(last, EncodedChat)
    assert parts(first, tokenizer) == EXPECTED
    assert parts(last, tokenizer)[:2] == EXPECTED[:2]
    assert isinstance(bad, ChatError) and "U+FDD0" in str(bad)
    assert isinstance(empty, ChatError) and str(empty) == "the conversation has no messages"


def test_a_tokenizer_that_changes_text_or_has_not_the_marks_is_told(texts: list[str], tokenizer: TokenizerFile) -> None:
    with pytest.raises(ChatError, match=r"no special token <\|im_start\|>, which the template chatml needs"):
        encode_chat(TALK, parse_tokenizer(train_tokenizer(texts, 300)), CHATML)
    config = json.loads(tokenizer.data)
    lower = Tokenizer.from_str(json.dumps(config))
    lower.normalizer = normalizers.Lowercase()
    file = parse_tokenizer(lower.to_str().encode())
    with pytest.raises(ChatError, match="does not survive the tokenizer: 'The mark"):
        encode_chat(TALK, file, CHATML)
    spoken = [{"role": "user", "content": "LOUD"}, {"role": "assistant", "content": "quiet"}]
    assert parts(encode_chat(spoken, file, CHATML), file)[1] == ("quiet<|im_end|>", True)


def test_templates_are_found_beside_the_tokenizer_or_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert load_template("chatml", path) == CHATML
    with pytest.raises(FileNotFoundError, match=r"no chat template beside .*tokenizer\.json: neither"):
        load_template("tokenizer", path)
    with pytest.raises(FileNotFoundError, match="no such chat template: absent"):
        load_template("absent", path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "model_max_length": 5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = load_template("tokenizer", path)
    assert own == ChatTemplate(source=PLAIN, variables=(("bos_token", "<s>"), ("eos_token", "</s>")))
    (tmp_path / "chat_template.jinja").write_text(JINJA)
    beside = load_template("tokenizer", path)
    assert beside.source == JINJA
    assert load_template(str(tmp_path / "chat_template.jinja"), path) == beside
    assert len({CHATML.fingerprint, own.fingerprint, beside.fingerprint}) == 3
    (tmp_path / "bad.jinja").write_text("a\n{% for %}")
    with pytest.raises(ValueError, match=r"the chat template .*bad\.jinja, line 2: "):
        load_template(str(tmp_path / "bad.jinja"), path)
    (tmp_path / "bad.jinja").write_text("\ufdd3")
    with pytest.raises(ValueError, match=r"U\+FDD0 to U\+FDEF"):
        load_template(str(tmp_path / "bad.jinja"), path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("hello", "it is not a list of messages"),
        ([1], "message 0 is not an object"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "message 0 has no content that is a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has a part that is no text"),
        ([{"role": "user", "content": "\ud800"}], "message 0 holds a lone surrogate"),
    ],
)
def test_what_is_no_conversation_is_refused_by_message(value: Any, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        messages_of(value)
    assert str(caught.value).startswith(reason)


def test_contents_in_parts_and_nulls_that_tables_write(tokenizer: TokenizerFile) -> None:
    talk = messages_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [1]},
        ]
    )
    assert talk == ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "", "tool_calls": [1]})
    assert parts(encode_chat(talk, tokenizer, CHATML), tokenizer)[1] == ("<|im_end|>", True)


def test_what_template_and_set_both_put_around_a_document_is_there_once(tokenizer: TokenizerFile) -> None:
    file = parse_tokenizer(tokenizer.data, bod_token="<s>", eod_token="</s>")
    template = ChatTemplate(source=LLAMA, variables=(("bos_token", "<s>"), ("eos_token", "</s>")))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for chosen, said in ((template, " b </s>"), (CHATML, "b<|im_end|>")):
        chat = within_marks(encode_chat(talk, file, chosen), file)
        ids, lengths = add_marks(chat.ids, np.array([len(chat.ids)], np.int64), file)
        whole = EncodedChat(ids, chat.spans)
        assert [part for part in parts(whole, file) if part[1]] == [(said, True)]
        assert (count(whole, file, "<s>"), count(whole, file, "</s>"), len(ids)) == (1, 1, lengths[0])
        assert (file.tokenizer.id_to_token(int(ids[0])), file.tokenizer.id_to_token(int(ids[-1]))) == ("<s>", "</s>")
