"""Mixes of reasoning-gym tasks: sized, seeded, by weight, and no held-out prompt is trained on."""

import subprocess
import sys
from collections import Counter

import pytest

from hybridflow.data.reasoning import TaskSpec, build_reasoning_mix, is_held_out

SMALL_SUMS = TaskSpec("chain_sum", 2.0, {"max_terms": 2, "max_digits": 1})  # 200 distinct items
HELD_OUT_TEXTS = ["What is 0 + 3?", "What is 0 + 10?", "What is 0 + 15?", "What is 0 + 17?"]
BITS = TaskSpec("count_bits", 1.0, {"max_n": 300})


def prompts(records):
    return [record.prompt for record in records]


def test_sizes_weights_and_what_a_scorer_needs():
    split = build_reasoning_mix((SMALL_SUMS, BITS), 301, 22, seed=3)
    assert Counter(record.data_source for record in split.train) == {"chain_sum": 201, "count_bits": 100}
    assert Counter(record.data_source for record in split.test) == {"chain_sum": 15, "count_bits": 7}
    for record in split.train + split.test:
        assert record.prompt == record.entry["question"] and record.ground_truth == record.entry["answer"]
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn("chain_sum")
    assert all(score(r.ground_truth, r.entry) == 1.0 for r in split.train if r.data_source == "chain_sum")


def test_tasks_are_mixed_not_one_after_the_other():
    sources = [record.data_source for record in build_reasoning_mix((SMALL_SUMS, BITS), 300, 0, seed=3).train]
    assert 40 < sources[:150].count("count_bits") < 60


def test_no_test_prompt_is_trained_on_even_with_few_distinct_items():
    split = build_reasoning_mix((SMALL_SUMS,), 2000, 15, seed=0)
    assert len(split.train) == 2000 and len(set(prompts(split.test))) == 15
    assert not set(prompts(split.train)) & set(prompts(split.test))
    assert len(set(prompts(split.train))) < 200  # it does repeat: the split must be by text


def test_no_mix_trains_on_what_another_mix_tests():
    wider = TaskSpec("chain_sum", 1.0, {"max_terms": 3, "max_digits": 1})
    splits = [build_reasoning_mix(tasks, size, 12, seed)
              for tasks, size, seed in (((SMALL_SUMS,), 900, 0), ((wider, SMALL_SUMS), 700, 0), ((BITS, wider), 99, 7))]
    trained, tested = ({text for split in splits for text in prompts(part(split))}
                       for part in (lambda split: split.train, lambda split: split.test))
    assert not trained & tested and len(tested) > 20
    assert all(map(is_held_out, tested)) and not any(map(is_held_out, trained))


def test_an_eighth_is_held_out_for_ever():
    texts = [f"What is {a} + {b}?" for a in range(100) for b in range(100)]
    assert 0.115 < sum(map(is_held_out, texts)) / len(texts) < 0.135
    assert [text for text in texts[:20] if is_held_out(text)] == HELD_OUT_TEXTS


def test_tests_may_be_of_other_tasks():
    split = build_reasoning_mix((SMALL_SUMS,), 100, 10, seed=0, test_tasks=(BITS,))
    assert {record.data_source for record in split.train} == {"chain_sum"} and len(split.train) == 100
    assert {record.data_source for record in split.test} == {"count_bits"} and len(split.test) == 10
    assert build_reasoning_mix((SMALL_SUMS,), 100, 0, seed=0, test_tasks=(BITS,)).test == ()


def test_a_small_share_of_a_mix_is_drawn_too():
    rare = TaskSpec("count_bits", 0.01, {"max_n": 300})
    split = build_reasoning_mix((SMALL_SUMS, rare), 400, 0, seed=0)
    assert Counter(record.data_source for record in split.train) == {"chain_sum": 398, "count_bits": 2}


def test_the_seed_decides_everything():
    first, again, other = (build_reasoning_mix((SMALL_SUMS, BITS), 100, 10, seed) for seed in (1, 1, 2))
    assert first == again
    assert prompts(first.train) != prompts(other.train) and prompts(first.test) != prompts(other.test)


def test_templates_shorten_prompts():
    countdown = TaskSpec("countdown", template="Make {metadata[target]} from {metadata[numbers]}: ")
    split = build_reasoning_mix((countdown, SMALL_SUMS), 9, 0, seed=0, template="Q: {question} A:")
    for record in split.train:
        if record.data_source == "countdown":
            assert record.prompt.startswith("Make ") and len(record.prompt) < 60
        else:
            assert record.prompt == f"Q: {record.entry['question']} A:"


@pytest.mark.parametrize(
    "task, message",
    [
        (TaskSpec("list_functions"), "'list_functions' gives other items for the same seed"),
        (TaskSpec("graph_color"), "'graph_color' states no answer"),
        (TaskSpec("chain_sun"), "unknown reasoning-gym task 'chain_sun'; did you mean chain_sum"),
        (TaskSpec("chain_sum", config={"max_term": 3}), "'chain_sum' does not take config .*max_terms"),
        (TaskSpec("chain_sum", config={"min_terms": 9, "max_terms": 3}), "'chain_sum' does not take config"),
        (TaskSpec("chain_sum", config={"seed": 3}), "size and seed belong to"),
        (TaskSpec("chain_sum", weight=0.0), "weight is 0.0"),
        (TaskSpec("chain_sum", weight=float("nan")), "weight is nan"),
        (TaskSpec("chain_sum", template="{metadata[x]}"), "may use .*expression"),
        (TaskSpec("chain_sum", template="{qestion}"), "may use {question}"),
        (TaskSpec("count_bits", config={"max_n": 20}),
         r"^task 'count_bits': its share of data.test_size is 30 different held-out prompts, and \d+ draws gave "
         r"only \d+ \(one text in 8 is held out\); lower data.test_size, or"),
    ],
)
def test_faults_are_named(task, message):
    with pytest.raises(ValueError, match=message):
        build_reasoning_mix((task,), 100, 30, seed=0)


def test_all_names_are_checked_before_anything_is_generated():
    with pytest.raises(ValueError, match="unknown reasoning-gym task 'nope'"):
        build_reasoning_mix((TaskSpec("countdown"), TaskSpec("nope")), 10**9, 0, seed=0)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="data.tasks is empty"):
        build_reasoning_mix((), 10, 0, seed=0)
    with pytest.raises(ValueError, match="data.size is 0"):
        build_reasoning_mix((BITS,), 0, 0, seed=0)


def test_heavy_libraries_are_imported_only_when_chosen():
    code = (
        "import sys\n"
        "from hybridflow.data import loader, reasoning, readers, sft, tokenizer\n"
        "heavy = {'reasoning_gym', 'transformers', 'pyarrow', 'sentencepiece', 'torch'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
