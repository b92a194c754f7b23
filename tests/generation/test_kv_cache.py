"""The cache against attention over whole rows, with memory that is NaN until it is written."""

import pytest
import torch

from hybridflow.generation import kv_cache
from hybridflow.generation.attend import decode_attention
from hybridflow.generation.kv_cache import CacheShape, RowGroup
from hybridflow.kernels.attention import causal_attention_reference

HEADS, KV_HEADS, WIDTH = 6, 2, 5
SHAPE = CacheShape(2, KV_HEADS, WIDTH, torch.float64, torch.device("cpu"))


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Here in every test."""


class Rows:
    """Whole rows of keys and values per layer, the slow and certain way."""

    def __init__(self, lengths, copies, max_new_tokens, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.group = RowGroup.of_prompts(lengths, copies, max_new_tokens, SHAPE)
        cells = self.group.prompt_cells(lengths, copies)
        packed = [self.random(sum(lengths), KV_HEADS) for _ in range(2)], [self.random(sum(lengths), KV_HEADS)
                                                                          for _ in range(2)]
        for layer, (k, v) in enumerate(zip(*packed)):
            self.group.write_prompts(layer, cells, k, v)
        self.group.sampled += 1
        self.rows = [[[k.split(lengths)[p], v.split(lengths)[p]] for k, v in zip(*packed)]
                     for p, n in enumerate(copies) for _ in range(n)]

    def random(self, *shape):
        return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=self.generator)

    def check_step(self):
        self.group.reserve()
        for layer in range(2):
            q, k, v = (self.random(len(self.rows), heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
            got = decode_attention(q, *self.group.append(layer, k, v))
            for i, row in enumerate(self.rows):
                row[layer] = [torch.cat([old, new[i: i + 1]]) for old, new in zip(row[layer], (k, v))]
                keys, values = (x.transpose(0, 1)[None] for x in row[layer])
                queries = self.random(len(row[layer][0]), HEADS)
                queries[-1] = q[i]
                want = causal_attention_reference(queries.transpose(0, 1)[None], keys, values)[0, :, -1]
                torch.testing.assert_close(got[i], want, rtol=0, atol=1e-12)
        self.group.step()
        self.group.sampled += 1

    def remove(self, *places):
        done = torch.zeros(len(self.rows), dtype=torch.bool)
        done[list(places)] = True
        order = self.group.remove(done).tolist()
        assert sorted(order) == [i for i in range(len(self.rows)) if i not in places]
        self.rows = [self.rows[i] for i in order]


@pytest.mark.parametrize("lengths, copies", [([4], [1]), ([4, 4], [1, 2]), ([7, 3, 1], [1, 3, 2])])
def test_steps_attend_to_the_whole_row(lengths, copies):
    rows = Rows(lengths, copies, max_new_tokens=6)
    for _ in range(5):
        rows.check_step()


def test_removed_rows_leave_and_the_others_stay_right():
    rows = Rows([7, 5, 3, 3], [2, 1, 2, 1], max_new_tokens=9)
    rows.check_step()
    rows.remove(0, 1, 4)  # the longest prompt leaves: the first column moves up
    rows.check_step()
    rows.remove(2)
    rows.check_step()
    rows.remove(0)
    rows.check_step()
    assert rows.group.rows == 1


def test_columns_grow_and_keep_what_they_held(monkeypatch):
    monkeypatch.setattr(kv_cache, "LEAST_GROWTH", 1)
    rows = Rows([5, 2], [1, 2], max_new_tokens=12)
    for step in range(11):
        if step == 4:
            rows.remove(1)
        rows.check_step()


@pytest.mark.parametrize("first_is_longer", [True, False])
def test_merged_groups_attend_as_before(first_is_longer, monkeypatch):
    monkeypatch.setattr(kv_cache, "LEAST_GROWTH", 2)
    parts = Rows([7, 5, 2], [2, 1, 2], max_new_tokens=9), Rows([4, 3], [1, 2], max_new_tokens=9, seed=1)
    for _ in range(3):
        parts[0].check_step()
    parts[0].remove(0, 1, 3)
    one, other = parts if first_is_longer else parts[::-1]
    one.group, one.rows = RowGroup.merged(one.group, other.group), one.rows + other.rows
    assert one.group.columns == 8  # the longest row that is left: 5 and 3 more
    for step in range(5):
        one.check_step()
        if step == 2:
            one.remove(1)
    assert one.group.sampled.tolist() == [9, 6, 6, 6] if first_is_longer else [6, 6, 9, 9]


def test_a_group_is_empty_after_its_last_row():
    rows = Rows([2, 2], [1, 1], max_new_tokens=3)
    rows.remove(0, 1)
    assert rows.group.rows == 0
