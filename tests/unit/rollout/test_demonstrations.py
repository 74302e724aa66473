"""Demonstrations: which tokens a policy is shown, under tokenizers that make it easy to get them wrong."""

import json

import datasets
import pyarrow
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybrid_rl.data.prompts import PromptEncoder, PromptRow
from hybrid_rl.data.source import load_source
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import DataError, ModelError
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.demonstrations import (
    DEMONSTRATION,
    DemonstrationEncoder,
    Demonstrations,
    check_demonstrations,
)
from hybrid_rl.rollout.sample_records import sample_records
from tests.support.agents import chat_forms
from tests.support.tiny import EOS_ID, build_tokenizer, ids_of
from tests.unit.rollout.scripted import STATE

PARAMS = SamplingParams(8, stop_token_ids=(EOS_ID,))
# The generation prompt begins an answer as the whole conversation does; a space stands for the line break that
# templates write behind the token that ends a message.
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'][0] + m['content'] + '<eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a' }}{% endif %}"
)


def chat_tokenizer(template=CHAT):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rows_of(tokenizer, *pairs, **options):
    """Rows as a dataset gives them: (prompt, completion)."""
    encoder = PromptEncoder(tokenizer, max_prompt_length=None, **options)
    prompts = encoder.encode([prompt for prompt, _ in pairs])
    return [
        PromptRow(i, prompt, tuple(ids), {"completion": completion})
        for i, ((prompt, completion), ids) in enumerate(zip(pairs, prompts, strict=True))
    ]


def encoded(tokenizer, *pairs, params=PARAMS, **options):
    return DemonstrationEncoder(tokenizer, **options).encode(rows_of(tokenizer, *pairs), params)


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


# --------------------------------------------------------------------------------------------------------------- text


BRACKET = SamplingParams(8, stop_token_ids=(EOS_ID, *ids_of("]")))


@pytest.mark.parametrize(
    ("completion", "params", "expected"),
    [
        ("18", PARAMS, [*ids_of("18"), EOS_ID]),
        (" 2 ", PARAMS, [*ids_of(" 2 "), EOS_ID]),
        ("7<eos>", PARAMS, [*ids_of("7"), EOS_ID]),  # it brings its own end
        ("7]", BRACKET, ids_of("7]")),  # as a rollout's: the first stop token is its last one
    ],
)
def test_text_and_the_token_that_ends_it(completion, params, expected):
    pairs = [("3+4=", "7"), ("9+9=", completion)]
    assert encoded(build_tokenizer(), *pairs, params=params) == [[*ids_of("7"), EOS_ID], expected]


@pytest.mark.parametrize(("completion", "stop"), [("7<eos>8", "<eos>"), ("7]8", "]")])
def test_text_that_goes_on_behind_its_end(completion, stop):
    says = f"row 1: the completion goes on after the stop token '{stop}': '8'; a rollout"
    with pytest.raises(DataError, match=says):
        encoded(build_tokenizer(), ("3+4=", "7"), ("3+5=", completion), params=BRACKET)


def bpe(*merges, template=None):
    """Letters, and merges of them; the template adds special tokens."""
    letters = list("ab=12 ")
    tokens = ["<eos>", "<bos>", *letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    if template:
        specials = [(name, vocabulary[name]) for name in ("<bos>", "<eos>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>"), vocabulary


STOP_AT_0 = SamplingParams(8, stop_token_ids=(0,))


def test_a_special_token_before_every_text_stands_once():
    tokenizer, ids = bpe(template="<bos> $A")
    row = rows_of(tokenizer, ("a=", "1"))[0]
    assert row.prompt_ids == (ids["<bos>"], ids["a"], ids["="])
    assert DemonstrationEncoder(tokenizer).encode([row], STOP_AT_0) == [[ids["1"], ids["<eos>"]]]


@pytest.mark.parametrize(
    ("merges", "template", "completion", "expected"),
    [
        ((), "<bos> $A <eos>", "1", ["1"]),  # the end behind every text does not come between
        ((("1", "2"),), None, "12b", ["12", "b"]),  # tokens are those of the whole text
        # The whole text would have "=1" as one token, but the policy is shown "=" and goes on from there.
        ((("=", "1"),), None, "12", ["1", "2"]),
    ],
)
def test_tokens_are_those_that_follow_the_prompts(merges, template, completion, expected):
    tokenizer, ids = bpe(*merges, template=template)
    found = encoded(tokenizer, ("a=", completion), params=STOP_AT_0)
    assert found == [[*(ids[token] for token in expected), ids["<eos>"]]]


def metaspace():
    """As sentencepiece: a mark for each space, and one before a text."""
    tokens = ["<eos>", "<unk>", *"▁ab=12", "▁1", "=1"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("▁", "1"), ("=", "1")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), tokens.index


def test_no_space_appears_between_prompt_and_completion():
    """By itself "2" would become "▁2"."""
    tokenizer, at = metaspace()
    assert tokenizer("2")["input_ids"] == [at("▁"), at("2")]
    assert encoded(tokenizer, ("a=", "2"), params=STOP_AT_0) == [[at("2"), 0]]
    assert encoded(tokenizer, ("a=", " 1"), params=STOP_AT_0) == [[at("▁1"), 0]]


def test_a_completion_that_no_tokens_can_express_is_refused():
    """ "=1" is one token, and "1" alone begins with a space."""
    tokenizer, _ = metaspace()
    with pytest.raises(DataError, match="row 1: the completion '12' cannot be tokenised after its prompt.* 'a='"):
        encoded(tokenizer, ("a=", "2"), ("a=", "12"), params=STOP_AT_0)


def test_a_truncated_prompt():
    """The dataset kept the last tokens of it."""
    tokenizer = build_tokenizer()
    row = PromptRow(0, "3+4=", tuple(ids_of("4=")), {"completion": "7"})
    assert DemonstrationEncoder(tokenizer).encode([row], PARAMS) == [[*ids_of("7"), EOS_ID]]


def test_prompts_of_another_tokenizer_are_refused():
    row = PromptRow(4, "3+4=", tuple(ids_of("5=")), {"completion": "7"})
    with pytest.raises(DataError, match="row 4: the prompt was tokenised to other ids"):
        DemonstrationEncoder(build_tokenizer()).encode([row], PARAMS)


def test_a_tokenizer_without_an_end():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        encoded(tokenizer, ("3+4=", "7"), params=SamplingParams(8))


# --------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("completion", [assistant("7"), "7", [{"role": "assistant", "content": "7", "name": None}]])
def test_a_message_behind_its_prompt(completion):
    """Prompt "[u3+4=<eos> [a", whole "[u3+4=<eos> [a7<eos> ": what follows the end is left out."""
    tokenizer = chat_tokenizer()
    row = rows_of(tokenizer, (user("3+4="), completion))[0]
    assert tokenizer.decode(row.prompt_ids) == "[u3+4=<eos> [a"
    assert DemonstrationEncoder(tokenizer).encode([row], PARAMS) == [[*ids_of("7"), EOS_ID]]


def test_earlier_turns_belong_to_the_prompt():
    """Their ends are in the prompt, not in the completion."""
    turns = [*user("1"), *assistant("2"), *user("3")]
    assert encoded(chat_tokenizer(), (turns, assistant("44"))) == [[*ids_of("44"), EOS_ID]]


def test_a_template_that_does_not_end_messages():
    tokenizer = chat_tokenizer(CHAT.replace("<eos> ", "]"))
    assert encoded(tokenizer, (user("3+4="), assistant("7"))) == [[*ids_of("7]"), EOS_ID]]


def test_a_template_writes_all_special_tokens_itself():
    """The tokenizer would put <bos> before and <eos> behind a text: a conversation, and what stands behind a prompt."""
    tokenizer, ids = bpe(("=", "1"), template="<bos> $A <eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows = rows_of(tokenizer, (user("a="), assistant("2")), (user("a="), assistant("12")))
    assert rows[0].prompt_ids == (ids["a"], ids["="])
    assert DemonstrationEncoder(tokenizer).encode(rows, STOP_AT_0) == [[ids["2"], 0], [ids["1"], ids["2"], 0]]


def test_a_key_that_is_none_is_not_there():
    """As in prompts: datasets fills keys that only other rows have."""
    tokenizer = chat_tokenizer(CHAT.replace("'[' +", "('=' if m['name'] is defined else '') + '[' +"))
    prompt = [{"role": "user", "content": "3", "name": None}]
    row = rows_of(tokenizer, (prompt, [{"role": "assistant", "content": "7", "name": None}]))[0]
    assert DemonstrationEncoder(tokenizer).encode([row], PARAMS) == [[*ids_of("7"), EOS_ID]]


def test_the_template_gets_its_keywords():
    template = CHAT.replace("{{ '[a' }}", "{{ '[a' + mark }}").replace("m['role'][0] +", "m['role'][0] + mark +")
    tokenizer, options = chat_tokenizer(template), {"chat_template_kwargs": {"mark": "="}}
    rows = rows_of(tokenizer, (user("3"), assistant("7")), **options)
    assert DemonstrationEncoder(tokenizer, **options).encode(rows, PARAMS) == [[*ids_of("7"), EOS_ID]]
    with pytest.raises(DataError, match="row 0: the messages .* are refused by the chat template"):
        DemonstrationEncoder(tokenizer).encode(rows, PARAMS)


@pytest.mark.parametrize(
    ("prompt", "completion", "words"),
    [
        ("3+4=", assistant("7"), "the prompt is text, but the completion .* is not"),
        ("3+4=", None, "the completion None is missing or empty"),
        ("3+4=", "", "the completion '' is missing or empty"),
        ("3+4=", 7, "the prompt is text, but the completion 7 is not"),
        (user("3+4="), [], r"the completion \[\] is missing or empty"),
        (user("3+4="), 7, "the completion .* must be a text or a list of one message of the assistant"),
        (user("3+4="), user("7"), "the completion .* must be a text or a list of one message of the assistant"),
        (user("3+4="), [*assistant("7"), *assistant("8")], "the completion .* must be a text or a list of one message"),
        (user("3+4="), [{"role": "assistant"}], "the completion .* needs a text as its content"),
        ([*user("3+4="), *assistant("It is ")], "7", "the prompt ends with a message of the assistant"),
    ],
)
def test_completions_that_cannot_be_used(prompt, completion, words):
    tokenizer = chat_tokenizer()
    good = (prompt, "7") if isinstance(prompt, str) else (user("1"), "7")
    with pytest.raises(DataError, match=f"row 1: {words}"):
        encoded(tokenizer, good, (prompt, completion))


# -------------------------------------------------------------------------------------------------------------- calls


def calling(name, arguments, content=""):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": content, "tool_calls": [call]}]


def of_source(dataset, tokenizer, params):
    source = load_source(dataset, PromptEncoder(tokenizer, max_prompt_length=None))
    return [tokenizer.decode(ids) for ids in DemonstrationEncoder(tokenizer).encode(list(source), params)]


def tools_tokenizer(family):
    """The tokenizer of a family, and the parameters of a rollout that its end of a turn stops."""
    tokenizer = chat_forms.build_tokenizer(chat_forms.FAMILIES[family], chat_forms.ENDS[family])
    return tokenizer, SamplingParams(200, stop_token_ids=(tokenizer.eos_token_id,))


CALLS = [("add", {"a": 1, "b": {"c": 2}}), ("find", {"city": "Brno"})]
CALLED = [
    '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": 2}}}\n</tool_call><|im_end|>',
    '\n<tool_call>\n{"name": "find", "arguments": {"city": "Brno"}}\n</tool_call><|im_end|>',
]


@pytest.mark.parametrize("form", ["list", "Dataset", "table", "stream", "JSON text", "None", "transformed"])
def test_a_call_is_taught_as_the_template_writes_it(form):
    """Not with the arguments of other rows, and not as the text of an object."""
    write = json.dumps if form == "JSON text" else dict
    rows = [{"prompt": user("q"), "completion": calling(n, write(a), None if form == "None" else "")} for n, a in CALLS]
    dataset = {
        "Dataset": datasets.Dataset.from_list,
        "table": pyarrow.Table.from_pylist,
        "stream": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        "transformed": lambda rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch),
    }.get(form, list)(rows)
    assert of_source(dataset, *tools_tokenizer("hermes")) == CALLED


def test_a_demonstration_is_rendered_with_the_tools_of_its_row():
    """The prompt's ids have them, and the encoder refuses a prompt that it renders otherwise."""
    tokenizer, params = tools_tokenizer("hermes")
    rows = [
        {"prompt": user("q"), "completion": calling(n, a), "tools": [chat_forms.tool(n, a="integer")]} for n, a in CALLS
    ]
    assert of_source(rows, tokenizer, params) == CALLED
    source = load_source(rows, PromptEncoder(tokenizer, max_prompt_length=None))
    assert ["adds." in tokenizer.decode(source[place].prompt_ids) for place in (0, 1)] == [True, False]


THOUGHT = [{**assistant("7")[0], "reasoning_content": "because"}]


@pytest.mark.parametrize(
    ("tokenizer", "completion", "words"),
    [
        # Of tests.support.tiny: the generation prompt is "/", which no conversation has.
        (build_tokenizer(chat=True), "7", r"does not begin .*: '/' becomes '\[a7\]'; what is"),
        (
            chat_tokenizer("{{ '[' }}{% if add_generation_prompt %}{{ '[a' }}{% endif %}"),
            "7",
            r"'\[a' becomes ''; what",
        ),
        (chat_tokenizer(), calling("add", {"a": 1}), "leaves out the call of 'add'"),
        (chat_tokenizer(), THOUGHT, "leaves out the thinking under 'reasoning_content'"),
    ],
)
def test_what_the_template_does_not_show_as_a_rollout_would_have_it_is_not_taught(tokenizer, completion, words):
    with pytest.raises(DataError, match=f"row 0: .*the chat template .*{words}"):
        encoded(tokenizer, (user("3+4="), completion))


def test_a_completion_may_be_blocks_of_text_as_a_prompt_may():
    blocks = [{"type": "text", "text": "1"}, {"type": "text", "text": "7"}]
    assert encoded(chat_tokenizer(), (user("8+9="), assistant(blocks))) == [[*ids_of("17"), EOS_ID]]


def test_thinking_is_taught():
    tokenizer, params = tools_tokenizer("thinking")
    taught = encoded(tokenizer, (user("3+4="), THOUGHT), params=params)[0]
    assert tokenizer.decode(taught) == "<think>\nbecause\n</think>\n\n7<|im_end|>"


@pytest.mark.parametrize(
    ("completion", "end"),
    [
        (assistant("DONE"), "<|user|>"),
        (calling("add", {"a": 1}), "<|observation|>"),
        (calling("add", '{"a": 1}', "I add."), "<|observation|>"),
    ],
)
def test_where_no_turn_is_closed_the_next_one_ends_the_answer(completion, end):
    """As GLM writes it by itself: <|user|> after an answer, <|observation|> after a call."""
    tokenizer, _ = tools_tokenizer("glm")
    tokenizer.eos_token = "<|pad|>"  # in the place of <|endoftext|>
    stops = tuple(tokenizer.convert_tokens_to_ids(["<|pad|>", "<|user|>", "<|observation|>"]))
    text = tokenizer.decode(
        encoded(tokenizer, (user("q"), completion), params=SamplingParams(200, stop_token_ids=stops))[0]
    )
    assert text.endswith(end) and text.count("<|") == 1
    without = tokenizer.decode(
        encoded(tokenizer, (user("q"), completion), params=SamplingParams(200, stop_token_ids=stops[:1]))[0]
    )
    assert without == text.removesuffix(end) + "<|pad|>"  # a rollout would not stop at any other


# -------------------------------------------------------------------------------------------------------------- batch


def call_of(params=PARAMS, **options):
    return RolloutCall(**{"num_generations": 1, "params": params, "version": 5, "state": STATE, "purpose": "train/3"}
                       | {"first_id": 40} | options)  # fmt: skip


def tasks_of(*pairs):
    return [RolloutTask(place, row) for place, row in enumerate(rows_of(build_tokenizer(), *pairs))]


def demonstrations(**options):
    tokenizer = build_tokenizer()
    return Demonstrations(
        DemonstrationEncoder(tokenizer, **options), lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    )


def test_the_columns_of_a_batch():
    tasks = tasks_of(("3+4=", "7"), ("9+9=", "18"))
    batch, report = demonstrations().run(tasks, call_of())
    assert [row.tolist() for row in batch["prompt_ids"]] == [ids_of("3+4="), ids_of("9+9=")]
    assert [row.tolist() for row in batch["completion_ids"]] == [[*ids_of("7"), EOS_ID], [*ids_of("18"), EOS_ID]]
    assert batch["completion_mask"].values.tolist() == [True] * 5
    assert batch["rollout_logprobs"].values.tolist() == [0.0] * 5
    assert batch["policy_version"].values.tolist() == [-1] * 5
    assert batch["oldest_version"].tolist() == [-1, -1]
    assert batch["prompt_length"].tolist() == [4, 4] and batch["completion_length"].tolist() == [2, 3]
    assert batch["group"].tolist() == batch["trajectory"].tolist() == [40, 41]
    assert batch["turn"].tolist() == [0, 0]
    assert batch["finish_reason"] == ["stop", "stop"]
    assert batch["prompt"] == ["3+4=", "9+9="] and batch["completion"] == ["7", "18"]
    assert batch["row"] == [{"completion": "7"}, {"completion": "18"}]
    assert batch["rewards"].dtype == torch.float64 and batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["function_rewards"] == [[1.0], [1.0]]
    assert report.failures == [] and set(report.seconds) == {"rollout"} and report.logged.result() == {}
    assert sample_records(3, batch, [DEMONSTRATION], (0, 0))[1]["rewards"] == {"demonstration": 1.0}


def test_a_rank_without_rows_has_the_same_columns():
    tasks = tasks_of(("3+4=", "7"))
    some, none = (demonstrations().run(part, call_of())[0] for part in (tasks, []))
    assert none.num_samples == 0 and set(none) == set(some)
    assert type(some).concat([none, some])["completion"] == ["7"]


def test_overlong_completions():
    """ "18" and its end are 3 tokens."""
    tasks = tasks_of(("3+4=", "7"), ("9+9=", "18"))
    short = SamplingParams(2, stop_token_ids=(EOS_ID,))
    with pytest.raises(DataError, match="max_completion_length=2, but 1 .* has 3 tokens .* first is row 1. Raise .* 3"):
        demonstrations().run(tasks, call_of(short))
    assert demonstrations().run(tasks, call_of(SamplingParams(3, stop_token_ids=(EOS_ID,))))[0].num_samples == 2


# ------------------------------------------------------------------------------------------------ before work starts


def checked(rows, params=PARAMS, max_length=None, **options):
    tokenizer = build_tokenizer()
    source = load_source(rows, PromptEncoder(tokenizer, max_prompt_length=None))
    check_demonstrations(source, DemonstrationEncoder(tokenizer, **options), params, max_length=max_length)


def test_a_dataset_without_completions_is_refused():
    with pytest.raises(DataError, match="needs a column `completion` besides `prompt`; the dataset has 'prompt', "):
        checked([{"prompt": "1", "answer": "2"}])


def test_every_row_of_a_dataset_is_looked_at():
    rows = [{"prompt": "3+4=", "completion": "7"} for _ in range(2100)]
    checked(rows)
    rows[2077] = {"prompt": "3+4=", "completion": None}
    with pytest.raises(DataError, match="row 2077: the completion None is missing"):
        checked(rows)


def test_all_overlong_rows_are_told_of_at_once():
    rows = [{"prompt": "3+4=", "completion": "7" * size} for size in (7, 8, 1, 11)]
    with pytest.raises(
        DataError, match="max_completion_length=8, but 2 .* longest has 12 tokens .* row 1. Raise .* 12"
    ):
        checked(rows)
    with pytest.raises(DataError, match="row 1. Raise .* 12"):
        checked(rows, max_length=16)
    with pytest.raises(DataError, match="row 1. The longest prompt leaves room for 11 .*: shorten or remove such rows"):
        checked(rows, max_length=15)
    checked(rows, SamplingParams(12, stop_token_ids=(EOS_ID,)))


def test_of_a_stream_the_first_row_is_looked_at():
    checked(lambda: iter([{"prompt": "3+4=", "completion": "7"}, {"prompt": "3+4=", "completion": None}]))
    with pytest.raises(DataError, match="row 0: the completion None"):
        checked(lambda: iter([{"prompt": "3+4=", "completion": None}]))
