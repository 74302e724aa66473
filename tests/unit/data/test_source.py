"""Every form of a dataset gives the same prompts; every unusable one is refused before work starts."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow
import pytest

from hybrid_rl.data import source as source_module
from hybrid_rl.data.prompts import PromptEncoder, PromptRoom
from hybrid_rl.data.source import SizedSource, StreamSource, load_source
from hybrid_rl.errors import DataError

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((1, 2), (10, 20), (3, 4), (100, 200))]
IdsOf: TypeAlias = Callable[[str], list[int]]


@pytest.fixture
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, max_prompt_length=None)


def sized(dataset: Any, encoder: PromptEncoder) -> SizedSource:
    source = load_source(dataset, encoder)
    assert isinstance(source, SizedSource)
    return source


def stream(dataset: Any, encoder: PromptEncoder) -> StreamSource:
    source = load_source(dataset, encoder)
    assert isinstance(source, StreamSource)
    return source


def sources_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hub = datasets.Dataset.from_list(rows)
    return {
        "list": rows,
        "stream": lambda: iter(rows),
        "table": pyarrow.Table.from_pylist(rows),
        "hub": hub,
        "hub, turned round": hub.select(range(len(rows) - 1, -1, -1)).select(range(len(rows) - 1, -1, -1)),
    }


FORMS = ["list", "stream", "table", "hub", "hub, turned round"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", ["x.png", ["x.png"], [None, "x.png"], {"bytes": b"1", "path": "x.png"}], ids=str)
def test_what_the_model_could_see_is_not_left_out(encoder: PromptEncoder, form: str, value: Any) -> None:
    """In whatever row it lies: that of a stream is found when it comes."""
    for place in (0, 2):
        rows = [{**row, "images": value if index == place else None} for index, row in enumerate(ROWS)]
        with pytest.raises(
            DataError, match=f"row {place} has something in the column 'images'.*audio and video cannot"
        ):
            list(load_source(sources_of(rows)[form], encoder))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [None, [], [None]], ids=str)
def test_an_empty_column_of_images_shows_nothing(encoder: PromptEncoder, form: str, value: Any) -> None:
    rows = [{**row, "images": value, "picture": "for rewards"} for row in ROWS]
    source: Any = load_source(sources_of(rows)[form], encoder)
    assert [row.prompt for row in source] == [row["prompt"] for row in ROWS]


def test_images_are_not_decoded_to_see_that_they_are_there(encoder: PromptEncoder) -> None:
    rows = {"prompt": ["1", "2"], "images": [None, {"bytes": b"no image at all", "path": None}]}
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.Image()})
    with pytest.raises(DataError, match="row 1 has something in the column 'images'"):
        load_source(datasets.Dataset.from_dict(rows, features=features), encoder)


class Indexed:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


class Repeatable:
    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


def as_sized(form: str, folder: Path) -> Any:
    """Others become one of these: the conversations of test_rendering.py come from all."""
    if form in ("jsonl", "json"):
        path = folder / f"data.{form}"
        path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
        return str(path)
    return {
        "list": ROWS,
        "tuple": tuple(ROWS),
        "indexed": Indexed(),
        "hub": datasets.Dataset.from_list(ROWS),
        "hub_transform": datasets.Dataset.from_dict({"at": [0, 1, 2, 3]}).with_transform(
            lambda batch: {key: [ROWS[at][key] for at in batch["at"]] for key in ("prompt", "answer")}
        ),
        "table": pyarrow.Table.from_pylist(ROWS),
    }[form]


@pytest.mark.parametrize("form", ["list", "tuple", "indexed", "hub", "hub_transform", "table", "jsonl", "json"])
def test_every_sized_form_gives_the_same_prompts(
    form: str, encoder: PromptEncoder, tmp_path: Path, ids_of: IdsOf
) -> None:
    source = sized(as_sized(form, tmp_path), encoder)
    assert len(source) == 4
    assert source.column_names == ("prompt", "answer")
    for index, row in enumerate(ROWS):
        found = source[index]
        assert (found.index, found.prompt) == (index, row["prompt"])
        assert found.prompt_ids == tuple(ids_of(row["prompt"]))
        assert dict(found.columns) == {"answer": row["answer"]}
    assert source.fingerprint == sized(ROWS, encoder).fingerprint
    for outside in (4, -1):
        with pytest.raises(IndexError):
            source[outside]


@pytest.mark.parametrize("form", ["function", "function_of_list", "iterable", "hub"])
def test_every_stream_gives_the_same_prompts_at_every_pass(form: str, encoder: PromptEncoder) -> None:
    dataset = {
        "function": lambda: iter(ROWS),
        "function_of_list": lambda: ROWS,
        "iterable": Repeatable(),
        "hub": datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    }[form]
    source = stream(dataset, encoder)
    assert source.column_names == ("prompt", "answer")
    reference = [sized(ROWS, encoder)[index] for index in range(4)]
    for _ in range(2):
        assert list(source) == reference
    assert list(source.iterate(start=3)) == reference[3:]
    assert list(source.iterate(start=4)) == []


def test_chunks_do_not_change_the_result(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sized(ROWS, encoder)
    monkeypatch.setattr(source_module, "CHUNK_ROWS", 3)
    chunked = sized(ROWS, encoder)
    assert [chunked[i] for i in range(4)] == [whole[i] for i in range(4)]
    messages = [{"role": "user", "content": "1"}]
    with pytest.raises(DataError, match="row 3: the prompt is messages, but that of row 0 is text"):
        sized([{"prompt": "1"}] * 3 + [{"prompt": messages}], encoder)


def test_fingerprint_depends_on_prompts_and_tokens(tokenizer: Any, encoder: PromptEncoder) -> None:
    prints = {
        sized(ROWS, encoder).fingerprint,
        sized(ROWS[:3], encoder).fingerprint,
        sized([ROWS[1], ROWS[0], *ROWS[2:]], encoder).fingerprint,
        sized(ROWS, PromptEncoder(tokenizer, max_prompt_length=5, overlong_prompts="truncate")).fingerprint,
        stream(Repeatable(), encoder).fingerprint,
        stream(lambda: ROWS[1:], encoder).fingerprint,
    }
    assert len(prints) == 6


def test_overlong_error_tells_the_whole_story(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=5)
    message = r"max_prompt_length=5, but 2 prompt\(s\) .* the longest has 8 tokens, the first is row 1\..*'drop'"
    with pytest.raises(DataError, match=message):
        sized(ROWS, encoder)
    with pytest.raises(DataError, match=r"but 1 prompt\(s\).* 6 tokens, the first is row 1"):
        list(stream(lambda: ROWS, encoder))


def test_what_no_limit_can_make_room_for_is_not_advised(tokenizer: Any) -> None:
    """A prompt of 8 tokens where the model has room for 7: to raise max_prompt_length would not help."""
    room = PromptRoom(7, "the model's positions=9 less max_completion_length=2")
    encoder = PromptEncoder(tokenizer, max_prompt_length=5, room=room)
    with pytest.raises(DataError, match=r"8 tokens.* Shorten them: the model's positions=9 less .* for 7 tokens"):
        sized(ROWS, encoder)
    with pytest.raises(DataError, match="Raise max_prompt_length to 6, or set"):
        sized(ROWS[:3], encoder)
    dropping = PromptEncoder(tokenizer, max_prompt_length=3, overlong_prompts="drop", room=PromptRoom(3, "the model"))
    for dataset in (ROWS, lambda: ROWS):
        with pytest.raises(DataError, match="the shortest has 4 tokens: shorten them: the model leaves room for 3"):
            for _ in load_source(dataset, dropping):  # type: ignore[union-attr]
                pass


def test_nothing_collects_garbage_while_rows_become_tokens(encoder: PromptEncoder, tokenizer: Any) -> None:
    """Lists of ids by the thousand would set it off again and again, over all that the libraries hold."""
    runs: list[str] = []
    count = lambda phase, _: runs.append(phase)  # noqa: E731
    rows = [{"prompt": f"{n % 10}+1="} for n in range(5000)]
    gc.collect()
    gc.callbacks.append(count)
    try:
        source = sized(rows, encoder)
        during = len(runs)
        with pytest.raises(DataError):
            sized([*rows, {"prompt": 7}], encoder)
    finally:
        gc.callbacks.remove(count)
    assert len(source) == 5000 and during <= 2  # one may be due when it is over
    assert gc.isenabled()


def test_the_tokenizer_makes_nothing_but_ids(tokenizer: Any, chat_tokenizer: Any, monkeypatch: Any) -> None:
    made: list[set[str]] = []
    call = type(tokenizer).__call__

    def recording(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = call(self, *arguments, **keywords)
        made.append(set(found))
        return found

    monkeypatch.setattr(type(tokenizer), "__call__", recording)
    sized(ROWS, PromptEncoder(tokenizer, max_prompt_length=None))
    sized([{"prompt": [{"role": "user", "content": "1"}]}], PromptEncoder(chat_tokenizer, max_prompt_length=None))
    assert made and all(one == {"input_ids"} for one in made)


def test_overlong_drop(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=5, overlong_prompts="drop")
    source = sized(ROWS, encoder)
    assert len(source) == 2
    assert [source[i].index for i in range(2)] == [0, 2]
    assert source[1].columns == {"answer": "7"}
    one_by_one = stream(lambda: ROWS, encoder)
    assert [row.index for row in one_by_one] == [0, 2]
    assert [row.index for row in one_by_one.iterate(start=1)] == [2]


def test_overlong_truncate_keeps_the_end(tokenizer: Any, ids_of: IdsOf) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=5, overlong_prompts="truncate")
    source = sized(ROWS, encoder)
    assert len(source) == 4
    assert source[3].prompt_ids == tuple(ids_of("+200="))
    assert source[3].prompt == "100+200="
    one_by_one = stream(lambda: ROWS, encoder)
    assert list(one_by_one) == [source[i] for i in range(4)]


def test_dropping_everything_is_an_error(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=2, overlong_prompts="drop")
    with pytest.raises(DataError, match="all 4 prompts are longer than max_prompt_length=2.*the shortest has 4 tokens"):
        sized(ROWS, encoder)
    with pytest.raises(DataError, match="4 rows in a row, up to row 3, are longer than max_prompt_length=2"):
        list(stream(lambda: ROWS, encoder))
    monkeypatch.setattr(source_module, "_MAX_DROPS_IN_A_ROW", 3)

    def endless() -> Iterator[dict[str, str]]:
        while True:
            yield {"prompt": "123"}

    with pytest.raises(DataError, match="3 rows in a row, up to row 2"):
        next(iter(stream(endless, encoder)))


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: lambda: rows], ids=["sized", "stream"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["1+1="], "row 0: '1[+]1=' is of type str; every row must be a dict"),
        ([{"prompt": "1"}, 5], "row 1: 5 is of type int"),
        ([{"question": "1"}], "row 0 has no `prompt` column; its columns are 'question'"),
        ([{"prompt": "1", "completions": "2"}], "row 0 has a column 'completions'"),
        ([{"prompt": "1", "a": 1}, {"prompt": "1", "b": 2}], r"row 1: .*missing: \['a'\], extra: \['b'\]"),
        ([{"prompt": "1"}, {"prompt": "1", "b": 2}], r"row 1: .*missing: \[\], extra: \['b'\]"),
        ([{"prompt": "1"}, {"prompt": None}], "row 1: the prompt None is of type NoneType"),
        ([{"prompt": "1"}, {"prompt": ""}], "row 1: the prompt '' is empty"),
        ([{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}]}], "row 1: .*messages.*row 0 is text"),
    ],
)
def test_bad_rows(wrap: Any, rows: Any, message: str, encoder: PromptEncoder) -> None:
    with pytest.raises(DataError, match=message):
        source = load_source(wrap(rows), encoder)
        list(source) if isinstance(source, StreamSource) else None


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "the splits 'train'; pass one"),
        ({"prompt": ["1"]}, "a dict with the keys .*prompt.*Dataset.from_dict"),
        ((row for row in ROWS), "a one-shot generator, which cannot start again"),
        (iter(ROWS), "a one-shot list_iterator"),
        (7, "the dataset 7 is of type int"),
        (b"data.jsonl", "is of type bytes"),
        (None, "the dataset None is of type NoneType"),
        (lambda: 5, "the dataset function returned 5"),
        ("no/such.jsonl", "'no/such.jsonl' is neither a file nor a folder"),
        (datasets.Dataset.from_dict({"prompts": ["1"]}), "no `prompt` column; .*nearest name is 'prompts'"),
        (pyarrow.table({"text": ["1"]}), "the table has no `prompt` column"),
        (datasets.Dataset.from_dict({"prompt": []}), "the dataset is empty"),
        (pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), "the dataset is empty"),
    ],
)
def test_unusable_datasets(dataset: Any, message: str, encoder: PromptEncoder) -> None:
    with pytest.raises(DataError, match=message):
        load_source(dataset, encoder)


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("jsonl", b'{"prompt": "1"}\n\n{"prompt": \n', r"data\.jsonl, line 3: not valid JSON"),
        ("jsonl", b'[\n{"prompt": "1"}\n]\n', "line 1: .*a JSON array"),
        ("jsonl", b'[{"prompt": "1"}]\n', r"line 1: \[\{'prompt': '1'\}\] is not an object"),
        ("jsonl", b"\n", "the dataset is empty"),
        ("jsonl", b'{"prompt": "1"}\n{"prompt": " "}\n', "row 1: the prompt ' ' is empty"),
        ("json", b'{"prompt": "\xe9"}\n', "line 1: not valid JSON: not UTF-8, but another encoding .*iconv -f LATIN1"),
        ("json", '{"prompt": "1"}'.encode("utf-16"), "perhaps UTF-16"),
        ("json", b'[{"prompt": "1"}, 5]', "entry 1: 5 is not an object"),
        ("json", b'{"prompt": ' + b"[" * 100_000 + b"}", "line 1: not valid JSON"),
        ("json", b"", "the dataset is empty"),
    ],
)
def test_bad_json(suffix: str, content: bytes, message: str, encoder: PromptEncoder, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_source(path, encoder)


def test_bad_files_and_folders(encoder: PromptEncoder, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt\n1\n")
    with pytest.raises(DataError, match=r"ends in '.csv'; use .jsonl, .json or .parquet"):
        load_source(tmp_path / "data.csv", encoder)
    (tmp_path / "data.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"data.parquet' cannot be read"):
        load_source(tmp_path / "data.parquet", encoder)
    with pytest.raises(DataError, match="was not saved by datasets' save_to_disk"):
        load_source(tmp_path, encoder)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read: .*save the dataset again"):
        load_source(tmp_path, encoder)
    datasets.DatasetDict(a=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="the splits 'a'; pass one"):
        load_source(tmp_path / "splits", encoder)


def test_a_stream_that_cannot_be_resumed_or_restarted(encoder: PromptEncoder) -> None:
    source = stream(lambda: ROWS, encoder)
    with pytest.raises(DataError, match="ended after 4 rows of pass 0, but 5 were taken before"):
        list(source.iterate(start=5))
    once = iter(ROWS)
    exhausted = stream(lambda: once, encoder)
    assert len(list(exhausted)) == 3  # the first row was read to check it
    with pytest.raises(DataError, match="yielded no row in pass 1; pass a function that returns a new iterator"):
        list(exhausted.iterate(epoch=1))
