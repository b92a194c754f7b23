"""Gradients of every cut against transformers in one process, fp64: each box of each rank, and what the norm counts."""

import numpy as np
import pytest
import torch

from hybridflow.micro_batch import Sample
from hybridflow.models.config import Head
from hybridflow.models.recompute import Recompute
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from tests.models.hf_models import reference_gradients, save_random, save_random_critic
from tests.models.stages import Case, descend, sample_gradients
from tests.ranks import run_ranks

SHAPES = [(3, 4), (1, 6), (5, 1), (2, 2), (7, 3)]  # prompt and response tokens of the rows
CUTS = [(Layout(1, 1), False), (Layout(2, 1), False), (Layout(2, 1), True), (Layout(4, 1), False), (Layout(4, 1), True),
        (Layout(1, 2), False), (Layout(2, 2), True), (Layout(1, 4), False), (Layout(4, 2), True), (Layout(8, 1), True)]
LOOP, V = Chunks(2, 2), Chunks(2, 2, ChunkOrder.V)


def samples():
    """Ragged rows; weights lie in different decades, so that a wrong sum shows."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, (prompt, response) in enumerate(SHAPES):
        ids = torch.randint(0, 67, (prompt + response,), generator=generator).tolist()
        weight = torch.rand(response, generator=generator, dtype=torch.float64) * 10.0 ** -(number % 3)
        found.append((Sample(tuple(ids[:prompt]), tuple(ids[prompt:])), weight))
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(kind, head) -> folder and reference gradients."""
    root = tmp_path_factory.mktemp("grads")
    found = {}
    for kind, head in [("qwen2", "lm"), ("qwen3", "lm"), ("biased", "lm"), ("biased", "value"), ("qwen3", "value")]:
        save = save_random if head == "lm" else save_random_critic
        folder = save(kind, root / f"{kind}-{head}")
        found[kind, head] = folder, reference_gradients(folder, samples(), head)
    return found


def assert_gradients(results, expected):
    """Every box equals the reference's, every tensor is covered, and the counted boxes make up the norm once."""
    covered = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    squares = 0.0
    for boxes in results:
        for box, grad, counted in boxes:
            want = expected[box.name][box.slices].numpy()
            scale = max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(grad, want, rtol=0, atol=1e-9 * scale, err_msg=str(box))
            covered[box.name][box.slices] = 1
            squares += float((grad**2).sum()) if counted else 0.0
    assert all(bool((mask == 1).all()) for mask in covered.values())
    assert squares == pytest.approx(sum(float(grad.square().sum()) for grad in expected.values()), rel=1e-9)


@pytest.mark.parametrize(("layout", "sequence_parallel"), CUTS, ids=lambda x: str(x) if isinstance(x, Layout) else
                         ("sp" if x else "no-sp"))
def test_language_model(references, layout, sequence_parallel):
    for kind in ("qwen2", "qwen3", "biased"):
        if layout.tp == 8 and kind != "biased":
            continue  # four query heads
        folder, expected = references[kind, "lm"]
        case = Case(folder, layout, Head.LANGUAGE_MODEL, sequence_parallel, dtype=torch.float64)
        per_micro_batch = 5 if layout == Layout(1, 1) else 2
        assert_gradients(run_ranks(layout.size, sample_gradients, case, samples(), per_micro_batch), expected)


@pytest.mark.parametrize(("layout", "sequence_parallel"), [CUTS[0], CUTS[4], CUTS[6], CUTS[7], CUTS[8]],
                         ids=lambda x: str(x) if isinstance(x, Layout) else ("sp" if x else "no-sp"))
def test_value_head(references, layout, sequence_parallel):
    for kind in ("biased", "qwen3"):
        folder, expected = references[kind, "value"]
        case = Case(folder, layout, Head.VALUE, sequence_parallel, dtype=torch.float64)
        assert_gradients(run_ranks(layout.size, sample_gradients, case, samples(), 2), expected)


@pytest.mark.parametrize(("chunks", "recompute"), [(LOOP, Recompute.NONE), (V, Recompute.SELECTIVE),
                                                   (LOOP, Recompute.FULL), (V, Recompute.NONE)], ids=str)
def test_chunks(references, chunks, recompute):
    """Interleaved and V order, tied (qwen2: in V order one parameter with both uses) and untied, and a value head."""
    for (kind, head), (folder, expected) in references.items():
        if kind == "qwen3" and head == "value":
            continue
        tp = 1 if kind == "qwen3" else 2
        case = Case(folder, Layout(tp, 2), Head.LANGUAGE_MODEL if head == "lm" else Head.VALUE, tp > 1,
                    dtype=torch.float64, chunks=chunks, recompute=recompute)
        assert_gradients(run_ranks(2 * tp, sample_gradients, case, samples(), 2), expected)


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 2), Layout(1, 4)], ids=str)
def test_tied_copies_stay_equal(references, layout):
    """Three steps: both copies of a tied embedding are equal bit for bit, and equal to those of one stage."""
    folder, _ = references["qwen2", "lm"]
    name = "model.embed_tokens.weight"
    (one,) = run_ranks(1, descend, Case(folder, Layout(), dtype=torch.float64), samples(), 3, 0.1)
    expected = next(weight for box, weight in one if box.name == name)
    results = run_ranks(layout.size, descend, Case(folder, layout, dtype=torch.float64), samples(), 3, 0.1)
    for tp_index in range(layout.tp):
        copies = [(box, weight) for rank in (tp_index, layout.size - layout.tp + tp_index)
                  for box, weight in results[rank] if box.name == name]
        assert len(copies) == 2 and copies[0][0] == copies[1][0]
        assert (copies[0][1] == copies[1][1]).all()
        np.testing.assert_allclose(copies[0][1], expected[copies[0][0].slices], rtol=0, atol=1e-9)
