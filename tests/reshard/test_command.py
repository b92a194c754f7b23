"""`hybridflow reshard`: what it prints for people and programs, moves on ranks, and every kind of bad input."""

import json
import os
from pathlib import Path

import pytest
import torch

from hybridflow.cli import main
from hybridflow.models.config import ModelConfig
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Layout
from hybridflow.reshard.move import (
    PROCESS_BYTES,
    SHARED_BYTES,
    Moved,
    available_bytes,
    first_wrong,
    labels,
    memory_bytes,
)
from hybridflow.reshard.task import Side, Task

SPEC = {"family": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4,
        "num_heads": 4, "num_kv_heads": 2}
HF = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
      "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"spec": SPEC}}))  # JSON is YAML
    return str(path)


def reshard(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["reshard", *words])
    return (code, *capsys.readouterr())


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code, out, err = reshard(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_json_counts_the_paper_s_example_by_hand(model, capsys):
    found = report(capsys, "--model", model, "--from", "tp=4", "--to", "tp=2", "--world", "4", "--dtype", "float32")
    matrices = 2 * 64 * 32 + 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    kv = 4 * 2 * 16 * 32  # on tp 4 two ranks hold the same of two heads, so that there is less to receive
    norms = (2 * 4 + 1) * 32  # on every rank
    assert found["model_bytes"] == 4 * (matrices + norms)
    assert found["received_bytes"] == found["lower_bound_bytes"] == 4 * 4 * (matrices - kv) // 4
    assert found["received_bytes"] == sum(rank["received_bytes"] for rank in found["ranks"])
    assert [rank["received_bytes"] for rank in found["ranks"]] == [4 * (matrices - kv) // 4] * 4
    assert all(rank["lower_bound_bytes"] == rank["received_bytes"] and rank["planned"] for rank in found["ranks"])
    assert sum(link["bytes"] for link in found["links"]) == found["received_bytes"]
    assert found["node_links"] == [{"from": 0, "to": 0, "bytes": found["received_bytes"]}]
    assert [rank["train"]["tp"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert sorted((rank["generate"]["tp"], rank["generate"]["dp"]) for rank in found["ranks"]) == [
        (0, 0), (0, 1), (1, 0), (1, 1)]


def test_formulas_are_those_of_table_2(model, capsys):
    found = report(capsys, "--model", model, "--from", "tp=4", "--to", "tp=2", "--world", "8")
    size = found["model_bytes"]
    assert found["formulas"] == {
        "DS-Chat": {"received_bytes": size * 7 / 8, "peak_parameter_bytes": size},
        "HybridFlow-V": {"received_bytes": size * 3 / 4, "peak_parameter_bytes": size},
        "HybridFlow": {"received_bytes": size * 1 / 4, "peak_parameter_bytes": size / 2}}


def test_equal_layouts_move_and_take_nothing(model, capsys):
    found = report(capsys, "--model", model, "--from", "tp=2", "--to", "tp=2", "--world", "4")
    assert found["received_bytes"] == found["lower_bound_bytes"] == 0 == found["peak_extra_bytes"]["shared"]
    assert found["links"] == [] and found["peak_extra_bytes"]["packed"] == found["peak_parameter_bytes"]["shared"]
    code, out, _ = reshard(capsys, "--model", model, "--from", "tp=2", "--to", "tp=2", "--world", "4")
    assert code == 0 and "no bytes over any link" in out


def test_the_table_names_ranks_links_nodes_and_formulas(model, capsys):
    code, out, err = reshard(capsys, "--model", model, "--from", "tp=2,pp=2", "--to", "tp=2", "--nodes", "2")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == ("tp2 pp2 dp1 -> tp2 pp1 dp2: 4 ranks, 2 ranks per node, tensor groups of generation in nodes")
    assert [line.split()[:5] for line in lines if line.startswith("0  ")] == [["0", "0", "tp0", "pp0", "dp0"]]
    assert any(line.startswith("0 -> 1") for line in lines[lines.index("between nodes"):])
    assert [line.split()[0] for line in lines[-6:-2]] == ["DS-Chat", "HybridFlow-V", "HybridFlow", "ours"]


def test_other_ranks_generate_and_no_formula_applies(model, capsys):
    found = report(capsys, "--model", model, "--from", "tp=2", "--from-ranks", "0-1", "--to", "tp=2", "--to-ranks",
                   "2,3,4-5")
    assert found["world_size"] == 6
    assert [rank["received_bytes"] == rank["generate_bytes"] > 0 for rank in found["ranks"]] == [False] * 2 + [True] * 4
    assert {rank["rank"]: rank["generate"] for rank in found["ranks"]}[0] is None
    assert all(row["received_bytes"] is None for row in found["formulas"].values())
    code, out, _ = reshard(capsys, "--model", model, "--from", "tp=2", "--from-ranks", "0-1", "--to", "tp=2",
                           "--to-ranks", "2-5")
    assert code == 0 and ["HybridFlow", "-", "-", "-"] in map(str.split, out.splitlines())


def test_run_moves_and_checks_real_tensors(model, capsys):
    for words in (["--from", "tp=2,pp=2", "--to", "tp=1", "--world", "4"],
                  ["--from", "tp=1,pp=2,vpp=2", "--to", "tp=4", "--world", "4", "--bucket-mb", "1"],
                  ["--from", "tp=2", "--from-ranks", "0-1", "--to", "tp=1", "--to-ranks", "2-3"]):
        found = report(capsys, "--model", model, *words, "--run")
        assert found["run"]["wrong"] == []
        assert sum(found["run"]["received_bytes"]) == found["received_bytes"]
        assert found["run"]["seconds"] > 0 and found["run"]["bytes_per_second"] > 0
        assert max(found["run"]["extra_bytes"]) <= found["peak_extra_bytes"]["shared"]


def test_some_ranks_train_and_generate_and_others_do_one(model, capsys):
    words = ["--model", model, "--from", "tp=2", "--from-ranks", "0-1", "--to", "tp=2", "--to-ranks", "1-2", "--run"]
    found = report(capsys, *words)
    assert found["run"]["wrong"] == [] and found["run"]["received_bytes"][0] == 0
    assert found["received_bytes"] == found["lower_bound_bytes"]


def test_groups_may_span_nodes_where_that_is_asked_for(model, capsys):
    words = ["--model", model, "--from", "tp=2,pp=2", "--to", "tp=2", "--nodes", "2"]
    def spanning(found: dict) -> list[int]:
        return [len({rank["node"] for rank in found["ranks"] if rank["generate"]["dp"] == dp}) for dp in (0, 1)]
    inside, across = report(capsys, *words), report(capsys, *words, "--across-nodes")
    assert spanning(inside) == [1, 1]
    assert across["received_bytes"] <= inside["received_bytes"]
    _, out, _ = reshard(capsys, *words, "--across-nodes")
    assert "tensor groups of generation across nodes" in out


def test_a_run_whose_elements_are_wrong_ends_with_one_and_names_them(model, capsys, monkeypatch):
    monkeypatch.setattr("hybridflow.reshard.move.move", lambda task: Moved(
        1.0, (5, 0), (0, 0), (0, 0), ("rank 1: model.norm.weight [0] to [32] has 1 wrong elements",)))
    code, out, _ = reshard(capsys, "--model", model, "--from", "tp=2", "--to", "tp=1", "--world", "2", "--run")
    assert code == 1 and "rank 1: model.norm.weight" in out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_wrong_element_and_two_swapped_rows_are_found(dtype):
    shapes = {"a": (6, 8), "b": (6,)}
    boxes = [Box("a", (2, 0), (6, 8)), Box.whole("b", (6,))]
    shards = [Shard.of_rows(box, box.name) for box in boxes]
    def right() -> dict[str, torch.Tensor]:
        return {box.name: labels(box, shapes[box.name], dtype) for box in boxes}
    assert first_wrong(shards, right(), shapes) == ""
    assert torch.equal(right()["a"], labels(Box.whole("a", (6, 8)), (6, 8), dtype)[2:])
    one, rows = right(), right()
    one["b"][3] += 1
    rows["a"][[0, 2]] = rows["a"][[2, 0]]
    assert first_wrong(shards, one, shapes) == "b [0] to [6] has 1 wrong elements"
    assert first_wrong(shards, rows, shapes).startswith("a [2, 0] to [6, 8] has 1")


def test_run_says_seconds_and_rate(model, capsys):
    code, out, err = reshard(capsys, "--model", model, "--from", "tp=2", "--to", "tp=1", "--world", "2", "--run")
    assert code == 0, err
    assert " GB/s over all links; every element and checksum is right" in out


def test_a_config_s_own_layouts_are_the_defaults(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"spec": SPEC}, "generation": {"layout": {"tp": 2}},
                                "train": {"layout": {"pp": 2, "tp": 2, "layers_per_stage": [1, 3]}}}))
    found = report(capsys, "--model", str(path))
    assert found["world_size"] == 4 and (found["from"]["tp"], found["from"]["pp"], found["to"]["tp"]) == (2, 2, 2)
    assert found["ranks"][0]["train_bytes"] < found["ranks"][-1]["train_bytes"]
    assert report(capsys, "--model", str(path), "generation.layout.tp=4")["to"]["tp"] == 4
    to = report(capsys, "--model", str(path), "generation.layout.pp=2")["to"]
    assert (to["tp"], to["pp"], to["dp"]) == (2, 2, 1)
    same = ("--model", str(path), "generation.layout={pp: 2, layers_per_stage: [1, 3]}")  # as training has them
    assert sum(rank["received_bytes"] for rank in report(capsys, *same)["ranks"]) == 0


def test_what_an_option_cannot_say_is_taken_from_the_config(model, capsys):
    words = ["--model", model, "--to", "tp=1", "train.layout.layers_per_stage=[3,1]"]
    uneven = report(capsys, *words, "--from", "pp=2", "train.layout.pp=2")  # says the same twice
    keys = report(capsys, *words, "train.layout.pp=2")
    assert [rank["train_bytes"] for rank in uneven["ranks"]] == [rank["train_bytes"] for rank in keys["ranks"]]
    assert uneven["ranks"][0]["train_bytes"] > uneven["ranks"][1]["train_bytes"]
    assert report(capsys, *words[:4], "--from", "tp=2", "train.layout.dp=2")["world_size"] == 4
    even = report(capsys, "--model", model, "--to", "tp=1", "--from", "pp=2")
    assert even["received_bytes"] != uneven["received_bytes"] or even["ranks"] != uneven["ranks"]


def test_a_schedule_in_v_order_puts_the_head_on_the_first_stage(model, capsys):
    words = ["--model", model, "--to", "tp=1", "--from", "pp=2,vpp=2"]
    loop, v = report(capsys, *words), report(capsys, *words, "train.schedule=zb-v")
    assert (loop["from"]["chunk_order"], v["from"]["chunk_order"]) == ("loop", "v")
    assert v["ranks"][0]["train_bytes"] > v["ranks"][1]["train_bytes"]  # embedding and head
    assert report(capsys, *words[:4], "train.schedule=zb-v", "train.layout={pp: 2, vpp: 2}")["ranks"] == v["ranks"]
    code, out, err = reshard(capsys, *words, "train.schedule=zb-v", "--run")
    assert code == 0 and out.startswith("tp1 pp2 dp1 vpp2 in V order -> "), err


def test_in_flight_is_no_more_than_what_travels(model, capsys, tmp_path):
    found = report(capsys, "--model", model, "--from", "tp=2", "--to", "tp=1", "--world", "2")
    for rank in found["ranks"]:
        assert rank["in_flight_bytes"] == rank["received_bytes"] + rank["sent_bytes"] < 256 << 20
    found = report(capsys, "--model", model, "--from", "tp=2", "--to", "tp=2", "--world", "256")
    assert not found["all_ranks_planned"] and found["peak_extra_bytes"]["shared"] == 0
    assert all(rank["in_flight_bytes"] == 0 for rank in found["ranks"])


def test_memory_of_a_run_counts_messages_that_there_are_and_processes():
    def task(bucket: int) -> Task:
        decoder = ModelConfig.from_hf_dict({**HF, "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 256})
        return Task(decoder, Side(Layout(tp=2), (0, 1)), Side(Layout(dp=2), (0, 1)), 2, bucket_bytes=bucket)
    processes, size = SHARED_BYTES + 2 * PROCESS_BYTES, task(1).model_bytes
    assert memory_bytes(task(2)) - 2 * 2 == memory_bytes(task(2**10)) - 2 * 2**10 == processes + 2 * size
    assert memory_bytes(task(16 << 30)) <= processes + 2 * size + 2 * 2 * size  # each sends and receives a half
    assert memory_bytes(task(16 << 30)) == memory_bytes(task(32 << 30))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() <= total


def test_a_large_world_is_sampled(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**HF, "num_hidden_layers": 8}))
    words = ("--from", "tp=8,pp=4", "--to", "tp=8", "--world", "16384", "--ranks-per-node", "8")
    found = report(capsys, "--model", str(tmp_path), *words)
    assert not found["all_ranks_planned"] and len(found["ranks"]) == 16384
    planned = [rank for rank in found["ranks"] if rank["planned"]]
    assert len(planned) == 8 and all(rank["received_bytes"] == rank["lower_bound_bytes"] for rank in planned)
    assert found["received_bytes"] == found["lower_bound_bytes"] == sum(r["received_bytes"] for r in found["ranks"])
    code, out, _ = reshard(capsys, "--model", str(tmp_path / "config.json"), *words)
    assert code == 0 and "8 of 16384 ranks planned" in out


BAD = [
    (["--from", "tp=3,pq=2,tp=1,pp=0", "--to", "tp"], ["pq=2: is no degree", "tp=1: tp is there twice",
                                                        "pp=0: a degree is a whole number", "--to = tp: is no degree"]),
    (["--from", "tp=2", "--to", "cp=2"], ["cp=2: is no degree of a layout; write tp, pp, vpp or dp"]),
    (["--from", "tp=3", "--to", "tp=2", "--world", "4"], ["4 ranks cannot be cut in replicas of 3; choose "
                                                          "degrees whose product is 1, 2 or 4",
                                                          "tp 3 must divide num_heads 4"]),
    (["--from", "tp=2,dp=3", "--to", "tp=2", "--world", "4"], ["4 ranks are not 3 replicas of 2; choose dp=2"]),
    (["--from", "pp=8", "--to", "tp=8", "--world", "8"], ["pp 8 must be at most num_layers 4", "tp 8 must divide"]),
    (["--from", "vpp=5", "--to", "tp=1", "--world", "1"], ["vpp 5 = 5 chunks must be at most num_layers 4"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "0"], ["--world = 0: is not a whole number from 1"]),
    (["train.layout.tp=0", "generation.layout.tp=-1"], ["train.layout.tp = 0: a degree", "generation.layout.tp = -1"]),
    (["train.layout.layers_per_stage=[1,2]"], ["train.layout.layers_per_stage = [1, 2]: must name a number of layers"]),
    (["--from", "tp=2,dp=99999999999", "--to", "tp=2"], ["the layouts need more than 524288 ranks; larger worlds"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "1048320"], ["--world = 1048320: is not a whole number from 1 to "
                                                                "524288; larger worlds take minutes to count"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "x", "--bucket-mb", "0"], ["--world = x", "--bucket-mb = 0"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "4", "--nodes", "3"], ["4 ranks are not equally many in 3 nodes"]),
    (["--from", "tp=1", "--to", "tp=1", "--ranks-per-node", "no"], ["--ranks-per-node = no"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "4", "--to-ranks", "3-4"], ["--to-ranks = 4: there are 4 ranks"]),
    (["--from", "tp=2", "--to", "tp=2", "--from-ranks", "0,0", "--to-ranks", "2-1"], ["names a rank twice",
                                                                                      "2-1: is no rank or range"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "4", "model.spec.num_layerz=2", "model.spec.num_heads=3"],
     ["num_layerz = 2: unknown key; did you mean model.spec.num_layers", "model.spec.num_heads"]),
    (["--from", "tp=2", "--to", "tp=2", "model.spec.vocab_size=null"], ["only the tokenizer knows it"]),
    (["--from", "tp=2", "--to", "tp=2", "--world", "128", "--run"], ["more than 64 processes on one host"]),
    (["--from", "tp=1", "--to", "tp=1", "--world", "2", "--run", "model.spec.hidden_size=1048576",
      "model.spec.vocab_size=1000000"], ["of memory are available here"]),
    (["--from", "tp=2", "--to", "tp=1", "--world", "2", "generation.reshard_bucket_mb=0"],
     ["generation.reshard_bucket_mb = 0: must lie in [1, 1e9]"]),
    (["--from", "tp=2", "--to", "tp=1", "--world", "2", "--run", "generation.reshard_bucket_mb=-5"],
     ["generation.reshard_bucket_mb = -5: must lie in [1, 1e9]"]),
    (["train.layout.vpp=2", "train.layout.pp=2"], ["train.schedule = 1f1b: has one chunk on each stage, but"]),
    (["train.layout.vpp=0"], ["1 fault", "train.layout.vpp = 0"]),
    (["--from", "tp=8", "--to", "tp=8", "--world", "8"],
     ["--from = tp=8: the model cannot be cut so: tp 8 must divide num_heads 4: use 1, 2, 4",
      "--to = tp=8: the model cannot be cut so"]),
    (["--from", "tp=2", "--to", "tp=1", "--world", "3"], ["--from = tp=2: 3 ranks cannot be cut in replicas of 2; "
                                                          "choose degrees whose product is 1 or 3"]),
    (["train.layout.tp=2", "--to", "tp=1", "--world", "3"], ["train.layout = tp=2: 3 ranks cannot be cut"]),
    (["--from", "tp=2", "--to", "tp=2", "train.layout.tp=4", "train.layout.pp=2", "generation.layout.tp=1"],
     ["train.layout.tp = 4: --from tp=2 has tp 2; write tp=4 there, or leave the key out",
      "train.layout.pp = 2: --from tp=2 has pp 1", "generation.layout.tp = 1: --to tp=2 has tp 2"]),
    (["--from", "pp=2", "--to", "tp=1", "train.layout={pp: 4, dp: 0}"], ["train.layout.pp = 4: --from pp=2 has pp 2",
                                                                         "train.layout.dp = 0: a degree"]),
    (["--from", "pp=4", "--to", "tp=1", "train.layout.layers_per_stage=[3,1]"],
     ["layers_per_stage = [3, 1]: --from pp=4 has 4 chunks of layers; give 4 numbers, or "
      "train.layout.layers_per_stage=null"]),
    (["--from", "pp=2", "--to", "tp=1", "train.schedule=zb-v"], ["train.schedule = zb-v: has two chunks on each stage, "
                                                                 "and --from pp=2 has 1; write vpp=2 there"]),
    (["--from", "pp=2,vpp=2", "--to", "tp=1", "train.schedule=gpipe"], ["train.schedule = gpipe: has one chunk"]),
    (["--from", "tp=2", "--to", "tp=2", "--across-nodes", "generation.layout.within_node=true", "--bucket-mb", "2",
      "generation.reshard_bucket_mb=3"], ["generation.layout.within_node = true: --across-nodes is there too",
                                          "generation.reshard_bucket_mb = 3: --bucket-mb is 2"]),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_faults_are_told_all_at_once_before_any_process(words, told, model, capsys, monkeypatch):
    monkeypatch.setattr("hybridflow.local_ranks.LocalRanks.run", None)
    code, out, err = reshard(capsys, "--model", model, *words)
    assert (code, out) == (2, "") and err.startswith("reshard: ")
    for text in told:
        assert text in err


@pytest.mark.parametrize(("name", "content", "told"), [
    ("missing.yaml", None, "no such file; give the YAML file of a run, or"), ("missing.json", None, "no such file"),
    ("list.yaml", "[1]", "holds a list"), ("bad.json", "{", "Expecting"),
    ("gpt.json", '{"model_type": "gpt2"}', "gpt2"),
    ("empty.yaml", "{}", "model.path"),
])
def test_a_model_that_cannot_be_read_is_named(name, content, told, tmp_path, capsys):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    code, _, err = reshard(capsys, "--model", str(path), "--from", "tp=2", "--to", "tq=1", "--world", "4")
    assert code == 2 and told in err and "tq=1: is no degree" in err


def test_a_hugging_face_model_has_neither_layouts_nor_keys(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    code, _, err = reshard(capsys, "--model", str(tmp_path), "train.layout.tp=2")
    assert code == 2 and "--from = null" in err and "--to = null" in err and "is no YAML file" in err
