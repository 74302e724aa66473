"""Reward models, packed: against each module's own padded forward, with tokens as they are and text tokenised again."""

import copy
import dataclasses

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import load_config, resolve
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.classifier import last_token_row, sequence_scores, verify_scores
from hybrid_rl.rewards import RewardModelEntry
from hybrid_rl.workers.reward_model import RewardModel, RewardModels
from tests.support.inside.wrapping import wrap
from tests.support.tiny import EOS_ID, VOCABULARY, build_tokenizer, ids_of
from tests.unit.models.families import BASE, SUPPORTED
from tests.unit.models.families import VOCABULARY as FAMILY_VOCABULARY

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1}
# SDPA leaves out Gemma-2's soft-capping; eager attention takes its softmax in float32, whatever the dtype.
EAGER, EAGER_TOLERANCE = {"gemma2"}, 1e-5
PROMPTS = ("1+2=", "1+2=", "12+30=", "7")
COMPLETIONS = ("3", "45 is it", "", "9 or 10")


def build_config(family, **changes):
    name, settings = SUPPORTED[family].config, SUPPORTED[family].settings
    base = {} if "n_embd" in settings else BASE
    return getattr(transformers, name)(**{**base, **settings, **changes})


def classifier(family="qwen2", dtype=torch.float32, seed=0, **changes):
    torch.manual_seed(seed)
    config = build_config(family, num_labels=1, **changes)
    attention = "eager" if family in EAGER else "sdpa"
    module = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in module.parameters():  # so that every part of it shows in the scores
            if parameter.dim() > 1:
                parameter.mul_(5)
    return module.to(dtype).eval()


def test_a_pass_that_does_not_fit_is_scored_in_halves(monkeypatch):
    model = RewardModel(
        RewardModelEntry("rm", classifier(vocab_size=len(VOCABULARY)), build_tokenizer()), settings(), RankContext()
    )
    batch = sample_batch()
    expected = model.scores(batch)
    num_tokens = []

    def small_memory(own, module, token_ids):
        num_tokens.append(token_ids.numel())
        return own(module, token_ids) if token_ids.numel() <= 16 else torch.empty(1 << 60, dtype=torch.uint8)

    wrap(monkeypatch, torch.nn.Embedding, "forward", small_memory)
    torch.testing.assert_close(model.scores(batch), expected, rtol=0, atol=1e-6)
    assert num_tokens[0] > 16 and len(num_tokens) >= 3


def test_micro_batches_of_another_size_are_those_of_reward_models_too(monkeypatch):
    entry = RewardModelEntry("rm", classifier(vocab_size=len(VOCABULARY)), build_tokenizer())
    models, batch, num_tokens = RewardModels({0: entry}, ["rm"], settings(), RankContext()), sample_batch(), []
    wrap(
        monkeypatch,
        torch.nn.Embedding,
        "forward",
        lambda own, module, token_ids: num_tokens.append(token_ids.numel()) or own(module, token_ids),
    )
    expected = models.late_scores(batch).values[0]
    models.reconfigure(settings(tokens_per_micro_batch=16))
    assert models.late_scores(batch).values[0] == pytest.approx(expected, abs=1e-6)
    assert num_tokens[0] > 16 and len(num_tokens) >= 3 and max(num_tokens[1:]) <= 16


def settings(**keys):
    loaded, given = load_config({"max_completion_length": 8, "num_generations": 2} | keys)
    return resolve(loaded, given)


def sample_batch(prompts=PROMPTS, completions=COMPLETIONS, *, eos=True):
    ids = [[*ids_of(text), EOS_ID] if eos else ids_of(text) for text in completions]
    texts = [prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt) for prompt in prompts]
    return Batch(
        {
            "prompt_ids": Jagged.from_rows([ids_of(text) for text in texts], torch.int64),
            "completion_ids": Jagged.from_rows(ids, torch.int64),
            "prompt": list(prompts),
            "completion": list(completions),
            "trajectory": torch.arange(100, 100 + len(prompts)),
            "turn": torch.zeros(len(prompts), dtype=torch.int64),
        }
    )


def padded_scores(module, sequences, side="right"):
    """The module's own forward: all sequences in one padded batch."""
    pad, longest = module.config.pad_token_id, max(map(len, sequences))
    fill = [[pad] * (longest - len(ids)) for ids in sequences]
    rows = [[*ids, *rest] if side == "right" else [*rest, *ids] for ids, rest in zip(sequences, fill, strict=True)]
    mask = torch.tensor([[1] * len(ids) + [0] * len(rest) for ids, rest in zip(sequences, fill, strict=True)])
    with torch.no_grad():
        return module(input_ids=torch.tensor(rows), attention_mask=mask).logits[:, 0]


def own(module, tokenizer=None, **keys):
    entry = RewardModelEntry("rm", module, tokenizer or build_tokenizer())
    return RewardModel(entry, settings(**keys), RankContext())


# ------------------------------------------------------------------------------------------------------ the forward


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_are_those_of_the_padded_forward(family, dtype):
    module = classifier(family, dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, FAMILY_VOCABULARY, (n,), generator=generator).tolist() for n in (5, 3, 9)]
    sequences = [(prompts[0], [7, 8, 2]), (prompts[0], [4]), (prompts[1], []), (prompts[2], [3, 3, 5, 6, 1])]
    sequences += [(prompts[0], [7, 8, 2]), (prompts[2], [3, 3, 7])]
    plain, whole = copy.deepcopy(module), [[*prompt, *rest] for prompt, rest in sequences]
    if family in EAGER:  # masked rows of padding are NaN in float64
        expected = torch.cat([padded_scores(plain, [ids]) for ids in whole])
    else:
        expected = padded_scores(plain, whole)
    model = CausalLM(module)
    with torch.no_grad():
        found = sequence_scores(model, sequences)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    gap = (found - expected.to(found.dtype)).abs().max() / expected.abs().max()
    assert gap < max(TOLERANCE[dtype], EAGER_TOLERANCE if family in EAGER else 0.0)
    assert expected.abs().min() > 1e-3
    assert verify_scores(model) < max(TOLERANCE[dtype], EAGER_TOLERANCE)


def test_trailing_padding_tokens_are_not_the_last_token():
    module = classifier()
    pad = module.config.pad_token_id
    expected = padded_scores(copy.deepcopy(module), [[5, 6, 7], [5, 6], [5, pad, 6]])
    sequences = [([5, 6], [7, pad, pad]), ([5, 6, pad], [pad]), ([5], [pad, 6])]
    with torch.no_grad():
        torch.testing.assert_close(sequence_scores(CausalLM(module), sequences), expected, rtol=1e-5, atol=1e-5)


def test_a_shared_prompt_is_computed_once():
    row = last_token_row([([5, 6, 7], [1, 2]), ([5, 6, 7], [3]), ([8], [])], None, torch.device("cpu"))
    # The shared prompt, the sequence alone, then the completions; each with a place for the token after its last one.
    assert row.token_ids.tolist() == [5, 6, 7, 8, 0, 1, 2, 0, 3, 0]
    assert row.sources.tolist() == [6, 8, 3]


def test_a_model_whose_packed_scores_differ_is_refused():
    module = classifier()
    model = CausalLM(module)
    forward = module.forward
    module.forward = lambda *args, **kwargs: dataclasses.replace(
        (output := forward(*args, **kwargs)), logits=output.logits + 30.0
    )
    with pytest.raises(ModelError, match="other scores with packed sequences"):
        verify_scores(model)


# -------------------------------------------------------------------------------------------------------- the role


@pytest.mark.parametrize("num_more", [0, 1])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_score_does_not_depend_on_the_policys_tokenizer(is_chat, num_more):
    """An unused token more, and the policy's tokenizer is another: the score is read at the same place, the end of the
    conversation as the template writes it, where TRL reads it. Text ends with its last word: no token ends it."""
    module = classifier(vocab_size=len(VOCABULARY) + 1)
    tokenizer = build_tokenizer(chat=is_chat)
    tokenizer.add_tokens(["never used"][:num_more])
    if is_chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<eos>' + '=' }}{% endfor %}"
    ends = [EOS_ID, *ids_of("=")] if is_chat else []
    prompts = [[{"role": "user", "content": prompt}] if is_chat else prompt for prompt in PROMPTS]
    sequences = [[*ids_of(p), *ends, *ids_of(c), *ends] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = padded_scores(copy.deepcopy(module), sequences)
    model = own(module, tokenizer)
    for eos in (True, False):  # sampled or not: of a completion that was cut off the end is the template's too
        found = model.scores(sample_batch(prompts, eos=eos))
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def test_what_samples_of_a_prompt_have_in_common_is_computed_once(monkeypatch):
    model = own(classifier(vocab_size=len(VOCABULARY)))
    rows, forward = [], model.model.row_values
    monkeypatch.setattr(model.model, "row_values", lambda row: rows.append(row.token_ids.tolist()) or forward(row))
    model.scores(sample_batch(("1+2=", "1+2="), ("34", "35")))
    assert rows == [[*ids_of("1+2=3"), *ids_of("4"), 0, *ids_of("5"), 0]]


def test_the_template_gets_the_keywords_of_the_run():
    module, tokenizer = classifier(vocab_size=len(VOCABULARY)), build_tokenizer(chat=True)
    tokenizer.chat_template = "{{ mark }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    kwargs = {"mark": "9", "chat_template": "the policy's own"}
    prompts = [[{"role": "user", "content": "7"}]]
    found = own(module, tokenizer, chat_template_kwargs=kwargs).scores(sample_batch(prompts, ("3",)))
    expected = padded_scores(copy.deepcopy(module), [ids_of("973")])
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def test_micro_batches_keep_to_the_token_cap_and_change_nothing(monkeypatch):
    module = classifier(vocab_size=len(VOCABULARY))
    batch = sample_batch()
    whole = own(module).scores(batch)
    model = own(module, tokens_per_micro_batch=20)
    sizes, forward = [], model.model.row_values
    monkeypatch.setattr(model.model, "row_values", lambda row: sizes.append(len(row.token_ids)) or forward(row))
    torch.testing.assert_close(model.scores(batch), whole, rtol=1e-6, atol=1e-6)
    assert len(sizes) > 1 and max(sizes) <= 20


def test_messages_go_through_the_reward_models_own_template():
    """Of an agent all of its messages."""
    module, mine = classifier(vocab_size=len(VOCABULARY)), build_tokenizer(chat=True)
    mine.chat_template = "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '<eos>' }}{% endfor %}"
    asked, begun = [{"role": "user", "content": "7"}], {"role": "assistant", "content": "8"}
    told = [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "4"}]
    batch = sample_batch([asked, [*asked, begun], asked], ("3", "9", "3[4]"))
    batch = batch.with_columns(conversation=[{"messages": None}, {"messages": None}, {"messages": told}])
    head = [*ids_of("u=7"), EOS_ID]
    sequences = [
        [*head, *ids_of("a=3"), EOS_ID],
        [*head, *ids_of("a=89"), EOS_ID],  # the completion goes on with the assistant's message
        [*head, *ids_of("a=3"), EOS_ID, *ids_of("t=4"), EOS_ID],
    ]
    expected = padded_scores(copy.deepcopy(module), sequences)
    torch.testing.assert_close(own(module, mine).scores(batch), expected.double(), rtol=1e-5, atol=1e-5)


def test_samples_that_are_too_long_fail_and_the_others_are_scored():
    module = classifier(vocab_size=len(VOCABULARY), max_position_embeddings=11)
    models = RewardModels(
        {2: RewardModelEntry("rm", module, build_tokenizer())},
        ["f", "g", "rm"],
        settings(),
        RankContext(),
    )
    late = models.late_scores(sample_batch())
    assert [score is None for score in late.values[2]] == [False, True, False, False]
    assert [(f.function, f.key.trajectory, f.reason) for f in late.failures] == [("rm", 101, "long")]
    assert "11 positions" in late.failures[0].detail


def test_the_last_turn_of_a_trajectory_is_scored():
    module = classifier(vocab_size=len(VOCABULARY))
    models = RewardModels({0: RewardModelEntry("rm", module, build_tokenizer())}, ["rm"], settings(), RankContext())
    batch = sample_batch()
    every = models.late_scores(batch).values[0]
    turns = batch.without("trajectory", "turn").with_columns(
        trajectory=torch.tensor([5, 5, 6, 5]), turn=torch.tensor([0, 2, 0, 1])
    )
    assert models.late_scores(turns).values[0] == pytest.approx([every[1], every[2]])


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_sample_may_fill_all_positions(family):
    batch, limit = sample_batch(), 8
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    module = classifier(family, vocab_size=len(VOCABULARY), **{name: limit})
    sequences = [ids_of(prompt + completion) for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    longest = max(map(len, sequences))
    chosen = [row for row, ids in enumerate(sequences) if len(ids) <= limit]
    assert longest > limit and any(len(sequences[row]) == limit for row in chosen)
    expected = padded_scores(copy.deepcopy(module), [sequences[row] for row in chosen])
    found = own(module).scores(batch)
    torch.testing.assert_close(found[chosen], expected.double(), rtol=1e-5, atol=1e-5)
    assert found.isnan().sum() == len(sequences) - len(chosen)


def test_a_batch_without_samples():
    assert own(classifier(vocab_size=len(VOCABULARY))).scores(sample_batch((), ())).shape == (0,)


# -------------------------------------------------------------------------------------------------- where it is from


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path):
    module = classifier(vocab_size=len(VOCABULARY))
    module.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    entry = RewardModelEntry("rm", str(tmp_path))
    model = RewardModel(entry, settings(dtype="float32"), RankContext())
    assert not any(parameter.requires_grad for parameter in model.model.module.parameters())
    torch.testing.assert_close(model.scores(sample_batch()), own(module).scores(sample_batch()))


def test_what_is_no_reward_model_is_refused(tmp_path):
    torch.manual_seed(0)
    config = build_config("qwen2", vocab_size=len(VOCABULARY))
    language_model = transformers.Qwen2ForCausalLM(config)
    with pytest.raises(ModelError, match="Qwen2ForCausalLM with"):
        own(language_model)
    two = transformers.Qwen2ForSequenceClassification(build_config("qwen2", num_labels=2))
    with pytest.raises(ModelError, match="2 labels"):
        own(two)
    language_model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="score"):  # the head is missing: it would start random
        own(str(tmp_path), build_tokenizer())
    with pytest.raises(ModelError, match=f"{len(VOCABULARY)} tokens but the model embeds 7"):
        own(classifier(vocab_size=7))
    with pytest.raises(ModelError, match="pass its tokenizer in reward_processing_classes"):
        RewardModel(RewardModelEntry("rm", classifier()), settings(), RankContext())


def test_messages_without_a_template_are_refused_before_the_run():
    module = classifier(vocab_size=len(VOCABULARY))
    entry = RewardModelEntry("rm", module, build_tokenizer())
    models = RewardModels({0: entry}, ["rm"], settings(), RankContext())
    models.check_prompts("text")
    with pytest.raises(ModelError, match="no chat template"):
        models.check_prompts([{"role": "user", "content": "1"}])
    assert [model.module for model in models.models] == [module]


def test_text_is_tokenised_anew_for_another_vocabulary():
    module = classifier(vocab_size=len(VOCABULARY) + 1)
    tokenizer = other_tokenizer()
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert sequences[0][0] == len(VOCABULARY) and len(sequences[0]) == 3  # "1+2", "=", "3"
    expected = padded_scores(copy.deepcopy(module), sequences)
    found = own(module, tokenizer).scores(sample_batch())
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def other_tokenizer(*, chat=False):
    """Another vocabulary: the same characters, one id more."""
    tokenizer = build_tokenizer(chat=chat)
    tokenizer.add_tokens(["1+2"])
    return tokenizer
