"""One conversation has one rendering: from whatever container its row comes, and in whatever form its parts are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.data.rendering import MessageRenderer
from hybrid_rl.data.source import load_source
from hybrid_rl.errors import DataError
from tests.support.agents.chat_forms import FAMILIES, build_tokenizer, tool, user

CHATML = FAMILIES["hermes"].replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ 'hush' }}"
    "{% endif %}{% if style is defined %}{{ style }}{% endif %}",
)


def calling(name: str, arguments: Any, content: Any = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def asked(name: str, arguments: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """A row with keys that others lack: in calls, two levels deep, in schemas and in keywords. (Their order is that of
    all keys of a column, since Arrow keeps no other.)"""
    return {
        "prompt": [user("q"), calling(name, arguments), {"role": "tool", "name": name, "content": "1"}, user("r")],
        "completion": [calling(name, arguments, None)],
        "tools": [tool(name, **dict.fromkeys(arguments, "string"))],
        "chat_template_kwargs": kwargs,
        "answer": name,
    }


ROWS = [
    asked("add", {"a": 1, "to": {"x": 2, "all": [{"y": 3}, {"z": 4}]}}, enable_thinking=False),
    asked("find", {"to": {"w": 5}, "city": "Brno"}, style="brief"),
]


def ids_by_hand(tokenizer: Any) -> list[list[int]]:
    """The independent reference: what transformers makes of the rows as they stand here."""
    return [
        tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], add_generation_prompt=True, **row["chat_template_kwargs"]
        )["input_ids"]
        for row in ROWS
    ]


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(CHATML, "<|im_end|>")


@pytest.fixture
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, max_prompt_length=None)


def lines(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def parquet(folder: Path, dataset: Any) -> Path:
    pyarrow.parquet.write_table(dataset.data.table, folder / "rows.parquet")
    return folder / "rows.parquet"


def hub(**options: Any) -> Any:
    return datasets.Dataset.from_list(ROWS, **options)


def saved(folder: Path) -> Path:
    hub().save_to_disk(folder / "saved")
    return folder / "saved"


def split(folder: Path, name: str) -> Any:
    """One of two splits in a folder as on a hub."""
    (folder / "data").mkdir()
    for other in ("train", "test"):
        hub().to_parquet(folder / "data" / f"{other}-00000-of-00001.parquet")
    return datasets.load_dataset(str(folder), split=name, cache_dir=str(folder / "cache"))


def loaded(folder: Path, kind: str, path: Path, **options: Any) -> Any:
    cache = str(folder / "cache")
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache, **options)


FORMS: dict[str, Callable[[Path], Any]] = {
    "list": lambda folder: ROWS,
    "jsonl": lines,
    "function": lambda folder: lambda: iter(ROWS),
    "table": lambda folder: pyarrow.Table.from_pylist(ROWS),
    "frame": lambda folder: pandas.DataFrame(ROWS),
    "parquet": lambda folder: parquet(folder, hub()),
    "parquet, Json": lambda folder: parquet(folder, hub(on_mixed_types="use_json")),
    "Dataset": lambda folder: hub(),
    "Dataset, Json": lambda folder: hub(on_mixed_types="use_json"),
    "Dataset of numpy": lambda folder: hub().with_format("numpy"),
    "Dataset of tables": lambda folder: hub().with_format("arrow"),
    "Dataset of frames": lambda folder: hub().with_format("pandas"),
    "Dataset, transformed": lambda folder: hub().with_transform(lambda batch: batch),
    "save_to_disk": saved,
    "split train": lambda folder: split(folder, "train"),
    "split test": lambda folder: split(folder, "test"),
    "load_dataset of jsonl": lambda folder: loaded(folder, "json", lines(folder)),
    "load_dataset of parquet": lambda folder: loaded(folder, "parquet", parquet(folder, hub())),
    "stream of parquet": lambda folder: loaded(folder, "parquet", parquet(folder, hub()), streaming=True),
    "stream, mapped": lambda folder: hub().to_iterable_dataset().map(lambda row: row),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_prompt_from_every_container(
    form: str, tokenizer: Any, encoder: PromptEncoder, tmp_path: Path
) -> None:
    found = list(load_source(FORMS[form](tmp_path), encoder))  # type: ignore[arg-type]
    assert [list(row.prompt_ids) for row in found] == ids_by_hand(tokenizer)
    for row, expected in zip(found, ROWS, strict=True):
        assert row.prompt == expected["prompt"] and row.columns["completion"] == expected["completion"]
        assert row.columns["tools"] == expected["tools"] and row.columns["answer"] == expected["answer"]
        assert row.columns["chat_template_kwargs"] == expected["chat_template_kwargs"]


@pytest.mark.parametrize("form", ["list", "jsonl", "Dataset, Json", "parquet, Json", "function"])
def test_a_null_that_a_row_has_itself_stays(
    form: str, tokenizer: Any, encoder: PromptEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": [user("q"), calling(name, arguments), {"role": "tool", "content": "1"}]}
            for name, arguments in (("add", {"a": 1, "unit": None}), ("find", {"city": "Brno"}))]  # fmt: skip
    monkeypatch.setitem(globals(), "ROWS", rows)
    found = list(load_source(FORMS[form](tmp_path), encoder))  # type: ignore[arg-type]
    texts = [tokenizer.decode(row.prompt_ids) for row in found]
    assert '{"a": 1, "unit": null}' in texts[0] and '{"city": "Brno"}' in texts[1]


def test_a_conversation_in_another_column_is_read_alike(tokenizer: Any) -> None:
    """Columns that only rewards get are left as Arrow has them, conversations are not."""
    rows = [{"question": row["prompt"], "meta": {name: 1}} for name, row in zip("ab", ROWS, strict=True)]
    encoder = PromptEncoder(tokenizer, max_prompt_length=None, prompt_column="question")
    for form in (rows, datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).with_format("numpy")):
        found: Any = load_source(form, encoder)
        assert [found[place].prompt for place in (0, 1)] == [row["prompt"] for row in ROWS]
        assert found[1].columns["meta"]["b"] == 1
    assert found[1].columns["meta"] == {"a": None, "b": 1}


def test_a_map_of_arrow_is_an_object(encoder: PromptEncoder, tokenizer: Any) -> None:
    kind: Any = pyarrow.struct(
        [("name", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), pyarrow.int64()))]
    )
    call = pyarrow.struct([("type", pyarrow.string()), ("function", kind)])
    message = pyarrow.struct(
        [*((n, pyarrow.string()) for n in ("role", "content")), ("tool_calls", pyarrow.list_(call))]
    )
    rows = [{"prompt": [user("q"), calling("add", {"a": 1, "b": 2}), {"role": "tool", "content": "3"}]}]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema([("prompt", pyarrow.list_(message))]))
    found: Any = load_source(table, encoder)
    assert '"arguments": {"a": 1, "b": 2}}' in tokenizer.decode(found[0].prompt_ids)


# --------------------------------------------------------------------------------------------------- forms of messages

ONE_ARGUMENT = {
    "object": "{{ c.function.arguments | tojson }}",
    "text": "{{ c.function.arguments + '' }}",
}
# As templates of DeepSeek's kind: the first shows calls only beside a content of None, the second adds the content.
CONTENTS = {
    "none": "{% if m.role == 'assistant' and m.content is none %}<calls>{% for c in m.tool_calls %}ARGS{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}",
    "none or added": "{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if m.content is none %}<calls>{% else %}{{ m.content + '<calls>' }}{% endif %}"
    "{% for c in m.tool_calls %}ARGS{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}",
    "undefined": "{% if m.content is defined %}<{{ m.role }}>{{ m.content }}{% else %}<calls>"
    "{% for c in m.tool_calls %}ARGS{% endfor %}{% endif %}",
    "any": "{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}ARGS{% endfor %}{% else %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}",
}
SHOWN = '<user>q<calls>f({"a": 1})<tool>1<assistant>'


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("arguments", ONE_ARGUMENT)
def test_a_call_is_shown_whatever_form_it_has(contents: str, arguments: str) -> None:
    """Arguments as object and as JSON text, no content as None, as "", as an empty list and as nothing at all."""
    each = CONTENTS[contents].replace("ARGS", "{{ c.function.name }}(" + ONE_ARGUMENT[arguments] + ")")
    template = "{% for m in messages %}" + each + "{% endfor %}<assistant>"
    tokenizer = build_tokenizer(template, "</s>")
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)
    for given in ({"a": 1}, '{"a": 1}'):
        for content in (None, "", [], "absent"):
            message = calling("f", given, content)
            if content == "absent":
                del message["content"]
            if content == []:
                message["tool_calls"] = [{"name": "f", "arguments": given, "id": None}]  # without OpenAI's wrapping
            ids = encoder.encode([[user("q"), message, {"role": "tool", "content": "1"}]])[0]
            assert tokenizer.decode(ids) == SHOWN


def test_text_that_is_not_an_object_stays_text(tokenizer: Any) -> None:
    def arguments(value: Any) -> str:
        text = MessageRenderer(tokenizer).render([user("q"), calling("f", value)], "closed")
        return text.rpartition('"arguments": ')[2].partition("}\n</tool_call>")[0]

    assert arguments("{broken") == '"{broken"' and arguments("[1]") == '"[1]"'
    assert arguments(None) == arguments("") == arguments({}) == "{}"


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "</s>")
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)
    with pytest.raises(DataError, match=r"row 4: .*the chat template leaves out the call of 'add'; use a template"):
        encoder.encode([[user("q"), calling("add", {"a": 1}), {"role": "tool", "content": "1"}]], [4])


@pytest.mark.parametrize(
    ("shown", "question", "answer"),
    [
        ("", "add 1", calling("add", {"a": 1})),
        ("{{ (tools or []) | tojson }}", "q", calling("add", {"a": 1})),
        ("{{ '<call>' + m.tool_calls[0].function.name if m.tool_calls }}", "q",
         {"role": "assistant", "content": "", "tool_calls": calling("add", {"a": 1})["tool_calls"] * 2}),
    ],
    ids=["in the question", "in the schema", "in another call"],
)  # fmt: skip
def test_a_name_that_stands_elsewhere_does_not_stand_for_a_call(shown: str, question: str, answer: Any) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + shown + "{% endfor %}"
    encoder = PromptEncoder(build_tokenizer(template, "</s>"), max_prompt_length=None)
    prompt = [user(question), answer, {"role": "tool", "content": "1"}]
    columns = [{"tools": [tool("add", a="integer")] if "tools or" in shown else None}]
    with pytest.raises(DataError, match=r"row 4: .*the chat template leaves out the call of 'add'"):
        encoder.encode([prompt], [4], columns=columns)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_that_the_template_does_not_know_is_refused(tokenizer: Any, key: str) -> None:
    """One that shows it after the last message of a user only knows it. Servers may write it under two names."""
    prompt = [user("q"), {"role": "assistant", "content": "a", key: "because"}, user("r")]
    with pytest.raises(DataError, match=f"row 4: .*the chat template leaves out the thinking under '{key}'"):
        PromptEncoder(tokenizer, max_prompt_length=None).encode([prompt], [4])
    knows = PromptEncoder(build_tokenizer(FAMILIES["thinking"], "<|im_end|>"), max_prompt_length=None)
    prompt[1] |= {"reasoning_content": "because"}
    plain = [user("q"), {"role": "assistant", "content": "a", key: None}, user("r")]
    assert knows.encode([prompt]) == knows.encode([plain])


def test_a_call_in_the_old_form_is_refused(encoder: PromptEncoder) -> None:
    call = {"function_call": {"name": "add", "arguments": "{}"}}
    for content in (None, "", "a"):
        with pytest.raises(DataError, match="row 4, message 1: .*function_call.*; give it as tool_calls"):
            encoder.encode([[user("q"), {"role": "assistant", "content": content, **call}, user("r")]], [4])
    unused = {"role": "assistant", "content": "a", "function_call": None}
    assert encoder.encode([[user("q"), unused, user("r")]])


@pytest.mark.parametrize("calls", ["add", ["add"], [{"function": {"arguments": {}}}], [{"function": "add"}],
                                   numpy.array(calling("add", {})["tool_calls"] * 2)], ids=str)  # fmt: skip
def test_calls_without_a_name_are_refused(encoder: PromptEncoder, calls: Any) -> None:
    prompt = [user("q"), {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    with pytest.raises(DataError, match="row 0, message 1: the tool_calls .* cannot be used; give a list such as"):
        encoder.encode([prompt])


# ------------------------------------------------------------------------------------------------- columns of templates


def test_schemas_and_keywords_may_be_json_text(encoder: PromptEncoder, tokenizer: Any) -> None:
    rows = [{**row, "tools": json.dumps(row["tools"]), "chat_template_kwargs": json.dumps(row["chat_template_kwargs"])}
            for row in ROWS]  # fmt: skip
    found: Any = load_source(rows, encoder)
    assert [list(found[place].prompt_ids) for place in (0, 1)] == ids_by_hand(tokenizer)
    rows = [{**row, "tools": [json.dumps(schema) for schema in row["tools"]]} for row in ROWS]
    found = load_source(rows, encoder)
    assert [list(found[place].prompt_ids) for place in (0, 1)] == ids_by_hand(tokenizer)


def test_a_row_goes_before_the_configuration(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=None, chat_template_kwargs={"style": "long"})
    rows = [{"prompt": [user("q")], "chat_template_kwargs": own}
            for own in (None, {"style": "brief"}, {}, {"style": None}, '{"style": null}')]  # fmt: skip
    found: Any = load_source(rows, encoder)
    ends = [tokenizer.decode(found[place].prompt_ids).rpartition("assistant\n")[2] for place in range(5)]
    assert ends == ["long", "brief", "long", "long", "long"]


@pytest.mark.parametrize("empty", [None, "", [], "null", "[]"], ids=repr)
def test_rows_without_tools(encoder: PromptEncoder, empty: Any) -> None:
    rows = [{"prompt": [user("q")], "tools": empty}]
    assert load_source(rows, encoder).fingerprint == load_source([{"prompt": [user("q")]}], encoder).fingerprint


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tools", ["add"], "row 1: the column 'tools' is for the chat template, but 'add' cannot be used .no JSON"),
        ("tools", {"a": 1}, "no list of schemas.; give a list of JSON schemas of functions, or rename the column"),
        ("tools", [{"type": "function"}], "no list of schemas"),
        ("tools", 7, "no list of schemas"),
        ("tools", numpy.array([tool("add", a="integer")] * 2), "an array of numpy.; give the DataFrame"),
        ("chat_template_kwargs", numpy.array([1, 2]), "an array of numpy.; give the DataFrame"),
        ("tools", "{broken", "no JSON: "),
        ("chat_template_kwargs", ["a"], "'chat_template_kwargs' is for the chat template, but .* .no mapping.; give"),
        ("chat_template_kwargs", {"tokenize": True}, "the library sets tokenize itself"),
        ("chat_template_kwargs", {"chat_template": "x"}, "the library sets chat_template itself"),
        ("chat_template_kwargs", {"thinking": True}, "has 'thinking', but the chat template does not use a variable"),
    ],
    ids=str,
)
def test_what_a_template_cannot_get_is_refused(encoder: PromptEncoder, column: str, value: Any, words: str) -> None:
    rows = [{"prompt": [user("q")], column: None}, {"prompt": [user("q")], column: value}]
    for dataset in (rows, lambda: iter(rows)):
        with pytest.raises(DataError, match=words):
            list(load_source(dataset, encoder))  # type: ignore[arg-type]


def test_columns_for_a_template_that_is_not_used_are_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(DataError, match="row 0: the column 'tools' is for the chat template, but the prompt is text"):
        load_source([{"prompt": "q", "tools": [tool("add", a="integer")]}], encoder)
    silent = build_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", "</s>")
    with pytest.raises(DataError, match="row 0: the column 'tools' has add, but the chat template does not show tools"):
        load_source(
            [{"prompt": [user("q")], "tools": [tool("add", a="integer")]}],
            PromptEncoder(silent, max_prompt_length=None),
        )


def test_a_column_that_something_else_uses_is_left_to_it(tokenizer: Any) -> None:
    rows = [{"prompt": [user("q")], "tools": ["add"], "chat_template_kwargs": None}]
    unused = {"tools": "", "chat_template_kwargs": "agents have none"}
    encoder = PromptEncoder(tokenizer, max_prompt_length=None, unused_columns=unused)
    plain = load_source([{"prompt": [user("q")]}], encoder)
    assert load_source(rows, encoder).fingerprint == plain.fingerprint
    with pytest.raises(DataError, match="'chat_template_kwargs', but agents have none; drop or rename it"):
        load_source([{**rows[0], "chat_template_kwargs": {"style": "brief"}}], encoder)
