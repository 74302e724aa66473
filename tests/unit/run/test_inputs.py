"""The data of a run: which columns for a chat template a run has a use for."""

from typing import Any

import pytest

from hybrid_rl.agents.agent_setup import AgentSetup, setup_tools
from hybrid_rl.config import AgentConfig, TrainerConfig
from hybrid_rl.errors import DataError
from hybrid_rl.run.inputs import load_data
from tests.support.agents.chat_forms import FAMILIES, build_tokenizer, tool, user


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def look_at(agents: AgentSetup | None, *, is_stream: bool = False, **columns: Any) -> list[str]:
    rows = [{"prompt": [user("q")], **columns}]
    tokenizer: Any = build_tokenizer(FAMILIES["thinking"], "<|im_end|>")
    data = load_data((lambda: iter(rows)) if is_stream else rows, None, TrainerConfig(), tokenizer, 2048, agents=agents)
    return [tokenizer.decode(row.prompt_ids) for row in data.train]  # type: ignore[union-attr]


FIND = [tool("find", city="string")]
HUSH = {"no_thinking": True}


@pytest.mark.parametrize("is_stream", [False, True])
def test_columns_for_the_template(is_stream: bool) -> None:
    """Without agents the template gets both. With tools= it shows those, and an agent of one's own gets the columns."""
    tools = setup_tools([add], None, AgentConfig())
    (text,) = look_at(None, is_stream=is_stream, tools=FIND, chat_template_kwargs=HUSH)
    assert '"name": "find"' in text and text.endswith("<think>\n\n</think>\n\n")
    for agents in (tools, AgentSetup(agent=print), AgentSetup(rollout_func=print)):
        with pytest.raises(
            DataError, match="row 0 has .* 'chat_template_kwargs', but trajectories of tools and agents"
        ):
            look_at(agents, is_stream=is_stream, chat_template_kwargs=HUSH)
    with pytest.raises(
        DataError, match="row 0 has something in the column 'tools', but tools= and environment_factory="
    ):
        look_at(tools, is_stream=is_stream, tools=FIND)
    (text,) = look_at(tools, is_stream=is_stream, tools=None, chat_template_kwargs={})
    assert '"name": "add"' in text
    (text,) = look_at(AgentSetup(agent=print), is_stream=is_stream, tools=["my own"])
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
