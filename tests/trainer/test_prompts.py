"""The prompts of a config: held-out ones of the tasks that it names for tests."""

from pathlib import Path

from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import read_records
from tests.trainer.runs import tiny_config


def test_held_out_prompts_are_of_the_test_tasks(tmp_path: Path):
    test_tasks = "data.test_tasks=[{name: count_bits, config: {max_n: 300}, template: '{question}!'}]"
    records = read_records(tiny_config(tmp_path, tmp_path, (test_tasks,)), World.single())
    assert {record.data_source for record in records.train} == {"chain_sum"}
    assert {record.data_source for record in records.test} == {"count_bits"} and len(records.test) == 8
    assert all(record.prompt.endswith("!") for record in records.test)
    same = read_records(tiny_config(tmp_path, tmp_path), World.single())
    assert {record.data_source for record in same.test} == {"chain_sum"} and len(same.test) == 8
