"""Chat templates token by token: seams, rewritten histories, answers read as messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.agents.chat import Chat
from hybrid_rl.agents.client import AgentClient, Limits
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.trajectory import Conversation, Trajectory
from hybrid_rl.errors import HistoryRewrittenError, MessagesRefusedError, ModelError
from tests.support.agents import callers
from tests.support.agents.chat_forms import ENDS, FAMILIES, build_chat, build_tokenizer, call_of, result, tool, user

TOOLS = [tool("add", a="integer", b="integer"), tool("echo", text="string")]
ASK = [user("What is 1+2?")]
CALL = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "thinking": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]',
    "glm": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
}
SUM = {"name": "add", "arguments": {"a": 1, "b": 2}}


def ids_of(chat: Chat, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(chat: Chat, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(ids)))


class Talk:
    """A conversation as an agent has it: what the policy answers is given."""

    def __init__(self, chat: Chat, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> None:
        self.chat, self.messages, self.tools = chat, messages, tools
        self.known: list[Conversation] = []
        self.prompt: list[int] = []

    def ask(self) -> list[int]:
        self.prompt = self.chat.prompt_ids(self.messages, self.tools, self.known)
        return self.prompt

    def answer(self, answer: str | list[int]) -> dict[str, Any]:
        """Ask, and let the policy answer this text or these tokens. Returns the message."""
        prompt = self.ask()
        ids = ids_of(self.chat, answer) if isinstance(answer, str) else answer
        message = self.chat.parse(ids, prompt, self.tools)
        before = self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages
        self.messages = [*before, message]
        self.known.append(Conversation(tuple(self.messages), tuple(self.tools), (*prompt, *ids)))
        return message

    def suffix(self, *new: dict[str, Any]) -> str | None:
        """What the next prompt adds to the last known tokens; None if it does not go on with them."""
        self.messages = [*self.messages, *new]
        known, prompt = list(self.known[-1].token_ids), self.ask()
        return text_of(self.chat, prompt[len(known) :]) if prompt[: len(known)] == known else None


@pytest.mark.parametrize(
    ("family", "answer", "new", "expected"),
    [
        # The engine ended the turn: only the line break after it is missing. Cut by length: all of the close is.
        ("hermes", "3<|im_end|>", [user("and?")], "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"),
        ("hermes", "3", [user("and?")], "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "hermes",
            CALL["hermes"] + "<|im_end|>",
            [result("3"), result("4")],
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "hermes",
            CALL["hermes"] + "<|im_end|>",
            [result("3"), {"role": "system", "content": "Stop."}],
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>system\nStop.<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "hermes",
            "3<|im_end|>",
            [user("and?"), {"role": "assistant", "content": "It is"}],
            "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nIt is",
        ),
        (
            "llama",
            CALL["llama"] + "<|eot|>",
            [result("3")],
            '<|header|>ipython<|end_header|>\n\n"3"<|eot|><|header|>assistant<|end_header|>\n\n',
        ),
        # Another end than the template's ends a turn as well.
        (
            "llama",
            CALL["llama"] + "<|eom|>",
            [result("3")],
            '<|header|>ipython<|end_header|>\n\n"3"<|eot|><|header|>assistant<|end_header|>\n\n',
        ),
        (
            "mistral",
            CALL["mistral"] + "</s>",
            [result("3")],
            '[TOOL_RESULTS] {"content": "3", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        ),
        # The policy wrote the token that opens the next turn, or one that opens another kind of turn.
        ("glm", CALL["glm"] + "<|observation|>", [result("3")], "\n<tool_response>\n3\n</tool_response><|assistant|>"),
        (
            "glm",
            CALL["glm"] + "<|user|>",
            [result("3")],
            "<|observation|>\n<tool_response>\n3\n</tool_response><|assistant|>",
        ),
        ("glm", "3", [user("and?")], "<|user|>\nand?<|assistant|>"),
    ],
)
def test_a_prompt_adds_exactly_what_is_missing(family: str, answer: str, new: list[Any], expected: str) -> None:
    talk = Talk(build_chat(family), ASK, TOOLS)
    talk.answer(answer)
    assert talk.suffix(*new) == expected


def test_what_the_policy_wrote_is_never_tokenised_again() -> None:
    chat = build_chat("hermes")
    spelled = [chat.tokenizer.convert_tokens_to_ids(letter) for letter in "the12"]
    assert len(ids_of(chat, "the12")) == 2
    talk = Talk(chat, ASK)
    talk.answer(spelled)
    assert talk.suffix(user("and?")) is not None
    assert talk.prompt[len(talk.known[0].token_ids) - 5 :][:5] == spelled
    # Whole letters, a special token and half a letter: nothing of it is lost, and nothing of it is a rewritten history.
    odd = [*ids_of(chat, "a<|im_start|>b"), *ids_of(chat, "é")[:1]]
    assert talk.answer(odd) == {"role": "assistant", "content": "ab\ufffd"}
    assert talk.suffix(user("and?")) == "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_spaces_and_the_order_of_keys_are_no_rewritten_history(family: str) -> None:
    talk = Talk(build_chat(family, rewritten_history="error"), ASK, TOOLS)
    other = CALL[family].replace(": ", ":").replace('"a":1, "b":2', '"b":2,"a":1')
    message = talk.answer(f" {other} " + ENDS[family])
    assert [call["function"] for call in message["tool_calls"]] == [SUM]
    assert talk.suffix(result("3", message["tool_calls"][0])) is not None


def test_a_template_that_drops_thinking_forks_as_soon_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk(build_chat("thinking"), ASK, TOOLS)
    thought = "<think>\nadd them\n</think>\n\n" + CALL["thinking"] + "<|im_end|>"
    assert talk.answer(thought)["reasoning_content"] == "add them"
    assert talk.suffix(result("3")) is not None
    talk.answer("<think>\nso\n</think>\n\nIt is 3.<|im_end|>")
    assert talk.suffix(user("Thanks.")) is None
    whole = talk.chat.tokenizer.apply_chat_template(
        talk.messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert talk.prompt == ids_of(talk.chat, whole)
    assert "so" not in text_of(talk.chat, talk.prompt)
    [told] = [record.getMessage() for record in caplog.records]
    assert "add them" in told
    assert "a new sample starts" in told
    # The next answer goes on with the fork.
    talk.answer("Bye.<|im_end|>")
    assert talk.suffix(user("Bye.")) is not None
    assert len(caplog.records) == 1


def test_a_rewritten_history_can_be_kept_or_refused() -> None:
    for policy in ("keep", "error"):
        talk = Talk(build_chat("thinking", rewritten_history=policy), ASK, TOOLS)
        talk.answer("<think>\nhm\n</think>\n\n3<|im_end|>")
        if policy == "keep":
            assert talk.suffix(user("Bye.")) == "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n"
        else:
            with pytest.raises(HistoryRewrittenError, match=r"PreTrained|Tokenizers.*'hm 3' has become '3'.*fork"):
                talk.suffix(user("Bye."))


@pytest.mark.parametrize("switch", ["no_thinking", "opens_thinking"])
def test_a_prompt_that_opens_the_thinking_itself(switch: str) -> None:
    talk = Talk(build_chat("thinking", chat_template_kwargs={switch: True}, rewritten_history="error"), ASK, TOOLS)
    thinks = switch == "opens_thinking"
    message = talk.answer(("add\n</think>\n\n" if thinks else "") + CALL["thinking"] + "<|im_end|>")
    assert message.get("reasoning_content") == ("add" if thinks else None)
    assert message["tool_calls"][0]["function"] == SUM
    assert (talk.suffix(result("3")) or "").startswith("\n<|im_start|>user\n<tool_response>\n3")
    talk.answer("</think>\n\n3<|im_end|>" if thinks else "3<|im_end|>")
    if thinks:
        with pytest.raises(HistoryRewrittenError):
            talk.suffix(user("Bye."))
        assert talk.chat.parse(ids_of(talk.chat, "so"), talk.prompt)["reasoning_content"] == "so"
    else:  # an empty block that comes and goes is nothing that was said
        assert talk.suffix(user("Bye.")) is not None


def test_a_template_that_shows_empty_thinking_until_the_user_speaks() -> None:
    always = FAMILIES["thinking"].replace("m.reasoning_content and ", "m.role == 'assistant' and ")
    always = always.replace("m.reasoning_content.strip", "(m.reasoning_content or '').strip")
    talk = Talk(Chat(build_tokenizer(always, "<|im_end|>"), rewritten_history="error"), ASK, TOOLS)
    for _ in range(2):
        talk.answer("<think>\n\n</think>\n\n" + CALL["thinking"] + "<|im_end|>")
        assert talk.suffix(result("3")) is not None
    assert text_of(talk.chat, talk.prompt).count("<think>") == 2
    talk.answer("3<|im_end|>")
    assert talk.suffix(user("Bye.")) is not None


def test_calls_within_thinking_are_not_made() -> None:
    chat = build_chat("thinking")
    call = CALL["thinking"]
    read = chat.read(f"<think>\nperhaps {call}\n</think>\n\nNo.", TOOLS)
    assert read == {"role": "assistant", "content": "No.", "reasoning_content": f"perhaps {call}"}
    assert chat.read(f"<think>\nperhaps {call}", TOOLS) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": f"perhaps {call}",
    }
    # A template without thinking keeps it in the content, where calls do not count either.
    plain = build_chat("hermes")
    assert plain.read(f"<think>{call}</think>No.", TOOLS)["content"] == f"<think>{call}</think>No."
    both = plain.read(f"<think>{call}</think>Yes.{call}", TOOLS)
    assert (both["content"], len(both["tool_calls"])) == (f"<think>{call}</think>Yes.", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_cannot_be_read_is_told_and_stays_as_it_was_written(family: str) -> None:
    chat = build_chat(family)
    talk = Talk(chat, ASK, TOOLS)
    broken = CALL[family][:-1] + "?"
    message = talk.answer(broken + ENDS[family])
    assert "tool_calls" not in message
    assert message["content"].strip() == broken.strip()
    assert message["tool_call_error"].startswith("The tool call could not be read")
    role = {"mistral": "user"}.get(family, "tool")
    assert chat.error_role == role
    reply = {"role": role, "content": message["tool_call_error"]}
    goes_on = talk.suffix(reply) is not None
    assert goes_on == (family != "mistral")  # whose tools move to the last message of the user
    assert message["tool_call_error"] in text_of(chat, talk.prompt).replace('\\"', '"').replace("\\\\", "\\")
    again = talk.answer(CALL[family] + ENDS[family])
    assert talk.suffix(result("3", again["tool_calls"][0])) is not None


def test_several_calls_where_the_template_takes_one() -> None:
    two = "; ".join([CALL["llama"]] * 2)
    message = build_chat("llama").read(two, TOOLS)
    assert message["content"] == two
    assert "holds 2 tool calls; make one" in message["tool_call_error"]
    assert len(build_chat("hermes").read(CALL["hermes"] * 2, TOOLS)["tool_calls"]) == 2


def test_the_id_of_a_call_is_one_that_mistral_takes_and_different_for_each() -> None:
    talk = Talk(build_chat("hermes"), ASK, TOOLS)
    ids = []
    for said in "ab":
        ids += [call["id"] for call in talk.answer(CALL["hermes"] * 2 + "<|im_end|>")["tool_calls"]]
        talk.suffix(user(said))
    assert len(set(ids)) == 4
    # One that the policy wrote stays: it expects the result under it.
    assert build_chat("mistral").read(CALL["mistral"], TOOLS)["tool_calls"][0]["id"] == "abcdefghi"
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_messages_that_clients_return_in_another_form_are_known() -> None:
    talk = Talk(build_chat("hermes"), [{"role": "system", "content": "Hi."}, *ASK], TOOLS)
    talk.answer("So:" + CALL["hermes"] + "<|im_end|>")
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"b":2, "a":1}'}}
    talk.messages = [
        {"role": "system", "content": [{"type": "text", "text": "Hi."}], "name": None},
        *ASK,
        {"role": "assistant", "content": "So: ", "tool_calls": [call], "refusal": None, "annotations": []},
    ]
    assert talk.suffix(result("3", call)) is not None
    talk.messages[2]["content"] = "Then:"
    talk.known.pop()
    # Changed by the caller: no known conversation begins it, so that it is rendered whole.
    answer = {"role": "assistant", "content": "Then:", "tool_calls": [call_of("add", b=2, a=1)]}
    messages = [{"role": "system", "content": "Hi."}, *ASK, answer, talk.messages[3]]
    whole = talk.chat.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert text_of(talk.chat, talk.ask()) == whole


def test_other_tools_make_another_conversation() -> None:
    talk = Talk(build_chat("hermes", rewritten_history="error"), ASK, TOOLS)
    talk.answer("3<|im_end|>")
    talk.tools = TOOLS[:1]
    assert talk.suffix(user("Bye.")) is None


def test_the_longest_known_conversation_is_gone_on_with() -> None:
    talk = Talk(build_chat("hermes"), ASK)
    for text in ("3", "4"):  # two answers to the same prompt: the one that the messages name counts
        talk.messages = ASK
        talk.answer(f"{text}<|im_end|>")
    talk.messages = [*ASK, {"role": "assistant", "content": "3"}, user("and?")]
    assert "assistant\n3<|im_end|>\n<|im_start|>user\nand?" in text_of(talk.chat, talk.ask())
    assert talk.prompt[: len(talk.known[0].token_ids)] == list(talk.known[0].token_ids)


def test_an_answer_that_was_cut_or_begun_is_continued() -> None:
    talk = Talk(build_chat("hermes"), [*ASK, {"role": "assistant", "content": "It "}])
    start = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\nIt "
    assert text_of(talk.chat, talk.ask()).endswith(start)
    assert talk.answer("is ") == {"role": "assistant", "content": "It is "}
    assert text_of(talk.chat, talk.ask()).endswith(start + "is ")
    assert talk.answer("3.<|im_end|>") == {"role": "assistant", "content": "It is 3."}
    assert text_of(talk.chat, talk.ask()).endswith(start + "is 3.")
    assert (talk.suffix(user("Bye.")) or "").startswith("\n<|im_start|>user\nBye.")
    long = "so " * 300
    talk.suffix({"role": "assistant", "content": long})
    assert talk.answer("it is.<|im_end|>")["content"] == long + "it is."


def test_templates_that_take_contents_and_arguments_in_other_forms() -> None:
    blocks = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% for b in m.content %}{{ b.text }}{% endfor %}"
        "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{{ '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    chat = Chat(build_tokenizer(blocks, "<|im_end|>"))
    answer = {"role": "assistant", "content": None, "tool_calls": [call_of("add", a=1)]}
    shown = text_of(chat, chat.prompt_ids([*ASK, answer, result("3")], [], []))
    assert shown == (
        '<|im_start|>userWhat is 1+2?<|im_end|><|im_start|>assistantadd{"a": 1}<|im_end|>'
        "<|im_start|>tool3<|im_end|><|im_start|>assistant"
    )


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        (ASK, TOOLS, r"the tool\(s\) add, echo"),
        (
            [*ASK, {"role": "assistant", "content": "", "tool_calls": [call_of("add", a=1)]}, *ASK],
            [],
            "its own tool calls",
        ),
        ([*ASK, result("3")], [], "the result of a tool"),
    ],
)
def test_what_the_template_does_not_show_is_refused(messages: Any, tools: Any, what: str) -> None:
    """SmolLM2's template shows contents only: tools, calls and results would be gone without a word."""
    plain = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    chat = Chat(build_tokenizer(plain, "<|im_end|>"))
    for _ in range(2):  # it is looked for once, and remembered
        with pytest.raises(MessagesRefusedError, match=f"does not show .*{what}; use the tokenizer of a model"):
            chat.prompt_ids(messages, tools, [])
    assert text_of(chat, chat.prompt_ids(ASK, [], [])).startswith("<|im_start|>userWhat")


def test_a_template_that_adds_no_header_after_tools() -> None:
    """DeepSeek's: the answer follows the result of a tool at once. An earlier header does not count."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% elif m.role == 'tool' %}"
        "{{ '<sop>' + m.content + '[gMASK]' }}{% else %}{{ '<|assistant|>' if messages[loop.index0-1].role != 'tool' }}"
        "{{ m.content }}{% for c in m.tool_calls %}{{ '<tool_call>{\"name\": \"' + c.function.name + '\", ' }}"
        "{{ '\"arguments\": ' + (c.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}{{ '</s>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|assistant|>' }}{% endif %}"
    )
    talk = Talk(Chat(build_tokenizer(template, "</s>"), rewritten_history="error"), ASK)
    call = CALL["hermes"].replace("\n", "")
    for _ in range(2):
        message = talk.answer(call + "</s>")
        assert message["content"] == ""
        assert talk.suffix(result("3", message["tool_calls"][0])) == "<sop>3[gMASK]"
    assert talk.answer("3</s>") == {"role": "assistant", "content": "3"}
    assert talk.suffix(user("Bye.")) == "<|user|>Bye.<|assistant|>"


def test_a_template_that_takes_results_after_calls_only() -> None:
    strict = FAMILIES["llama"].replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}",
    )
    # Turns that end in a call are closed like others, by a token of their own, or by text.
    for close, after_call in (("<|eot|>", "<|eot|>"), ("<|eot|>", "<|eom|>\n"), (" (end)", " (end)")):
        template = strict.replace("<|eot|>", close)
        if after_call != close:
            template = template.replace("{{ f.arguments", "{% set close = '<|eom|>\n' %}{{ f.arguments")
            template = template.replace("{{ '<|eot|>' }}", "{{ '<|eom|>\n' if m.tool_calls else '<|eot|>' }}")
        chat = Chat(build_tokenizer(template, "<|eot|>"), rewritten_history="error")
        assert chat.error_role == "user"
        for end in ("<|eot|>", ""):
            talk = Talk(chat, ASK, TOOLS)
            talk.answer(CALL["llama"] + end)
            missing = after_call.removeprefix("<|eot|>").removeprefix("<|eom|>") if end else after_call
            assert talk.suffix(result("3")) == (
                f'{missing}<|header|>ipython<|end_header|>\n\n"3"{close}<|header|>assistant<|end_header|>\n\n'
            )


def test_text_that_is_no_unicode_is_replaced() -> None:
    chat = build_chat("hermes")
    assert "\ufffd" in text_of(chat, chat.prompt_ids([user("half \ud83d"), user("whole \ud83d\ude00")], (), []))
    assert "whole 😀" in text_of(chat, chat.prompt_ids([user("whole \ud83d\ude00")], (), []))


def test_the_tokenizers_own_description_of_answers_comes_first() -> None:
    tokenizer = build_tokenizer(FAMILIES["hermes"], "<|im_end|>")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*<\|im_end\|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    talk = Talk(Chat(tokenizer, rewritten_history="error"), ASK, TOOLS)
    broken = talk.answer("<tool_call>\n{}\n</tool_call><|im_end|>")
    assert broken["content"] == "<tool_call>\n{}\n</tool_call>"
    assert 'no "name"' in broken["tool_call_error"]
    assert talk.suffix({"role": "tool", "content": "again"}) is not None
    message = talk.answer("So:\n" + CALL["hermes"] + "<|im_end|>")
    assert (message["content"], message["tool_calls"][0]["function"]) == ("So:", SUM)
    assert talk.suffix(result("3")) is not None
    assert talk.answer("3<|im_end|>")["content"] == "3"
    number = talk.chat.read('<tool_call>{"name": "echo", "arguments": {"text": 7, "x": 7}}</tool_call>', TOOLS)
    assert number["tool_calls"][0]["function"]["arguments"] == {"text": "7", "x": 7}
    assert "tool_calls" not in Chat(tokenizer, tool_call_format="none").read(CALL["hermes"], TOOLS)


def test_what_cannot_be_rendered_is_an_error() -> None:
    with pytest.raises(ModelError, match="has no chat template.*set data.chat_template_path"):
        Chat(build_tokenizer("", "<|im_end|>"))
    chat = build_chat("mistral")
    with pytest.raises(MessagesRefusedError, match="no messages"):
        chat.prompt_ids([], (), [])
    with pytest.raises(MessagesRefusedError, match=r"refuses the messages.*roles must alternate"):
        chat.prompt_ids([user("a"), user("b")], (), [])
    with pytest.raises(MessagesRefusedError, match="content is a text"):
        chat.prompt_ids([{"role": "user", "content": {"a": 1}}], (), [])


# Text that neither opens structure of any family nor begins or ends with space, which templates trim.
TEXTS = st.text(st.sampled_from("ab the12\n.,:é✓'\"\\"), max_size=12).map(str.strip)
ARGUMENTS = st.one_of(
    st.fixed_dictionaries({"a": st.integers(), "b": st.integers()}), st.fixed_dictionaries({"text": TEXTS})
)


@st.composite
def turns(draw: st.DrawFn, family: str) -> tuple[dict[str, Any], int | None, str | None]:
    """An answer as a message, after how many tokens it is cut, and what the user says next (None: tools answer)."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    most = 1 if family == "llama" else 3
    calls = draw(st.lists(ARGUMENTS, max_size=most)) if draw(st.booleans()) else []
    if calls:
        message["tool_calls"] = [call_of("echo" if "text" in one else "add", **one) for one in calls]
    if not calls or family in ("hermes", "thinking", "glm"):  # the others say nothing besides a call
        message["content"] = draw(TEXTS)
    if family == "thinking" and draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS.filter(bool))
    cut = draw(st.none() | st.integers(1, 20))
    return message, cut, None if calls and cut is None else draw(TEXTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations(family: str) -> None:
    chat = build_chat(family)
    render = chat.tokenizer.apply_chat_template

    @settings(max_examples=25)
    @given(st.lists(turns(family), min_size=1, max_size=4), st.booleans())
    def check(plan: list[Any], system: bool) -> None:
        first = [{"role": "system", "content": "Be brief."}] * (system and family != "mistral")
        talk = Talk(chat, [*first, *ASK], TOOLS)
        faithful, thought = True, False
        for message, cut, said in plan:
            prompt = talk.ask()
            if faithful:
                whole = render(talk.messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
                assert text_of(chat, prompt) == whole
            # The answer as the template writes it, less what the template puts before and after it.
            closed = render([*ASK, message], tools=TOOLS, tokenize=False)
            text = closed.removeprefix(render(ASK, tools=TOOLS, tokenize=False, add_generation_prompt=True))
            text = text.rstrip().removesuffix(ENDS[family])
            ids = ids_of(chat, text) + [chat.tokenizer.eos_token_id]
            cut_now = cut is not None and cut < len(ids) - 1
            answer = talk.answer(ids[:cut] if cut_now else ids)
            if not cut_now:
                assert answer["content"].strip() == message["content"]
                assert answer.get("reasoning_content") == message.get("reasoning_content")
                calls = [call["function"] for call in answer.get("tool_calls", ())]
                assert calls == [call["function"] for call in message.get("tool_calls", ())]
            calls = answer.get("tool_calls", [])
            # Users who speak move the tools of Mistral, and end the thinking of others.
            by_user = not calls or said is not None
            thought |= bool(answer.get("reasoning_content"))
            goes_on = not by_user or not (family == "mistral" or thought)
            if calls and by_user and family == "mistral":
                return
            new = [user(said or "go on")] if by_user else [result(json.dumps(i), c) for i, c in enumerate(calls)]
            assert (talk.suffix(*new) is not None) == goes_on
            thought &= goes_on
            faithful = not goes_on or (faithful and not cut_now and (family, by_user) != ("glm", True))

    check()


PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": ',
    "[TOOL_CALLS]",
    "<|im_start|>",
    "\n",
    " ",
    "é",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_policy_writes_the_conversation_goes_on(family: str) -> None:
    chat = build_chat(family)
    pieces = [ids_of(chat, piece) for piece in (*PIECES, CALL[family], ENDS[family])]
    anything = st.lists(st.one_of(st.sampled_from(pieces), st.lists(st.integers(0, len(chat.tokenizer) - 1))))

    @settings(max_examples=20)
    @given(st.lists(anything.map(lambda parts: sum(parts, [])).filter(bool), min_size=1, max_size=3))
    def check(answers: list[list[int]]) -> None:
        talk = Talk(chat, ASK, TOOLS)
        for ids in answers:
            message = talk.answer(ids)
            calls, error = message.get("tool_calls", []), message.get("tool_call_error")
            reply = {"role": chat.error_role, "content": error} if error else user("and?")
            if talk.suffix(*([result("3", call) for call in calls] or [reply])) is None:
                whole = chat.template.render(talk.messages, TOOLS, "answer")
                assert talk.prompt == ids_of(chat, whole)

    check()


def test_results_without_the_name_that_a_template_asks_for() -> None:
    named = FAMILIES["hermes"].replace(
        "+ m.content + '\n</tool_response>'",
        "+ (m.name or raise_exception('no name')) + ':' + m.tool_call_id + ':' + m.content + '\n</tool_response>'",
    )
    chat = Chat(build_tokenizer(named, ENDS["hermes"]), rewritten_history="error")
    talk = Talk(chat, ASK, TOOLS)
    call = talk.answer(CALL["hermes"] + "<|im_end|>")["tool_calls"][0]
    reply = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    assert f"\nadd:{call['id']}:3\n" in (talk.suffix(reply) or "")
    talk.answer("<tool_call>{}</tool_call><|im_end|>")
    assert chat.error_role == "tool"
    assert "\ntool:000000000:No.\n" in (talk.suffix({"role": "tool", "content": "No."}) or "")


class Policy:
    """Answers with given texts, one after the other."""

    def __init__(self, chat: Chat, answers: list[str]) -> None:
        self.chat, self.answers = chat, answers

    async def complete(self, prompt_ids: Sequence[int], **options: Any) -> Completion:
        ids = ids_of(self.chat, self.answers.pop(0))
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids), "stop")


def test_a_trajectory_holds_what_was_generated_and_forks_where_history_was_rewritten() -> None:
    chat = build_chat("thinking")
    answers = [f"<think>\nadd\n</think>\n\n{CALL['thinking']}<|im_end|>", "It is 3.<|im_end|>", "Bye", "!<|im_end|>"]
    trajectory = Trajectory()
    client = AgentClient(Policy(chat, list(answers)), chat, trajectory, Limits(500, 2000), place=0, generation=0)

    async def run() -> None:
        turn = await client.generate(ASK, tools=TOOLS)
        messages = [*ASK, turn.message, result("3", turn.message["tool_calls"][0])]
        turn = await client.generate(messages, tools=TOOLS)
        messages += [turn.message, user("Bye.")]
        turn = await client.generate(messages, tools=TOOLS)
        turn = await client.generate([*messages, turn.message], tools=TOOLS)  # the agent lets it go on
        assert turn.message["content"] == "Bye!"
        assert [one["role"] for one in trajectory.conversations[-1].messages][-2:] == ["user", "assistant"]

    asyncio.run(run())
    made = [[text_of(chat, sample.token_ids[a:b]) for a, b in sample.turns] for sample in trajectory.samples]
    assert made == [answers[:2], answers[2:]]
    assert trajectory.counts["forks"] == 1
    first, second = trajectory.samples
    assert text_of(chat, [i for i, own in zip(first.token_ids, first.mask, strict=True) if not own]) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(second.mask)
    assert "add\n</think>" not in text_of(chat, second.prompt_ids)


def test_keys_that_say_nothing_are_not_shown() -> None:
    chat = Chat(build_tokenizer("{% for m in messages %}[{{ m | list | sort | join(' ') }}]{% endfor %}", "<|im_end|>"))
    message = {"role": "assistant", "content": "a", "tool_calls": [], "name": None, "tool_call_error": "no"}
    assert text_of(chat, chat.prompt_ids([*ASK, message, *ASK], (), [])) == "[content role]" * 3


def test_no_space_slips_in_between_an_answer_and_what_follows() -> None:
    """Some tokenizers put a space before the first word of a text; what goes on with another is no first word."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '.' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    letters = "\u2581abcdefghijklmnopqrstuvwxyz:."
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template
    talk = Talk(Chat(tokenizer), [user("hi")])
    talk.answer([letters.index(letter) for letter in "yes"])
    talk.suffix(user("so"))
    assert tokenizer.convert_ids_to_tokens(talk.prompt) == list(
        "\u2581user:\u2581hi.assistant:\u2581yes.user:\u2581so.assistant:\u2581"
    )


def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded():
    """While a tool's megabytes are cut into tokens, no trajectory goes on."""
    tokenizer = callers.build_tokenizer([("f", {})])
    chat = Chat(tokenizer)
    answer = {"role": "assistant", "content": "a"}
    prompt = [{"role": "user", "content": "go"}]
    start = chat.prompt_ids(prompt, (), ())
    known = Conversation((*prompt, answer), (), (*start, *chat.encode("a", goes_on=True), 1))
    long = [{"role": "user", "content": "xy" * 5000}]
    for messages, conversations in ((long, ()), ([*prompt, answer, *long], (known,))):
        whole = chat.prompt_ids(messages, (), conversations)
        part = chat.prompt_ids(messages, (), conversations, 30)
        assert 30 < len(part) < 5000 and part == whole[: len(part)]
        assert chat.prompt_ids(messages, (), conversations, len(whole)) == whole
    words = Tokenizer(models.WordLevel({"<unk>": 0, "[u]": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    collapsing = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    collapsing.chat_template = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %} a{% endif %}"
    )
    assert Chat(collapsing).prompt_ids(long, (), (), 30)[-1] == 0  # it is one word, and the prompt is whole
    assert len(Chat(collapsing).prompt_ids(long, (), (), 30)) == len(Chat(collapsing).prompt_ids(long, (), ()))
