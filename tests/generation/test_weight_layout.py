import pytest
import torch

from hybridflow.generation.records import SamplingParams
from hybridflow.generation.weight_layout import lay_out_for_decoding
from tests.generation.small_model import CONFIGS, assert_same, make_generator, make_prompts


@pytest.mark.parametrize("family", CONFIGS)
def test_columns_are_contiguous_and_nothing_else_changes(family):
    generator = make_generator(config=CONFIGS[family], owns_weights=False)  # a stage that keeps its weights as they are
    prompts = make_prompts([3, 30], samples=2)
    params = SamplingParams(max_new_tokens=10)
    before = {name: value.clone() for name, value in generator.stage.state_dict().items()}
    want = generator.generate(prompts, params, seed=0)
    lay_out_for_decoding(generator.stage)
    after = generator.stage.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    matrices = {name for name, value in after.items() if value.ndim == 2}
    turned = {name for name in matrices if after[name].T.is_contiguous() and not after[name].is_contiguous()}
    assert matrices - turned == {"embed.weight"}
    assert_same(generator.generate(prompts, params, seed=0), want)


def test_half_precision_keeps_its_layout():
    generator = make_generator(dtype=torch.bfloat16, owns_weights=False)
    lay_out_for_decoding(generator.stage)
    assert all(value.numel() and value.is_contiguous() for value in generator.stage.state_dict().values())
