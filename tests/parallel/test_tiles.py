import pytest
import torch
import torch.nn.functional as F

from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.share import TilePlace
from hybridflow.parallel.tiles import Tile, Tiles, tiles_at
from hybridflow.parallel.vocab import VocabParallelEmbedding, gather_logits
from tests.models.operations import Operations

ALONE = AxisGroup((0,), 0, None)


def matrix(out: int, width: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(out), dtype=torch.float64).to(dtype)


def cut(weight: torch.Tensor, *tiles) -> Tiles:
    """Tiles of their own memory, each given by its output ranges and its input range; NaN lies between rows."""
    made = []
    for outputs, inputs in tiles:
        rows = torch.cat([weight[lo:hi, slice(*inputs)] for lo, hi in outputs])
        wide = rows.new_full((rows.shape[0], rows.shape[1] + 3), torch.nan)
        wide[:, :rows.shape[1]] = rows
        made.append(Tile(wide[:, :rows.shape[1]], tuple(outputs), inputs))
    return Tiles(made)


CUTS = {
    "fused": [([(0, 16), (32, 40), (48, 56)], (0, 12)), ([(16, 32), (40, 48), (56, 63)], (0, 12))],
    "one, in another order": [([(30, 63), (0, 30)], (0, 12))],
    "three parts of rows": [([(20, 30)], (0, 12)), ([(0, 20)], (0, 12)), ([(30, 63)], (0, 12))],
    "columns": [([(0, 63)], (4, 8)), ([(0, 63)], (0, 4)), ([(0, 63)], (8, 12))],
    "rows and columns": [([(0, 63)], (5, 12)), ([(0, 9), (50, 63)], (0, 5)), ([(9, 50)], (0, 5))],
    "columns, then rows": [([(0, 63)], (0, 5)), ([(0, 9), (50, 63)], (5, 12)), ([(9, 50)], (5, 12))],
}
OF_ROWS = ["fused", "one, in another order", "three parts of rows"]


@pytest.mark.parametrize("tokens", [0, 1, 3, 100])
@pytest.mark.parametrize("name", CUTS)
def test_the_product_is_that_of_the_whole(name, tokens):
    weight, bias, x = matrix(63, 12), matrix(63, 1)[:, 0], matrix(tokens, 12)
    tiles = cut(weight, *CUTS[name])
    assert tiles.shape == weight.shape
    torch.testing.assert_close(tiles.linear(x, bias), F.linear(x, weight, bias), rtol=0, atol=1e-13)
    torch.testing.assert_close(tiles.linear(x, None), F.linear(x, weight), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CUTS)
def test_half_precision_is_as_near_to_the_truth_as_a_product_in_one_piece(name):
    weight, x = matrix(63, 12, torch.bfloat16), matrix(40, 12, torch.bfloat16)
    truth = F.linear(x.double(), weight.double())
    error = (cut(weight, *CUTS[name]).linear(x, None).double() - truth).abs().max()
    assert error <= 2 * (F.linear(x, weight).double() - truth).abs().max()


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_are_looked_up(name):
    weight = matrix(63, 12)
    ids = torch.tensor([62, 0, 15, 16, 31, 32, 39, 40, 47, 48, 55, 56, 30, 29, 20, 19, 9, 0])
    tiles = cut(weight, *CUTS[name])
    assert torch.equal(tiles.embedding(ids), weight[ids])
    assert tiles.embedding(ids[:0]).shape == (0, 12)


@pytest.mark.parametrize("name", OF_ROWS)
def test_one_storage_serves_look_ups_and_logits(name):
    embed = VocabParallelEmbedding(63, 12, tp=ALONE, sequence_parallel=False, dtype=torch.float64,
                                   device=torch.device("cpu"))
    weight, x = matrix(63, 12), matrix(5, 12)
    embed.tiles = cut(weight, *CUTS[name])
    assert torch.equal(embed(torch.arange(63)), weight)
    torch.testing.assert_close(gather_logits(x, embed.tiles, ALONE, 63), x @ weight.T, rtol=0, atol=1e-13)


def test_logits_of_half_precision_are_not_rounded():
    weight, x = matrix(63, 12, torch.bfloat16), matrix(5, 12, torch.bfloat16)
    logits = gather_logits(x, cut(weight, *CUTS["fused"]), ALONE, 63)
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tiles", [
    [([(0, 30)], (0, 12)), ([(31, 63)], (0, 12))],  # a row is missing
    [([(0, 31)], (0, 12)), ([(30, 63)], (0, 12))],  # a row is there twice
    [([(0, 63)], (0, 5)), ([(0, 62)], (5, 12))],
    [([(0, 63)], (0, 5)), ([(0, 63)], (6, 12))],  # a column is missing
])
def test_tiles_that_do_not_cover_the_matrix_once_are_refused(tiles):
    with pytest.raises(AssertionError):
        cut(matrix(63, 12), *tiles)


def test_one_tile_in_order_is_the_memory_itself():
    storage = torch.arange(60.0)
    view = tiles_at([TilePlace("w", 7, 10, ((0, 5),), (0, 4))], {"w": storage[3:]})
    assert view.data_ptr() == storage[10:].data_ptr() and view.stride() == (10, 1)
    assert torch.equal(view[:, 0], torch.tensor([10.0, 20, 30, 40, 50]))


def test_a_product_for_each_tile_and_one_copy_of_what_came_out():
    weight, x = matrix(63, 12), matrix(3, 12)
    for name, products, copies in (("fused", 2, 1), ("one, in another order", 1, 1), ("columns", 3, 0)):
        tiles = cut(weight, *CUTS[name])
        with Operations() as ran:
            tiles.linear(x, None)
        assert sum(ran.count[product] for product in ("mm", "addmm", "addmm_")) == products
        assert sum(ran.count[copy] for copy in ("cat", "clone", "copy_")) == copies
