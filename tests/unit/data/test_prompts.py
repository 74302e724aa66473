"""Prompts become the ids that the character tokenizer gives by hand; bad prompts are named by row."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from hybrid_rl.data.prompts import PromptEncoder, check_column_names, prompt_kind, shorten
from hybrid_rl.errors import ConfigError, DataError

BLOCK_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'][0] }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for b in m['content'] %}{{ b['text'] }}{% endfor %}{% endif %}{{ ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '/' }}{% endif %}"
)
IdsOf: TypeAlias = Callable[[str], list[int]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def encoder(tokenizer: Any, **options: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, **{"max_prompt_length": None, **options})


def test_text_is_tokenised_as_it_is(tokenizer: Any) -> None:
    assert encoder(tokenizer).encode(["1+2=", "ab"]) == [[7, 16, 8, 18], [20, 21]]
    assert encoder(tokenizer).encode([]) == []


def test_messages_get_a_generation_prompt(chat_tokenizer: Any, ids_of: IdsOf) -> None:
    prompts = [[user("1+2")], [{"role": "system", "content": "add"}, user("3")]]
    assert encoder(chat_tokenizer).encode(prompts) == [ids_of("[u1+2]/"), ids_of("[sadd][u3]/")]


def test_a_final_assistant_message_is_continued_and_order_is_kept(chat_tokenizer: Any, ids_of: IdsOf) -> None:
    prompts = [[user("1")], [user("2"), {"role": "assistant", "content": "the sum"}], [user("3")]]
    expected = [ids_of("[u1]/"), ids_of("[u2][athe sum"), ids_of("[u3]/")]
    assert encoder(chat_tokenizer).encode(prompts) == expected


def test_messages_do_not_get_special_tokens_twice(chat_tokenizer: Any, ids_of: IdsOf) -> None:
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[ $A", special_tokens=[("[", 3)])
    assert encoder(chat_tokenizer).encode([[user("1")]]) == [ids_of("[u1]/")]


def test_template_keywords_reach_the_template(chat_tokenizer: Any, ids_of: IdsOf) -> None:
    thinking = encoder(chat_tokenizer, chat_template_kwargs={"think": True})
    assert thinking.encode([[user("1")]]) == [ids_of("[u1]/think")]
    other = encoder(chat_tokenizer, chat_template_kwargs={"chat_template": "{{ messages[0]['content'] }}"})
    assert other.encode([[user("12")]]) == [ids_of("12")]


@pytest.mark.parametrize(
    "template",
    [
        None,  # of the fixture, which cannot add a list to a text
        "{% for m in messages %}{{ '[' ~ m['role'][0] ~ m['content'] ~ ']' }}{% endfor %}{{ '/' }}",  # prints the list
        BLOCK_TEMPLATE,
        BLOCK_TEMPLATE.replace("{% if m['content'] is string %}{{ m['content'] }}{% else %}", "").replace(
            "{% endfor %}{% endif %}{{ ']' }}", "{% endfor %}{{ ']' }}"
        ),  # takes blocks only
    ],
    ids=["adds", "prints", "both", "blocks"],
)
def test_contents_have_the_form_that_the_template_takes(chat_tokenizer: Any, ids_of: IdsOf, template: Any) -> None:
    chat_tokenizer.chat_template = template or chat_tokenizer.chat_template
    blocks = [user([{"type": "text", "text": "1", "image": None}, {"type": "text", "text": "2"}])]
    assert encoder(chat_tokenizer).encode([blocks, [user("12")]]) == [ids_of("[u12]/")] * 2


def test_keys_that_are_none_are_not_shown_to_the_template(chat_tokenizer: Any, ids_of: IdsOf) -> None:
    chat_tokenizer.chat_template = "{{ messages[0]['content'] }}{% if messages[0].name is defined %}x{% endif %}"
    assert encoder(chat_tokenizer).encode([[{**user("1"), "name": None}]]) == [ids_of("1")]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "row 3: the prompt '' is empty"),
        (" \n", r"row 3: the prompt ' \\n' is empty"),
        (None, "row 3: the prompt None is of type NoneType"),
        (b"1+1", "row 3: the prompt b'1[+]1' is of type bytes"),
        (5, "row 3: the prompt 5 is of type int"),
        ({"role": "user", "content": "x"}, "is of type dict"),
        ([], "row 3: the prompt is an empty list"),
        (["hello"], "row 3, message 0 is 'hello'; a message is a dict"),
        ([{"content": "x"}], 'a message is a dict with "role"'),
        ([user("a"), user(None)], "row 3, message 1: the content None is of type NoneType"),
        ([user(b"a")], "is of type bytes"),
        ([user([{"type": "image", "image": "x"}])], "Images, audio and video cannot be used yet"),
        ([user(" ")], "row 3: the messages .* contain no text"),
        ([user([{"type": "text", "text": ""}])], "contain no text"),
    ],
)
def test_unusable_prompts(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompt_kind(prompt, 3)


def test_mixed_text_and_messages(chat_tokenizer: Any) -> None:
    with pytest.raises(DataError, match="row 5: the prompt is messages, but that of row 4 is text"):
        encoder(chat_tokenizer).encode(["1", [user("1")]], rows=[4, 5])


@pytest.mark.parametrize(
    ("template", "prompts", "message"),
    [
        (None, [[user("1")]], "row 0: .* the tokenizer has no chat template.*set data.chat_template_path"),
        (
            "{% for m in messages %}{{ raise_exception('no tools') if m['role'] == 'tool' else 1 }}{% endfor %}",
            [[user("1")], [{"role": "tool", "content": "2"}]],
            "row 1: .* is refused by the chat template .*no tools",
        ),
        (None, ["1", "\ud800"], "row 1: the prompt .* cannot be tokenised"),
        (
            "{% for m in messages %}{% endfor %}",
            [[user("1")]],
            "row 0: the tokenizer produces no tokens for the prompt ",
        ),
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_named_by_its_row(
    tokenizer: Any, template: str | None, prompts: list[Any], message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        encoder(tokenizer).encode(prompts)


def test_limit(tokenizer: Any) -> None:
    ids = [1, 2, 3, 4]
    assert encoder(tokenizer).limit(ids, 0) == ids
    assert encoder(tokenizer, max_prompt_length=4).limit(ids, 0) == ids
    assert encoder(tokenizer, max_prompt_length=3, overlong_prompts="truncate").limit(ids, 0) == [2, 3, 4]
    assert encoder(tokenizer, max_prompt_length=3, overlong_prompts="drop").limit(ids, 0) is None
    with pytest.raises(DataError, match=r"max_prompt_length=3, but 1 prompt\(s\).*longest has 4 tokens.* row 9.*drop"):
        encoder(tokenizer, max_prompt_length=3).limit(ids, 9)


def test_options_are_checked(chat_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="'tokenize', which the library sets itself"):
        encoder(chat_tokenizer, chat_template_kwargs={"tokenize": False})
    with pytest.raises(ConfigError, match="'enable_thinking', but the chat template does not use"):
        encoder(chat_tokenizer, chat_template_kwargs={"enable_thinking": True})


def test_column_names() -> None:
    check_column_names(["prompt", "answer"], "the dataset")
    with pytest.raises(DataError, match=r"no `prompt` column; its columns are 'promt', 'a' \(the nearest name is"):
        check_column_names(["promt", "a"], "the dataset")
    with pytest.raises(DataError, match="its columns are none"):
        check_column_names([], "row 0")
    own = ("prompts", "completions", "completion_ids", "completion_lengths")
    for reserved in (*own, "trainer_state", "log_extra", "log_metric"):
        with pytest.raises(DataError, match=f"column '{reserved}', which is a keyword of the reward call"):
            check_column_names(["prompt", reserved], "row 0")
    with pytest.raises(DataError, match="the column name 3; column names must be strings"):
        check_column_names(["prompt", 3], "row 0")
    with pytest.raises(DataError, match="'a' more than once"):
        check_column_names(["prompt", "a", "a"], "the table")


def test_shorten() -> None:
    assert shorten("abc") == "'abc'"
    assert shorten("a" * 100, 10) == "'aaaaaa..."
