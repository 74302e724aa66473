"""A judge behind a real local endpoint: right answers, errors, timeouts, answers that say nothing."""

import sys

import cloudpickle
import numpy as np
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import LLMJudge, RewardInput, RewardRunner
from tests.unit.rewards.chat_server import ChatServer, Reply

NAN = np.nan


def samples(*texts):
    return [
        RewardInput(SampleKey(i), "request", text, [1], {"answer": "gold"}, group=0) for i, text in enumerate(texts)
    ]


def judge(server, **options):
    options = {"api_key_env": None, "num_retries": 0, "timeout_seconds": 5.0} | options
    return LLMJudge(server.url, "some-model", **options)


def grade(content):
    """The grade is the completion itself."""
    return Reply(f"I think <score>{content.split('<response>')[1].split('</response>')[0].strip()}</score>")


DOWN = Reply(status=500, raw=b'{"error": {"message": "overloaded"}}')
NAMED = "llm_judge: the answer of http://127.0.0.1"
# completion: what the server answers instead of its grade, once or always; the value; words of the failure.
CASES = {
    "7": (None, None, 7.0, None),
    "0": (None, None, 0.0, None),
    "2.5": (None, None, 2.5, None),
    "no idea": (None, None, NAN, None),  # an answer that says nothing leaves its sample unscored
    "99": (None, None, NAN, None),
    "-1": (None, Reply(raw=b'{"choices": [{"message": {"content": null}}]}'), NAN, None),
    "6": (DOWN, None, 6.0, None),
    "5": (DOWN, DOWN, NAN, "overloaded"),
    "4": (None, Reply(raw=b"no json"), NAN, ""),  # the client says what is wrong with it
    "3": (None, Reply(raw=b'{"choices": []}'), NAN, NAMED),
    "2": (None, Reply(raw=b'{"choices": null}'), NAN, NAMED),
    "1": (None, Reply(raw=b'{"choices": [{}]}'), NAN, NAMED),
    "8": (None, Reply(raw=b"{}"), NAN, NAMED),
}


def test_grades_come_from_the_endpoint_and_what_fails_concerns_its_sample():
    """Errors of the server are tried again; the other function scores what the judge leaves unscored."""
    seen = []

    def answer(content):
        graded = grade(content)
        text = graded.text.split("<score>")[1].split("<")[0]
        seen.append(text)
        once, always, *_ = CASES[text]
        return always or (once if once and seen.count(text) == 1 else graded)

    with (
        ChatServer(answer) as server,
        RewardRunner([judge(server, num_retries=1, extra_body={"top_k": 3}), lambda prompts: [1.0] * 13]) as runner,
    ):
        result = runner.score(samples(*CASES), None)
    assert runner.names == ["llm_judge", "<lambda>"]
    np.testing.assert_array_equal(result.values[:, 0], [value for _, _, value, _ in CASES.values()])
    failed = {failure.key.trajectory: failure for failure in result.failures}
    expected = {place: words for place, (*_, words) in enumerate(CASES.values()) if words is not None}
    assert failed.keys() == expected.keys() and {failure.reason for failure in failed.values()} == {"raised"}
    assert all(words in failed[place].detail for place, words in expected.items())
    assert NAMED not in failed[8].detail
    assert result.metrics == {"llm_judge/unparsed": [(3 / 13, 13)]}
    assert len(seen) == len(CASES) + 2  # those that were down
    body = server.requests[0]
    assert (body["model"], body["temperature"], body["top_k"]) == ("some-model", 0.0, 3)
    assert "request" in body["messages"][0]["content"] and len(body["messages"]) == 1


def test_a_timeout_fails_only_its_sample():
    def answer(content):
        reply = grade(content)
        return Reply(reply.text, delay_seconds=3.0) if "<score>5<" in reply.text else reply

    with ChatServer(answer) as server, RewardRunner(judge(server, timeout_seconds=0.5)) as runner:
        result = runner.score(samples("7", "5"), None)
    np.testing.assert_array_equal(result.rewards, [7.0, NAN])
    assert "APITimeoutError" in result.failures[0].detail


def test_no_more_requests_at_once_than_allowed():
    def answer(content):
        return Reply(grade(content).text, delay_seconds=0.03)

    with ChatServer(answer) as server, RewardRunner(judge(server, max_concurrency=2)) as runner:
        inputs = samples("1", "2", "3", "4", "5")
        futures = [runner.submit([sample], None) for sample in inputs]
        assert runner.join(inputs, [part for f in futures for part in f.result(30)]).rewards.tolist() == [1, 2, 3, 4, 5]
    assert server.most_at_once == 2


def longest_first(content):
    a, b = (content.split(f"<response_{name}>")[1].split(f"</response_{name}>")[0].strip() for name in "ab")
    if len(a) == len(b):
        return Reply("<winner>A</winner>")  # a liking for the first place
    return Reply(f"<winner>{'A' if len(a) > len(b) else 'B'}</winner>")


def test_pairs_of_a_group():
    with ChatServer(longest_first) as server:
        pairwise = judge(server, mode="pairwise")
        with pytest.raises(ConfigError, match="'llm_judge' compares the completions of a prompt"):
            RewardRunner(pairwise)
        with RewardRunner(pairwise, score_by="group") as runner:
            result = runner.score(samples("ccc", "a", "bb", "dd"), None)
    # ccc beats all three, bb and dd beat a and share their own comparison.
    np.testing.assert_allclose(result.rewards, [1.0, 0.0, 0.5, 0.5])
    assert len(server.requests) == 12


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with ChatServer(grade) as server, RewardRunner(judge(server, api_key_env="JUDGE_KEY")) as runner:
        runner.score(samples("7"), None)
    assert server.keys == ["Bearer secret"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        LLMJudge("http://localhost:1/v1", "m", api_key_env="JUDGE_KEY")


def test_a_judge_is_sent_to_processes_without_its_key():
    with ChatServer(grade) as server:
        given = judge(server)
        with RewardRunner(given) as runner:  # it has a client by then
            runner.score(samples("7"), None)
        copied = cloudpickle.loads(cloudpickle.dumps(given))
        with RewardRunner(copied, num_processes=1) as runner:
            assert runner.score(samples("3"), None).rewards.tolist() == [3.0]


def test_unusable_settings_are_refused(monkeypatch):
    for wrong in ({"max_concurrency": 0}, {"timeout_seconds": 0}, {"num_retries": -1}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LLMJudge("http://localhost:1/v1", "m", api_key_env=None, **wrong)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match="pip install openai"):
        LLMJudge("http://localhost:1/v1", "m", api_key_env=None)
