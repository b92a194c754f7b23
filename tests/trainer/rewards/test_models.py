"""Reward models in a run, on several ranks: text classifiers, decoders with the actor's tokenizer or another, sums."""

from pathlib import Path

import pytest
import torch
import transformers

from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from hybridflow.config.load import to_tree
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.data.tokenizer_match import same_tokenizer
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.model_folders import require_vocabulary
from hybridflow.trainer.prompts import read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer
from tests.data.test_huggingface import write_folder
from tests.models.tiny_classifiers import deberta
from tests.ranks import run_ranks
from tests.trainer.runs import VOCAB, make_tokenizer, tiny_config

ALONE = World.single(torch.device("cpu"))
NO_FUNCTION = "reward.function=null"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deberta(tmp_path_factory.mktemp("deberta"), positions=256)


def llama(folder: Path, vocab_size: int) -> Path:
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                     num_attention_heads=2, max_position_embeddings=256, num_labels=1, pad_token_id=0)
    transformers.LlamaForSequenceClassification(shape).save_pretrained(folder)
    return folder


def one_step(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...]) -> tuple:
    """Scores and metrics of a step, and of each row at home its ids, prompt and answer."""
    config = tiny_config(tokenizer, folder, overrides)
    trainer = RLTrainer(Inputs.read(config), world)
    loader = training_prompts(config, read_records(config), trainer.tokenizer, trainer.model.vocab_size)
    metrics = trainer.step(next(loader))
    batch = trainer.batch
    rows = {row: (sample.response, trainer.prompts[batch.groups[row]].record.prompt,
                  answer_text(trainer.tokenizer, sample.response, trainer.inputs.ends))
            for row, sample in zip(batch.home[world.rank], batch.samples)}
    trainer.close()
    return batch.scores.tolist(), metrics, rows


def direct(folder: Path, ids: list[int], dtype: torch.dtype) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def test_a_classifier_with_a_tokenizer_of_its_own_scores_texts_at_home(classifier: Path, tokenizer: Path,
                                                                       tmp_path: Path):
    keys = (NO_FUNCTION, f"model.reward_model.path={classifier}", "model.reward_model.dtype=no",
            "model.reward_model.micro_batch_size=4")
    scores, metrics, rows = one_step(ALONE, tokenizer, tmp_path, keys)
    theirs = transformers.AutoTokenizer.from_pretrained(classifier)
    for row, (_, prompt, answer) in rows.items():
        assert scores[row] == pytest.approx(direct(classifier, theirs.encode(prompt + answer), torch.float32), abs=1e-5)
    assert metrics["reward/std"] > 0.01 and metrics["reward/faults_not_finite"] == 0.0
    check_names(metrics)
    for size in (2, 4):
        offload = ("train.offload.roles=true",) if size == 2 else ()
        for found, _, _ in run_ranks(size, one_step, tokenizer, tmp_path, (*keys, *offload)):
            assert found == pytest.approx(scores, abs=1e-5)


def test_a_decoder_with_another_tokenizer_reads_the_text_anew(tokenizer: Path, tmp_path: Path):
    other = llama(tmp_path / "other", 400)
    write_folder(other)
    keys = (NO_FUNCTION, f"model.reward_model.path={other}")
    scores, _, rows = one_step(ALONE, tokenizer, tmp_path, keys)
    read, spoken = open_tokenizer(other), open_tokenizer(tokenizer)
    assert not same_tokenizer(read, spoken) and same_tokenizer(read, read)
    for row, (response, prompt, answer) in list(rows.items())[:6]:
        ids = [*read.encode_prompt(prompt), *read.encode(answer)]
        ids += [read.eos_id] if response[-1] in spoken.stop_ids else []
        assert scores[row] == pytest.approx(direct(other, ids, torch.float64), abs=1e-6)  # rotary angles are fp32 there
    layout = ("model.reward_model.layout={tp: 1, pp: 2}", "train.layout.tp=2")
    for found, _, _ in run_ranks(4, one_step, tokenizer, tmp_path, (*keys, *layout)):
        assert found == pytest.approx(scores, abs=1e-9)


def test_a_decoder_with_the_actor_s_tokenizer_reads_its_ids(tokenizer: Path, tmp_path: Path):
    plain = llama(tmp_path / "plain", VOCAB)
    same = llama(tmp_path / "same", VOCAB)
    open_tokenizer(tokenizer).save(same)
    (same / "tokenizer.model").unlink(missing_ok=True)  # what is left is the Hugging Face form of it
    scores = [one_step(ALONE, tokenizer, tmp_path, (NO_FUNCTION, f"model.reward_model.path={folder}"))[0]
              for folder in (plain, same)]
    assert scores[0] == scores[1]


def test_a_cost_model_reads_as_a_reward_model_does(tokenizer: Path, tmp_path: Path):
    other = llama(tmp_path / "other", 400)
    write_folder(other)
    keys = (NO_FUNCTION, f"model.reward_model.path={other}", "algorithm.name=safe_rlhf",
            f"model.cost_model.path={other}")
    _, metrics, _ = one_step(ALONE, tokenizer, tmp_path, keys)
    assert metrics["cost/mean"] == pytest.approx(metrics["reward/mean"], rel=1e-12)


def test_folders_that_cannot_score_are_refused_before_ranks_meet(classifier: Path, tokenizer: Path, tmp_path: Path):
    small = llama(tmp_path / "small", 40)
    with pytest.raises(ValueError, match="model.cost_model.path = .*vocabulary of 40 is smaller than that of 273"):
        Inputs.read(tiny_config(tokenizer, tmp_path, ("algorithm.name=safe_rlhf", f"model.cost_model.path={small}")))
    with pytest.raises(ValueError, match="model.critic.path = .*vocabulary of 40 is smaller than the actor's of 273"):
        require_vocabulary("model.critic.path", str(small), 273)
    with pytest.raises(ValueError, match="model.reward_model.path = .*vocabulary of 40 is smaller than that of 273"):
        Inputs.read(tiny_config(tokenizer, tmp_path, (NO_FUNCTION, f"model.reward_model.path={small}")))
    write_folder(small)
    with pytest.raises(ValueError, match="smaller than that of 2.. of its own tokenizer's"):
        Inputs.read(tiny_config(tokenizer, tmp_path, (NO_FUNCTION, f"model.reward_model.path={small}")))
    with pytest.raises(ValueError, match="has no label 2; model.reward_model.label may be 0 to 0"):
        Inputs.read(tiny_config(tokenizer, tmp_path, (NO_FUNCTION, f"model.reward_model.path={classifier}",
                                                      "model.reward_model.label=2")))


def test_keys_of_one_kind_of_model_are_idle_for_the_other(classifier: Path, tokenizer: Path, tmp_path: Path):
    def faults(folder: Path, *overrides: str) -> set[str]:
        keys = (NO_FUNCTION, f"model.reward_model.path={folder}", "evaluation.prompts=8", *overrides)
        config = tiny_config(tokenizer, tmp_path, keys)
        try:
            checked_config(to_tree(config), [], 1, Command.TRAIN)
        except ConfigError as error:
            return {fault.key for fault in error.faults}
        return set()

    decoder = llama(tmp_path / "decoder", VOCAB)
    of_classifiers = ("model.reward_model.label=0", "model.reward_model.pair=true", "model.reward_model.dtype=bf16",
                      "model.reward_model.micro_batch_size=2")
    assert faults(classifier, *of_classifiers) == faults(decoder, "model.reward_model.layout.pp=1") == set()
    assert faults(decoder, *of_classifiers) == {key.partition("=")[0] for key in of_classifiers}
    assert faults(classifier, "model.reward_model.layout.pp=1") == {"model.reward_model.layout"}


def test_a_mixture_of_everything(classifier: Path, tokenizer: Path, tmp_path: Path):
    decoder = llama(tmp_path / "decoder", VOCAB)
    length = Path(__file__).parents[1]
    parts = (f"reward.mixture=[{{name: digits, weight: 2.0, function: '{length}/reward_of_length.py:score'}}, "
             f"{{name: right, reasoning_gym: exact}}, {{name: text, weight: 0.1, model: {classifier}}}, "
             f"{{name: ids, weight: -1.0, model: {decoder}, data_sources: [chain_sum]}}]")
    keys = (NO_FUNCTION, parts, "model.reward_model.dtype=no")
    scores, metrics, rows = one_step(ALONE, tokenizer, tmp_path, keys)
    check_names(metrics)
    names = {name for name in metrics if name.startswith(("reward/part_", "reward/extra_"))}
    assert names == {"reward/part_digits", "reward/part_right", "reward/part_text", "reward/part_ids",
                     "reward/extra_digits_digits"}
    assert metrics["reward/mean"] == pytest.approx(
        2 * metrics["reward/part_digits"] + metrics["reward/part_right"] + 0.1 * metrics["reward/part_text"]
        - metrics["reward/part_ids"])
    for found, told, _ in run_ranks(2, one_step, tokenizer, tmp_path, keys):
        assert found == pytest.approx(scores, abs=1e-5)
        assert told["reward/part_digits"] == pytest.approx(metrics["reward/part_digits"])
