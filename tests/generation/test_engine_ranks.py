"""Generation over several ranks equals one process, token for token."""

import pytest
import torch

from hybridflow.generation.records import SamplingParams
from hybridflow.parallel.mesh import Layout
from tests.generation.small_model import CONFIGS, assert_same, full_log_probs, make_generator, make_prompts
from tests.ranks import run_ranks

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.95, stop_ids=(2, 9))
PROMPTS = make_prompts([1, 9, 2, 40, 17], samples=2)


def generate(world, layout, family, dtype):
    """This replica's share of the prompts, and how far its log-probs are from the full forward in the same layout."""
    generator = make_generator(world, layout, config=CONFIGS[family], dtype=dtype, max_batch_rows=6)
    replica = world.rank // layout.tp
    completions = generator.generate(PROMPTS[replica::layout.dp], PARAMS, seed=3)
    gap = max(abs(a - b) for completion in completions for a, b in
              zip(completion.log_probs, full_log_probs(generator, completion, PARAMS.temperature), strict=True))
    return completions, gap


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_tokens_do_not_depend_on_the_layout(layout, family):
    want = make_generator(config=CONFIGS[family]).generate(PROMPTS, PARAMS, seed=3)
    results = run_ranks(layout.size, generate, layout, family, torch.float64)
    for rank, (completions, gap) in enumerate(results):
        assert_same(completions, want[rank // layout.tp:: layout.dp])
        assert completions == results[rank // layout.tp * layout.tp][0]  # bit for bit within a replica
        assert gap < 1e-9


def test_fp32_log_probs_over_tensor_ranks():
    for _, gap in run_ranks(2, generate, Layout(tp=2), "llama", torch.float32):
        assert gap < 1e-5


def pipelined(world):
    with pytest.raises(ValueError, match="pp is 2; it must be 1"):
        make_generator(world, Layout(pp=2))


def test_pipeline_stages_are_refused():
    run_ranks(2, pipelined)
