"""transformers folders through every cut: equal logits, bit-exact export, heads, dtypes, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_export import Round, export_hf
from hybridflow.models.hf_import import load_hf
from hybridflow.models.safetensors_files import INDEX_FILE, stored_dtypes, tensor_files
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.world import World
from tests.models.hf_models import reference_logits, save_random, save_random_classifier
from tests.models.stages import ROWS, Case, build, export_in_rounds, fresh_value_head, import_run_export, scores
from tests.ranks import run_ranks

KINDS = ("llama", "qwen2", "qwen3")
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8]
CHUNKED = [Chunks(2, 2), Chunks(2, 2, ChunkOrder.V), Chunks(1, 2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {kind: save_random(kind, root / kind) for kind in KINDS} | {
        "score": save_random_classifier(root / "score")}


def tensors_of(folder):
    """All tensors of a folder, as raw bytes with dtype and shape."""
    files = set(tensor_files(folder).values())
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in found.items()}


@pytest.mark.parametrize(("layout", "chunks"), [(layout, Chunks(layout.pp)) for layout in LAYOUTS] +
                         [(Layout(2, chunks.pp), chunks) for chunks in CHUNKED], ids=str)
def test_logits_and_export(folders, layout, chunks, tmp_path):
    """Tied (qwen2) and untied, grouped heads, 67 words over tp: logits as transformers', files bit for bit."""
    uneven = (1, 1, 1, 2) if chunks.count == 4 else None
    sequence_parallel = layout.tp == 2
    cases = [Case(folders[kind], layout, sequence_parallel=sequence_parallel, layers_per_chunk=uneven, chunks=chunks)
             for kind in KINDS]
    results = run_ranks(layout.size, import_run_export, cases, tmp_path)
    for index, kind in enumerate(KINDS):
        expected = reference_logits(folders[kind], ROWS)
        answers = [result[index] for result in results if result[index] is not None]
        assert len(answers) == layout.tp
        for answer in answers:
            torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-4, atol=1e-4)
        out = tmp_path / kind
        assert tensors_of(out) == tensors_of(folders[kind])
        assert json.loads((out / "config.json").read_text()) == json.loads((folders[kind] / "config.json").read_text())
        assert {file.name for file in out.iterdir()} == {file.name for file in folders[kind].iterdir()}
        model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(model(torch.tensor(ROWS[:1])).logits[0], expected[:7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(2, 1, 2)], ids=str)
def test_many_files_and_writers(folders, layout, tmp_path):
    """Files of at most 20 kB written by two ranks in rounds of 1 kB; stale files of an older export go away."""
    (tmp_path / "model.safetensors").write_bytes(b"stale")
    run_ranks(4, export_in_rounds, Case(folders["llama"], layout), tmp_path)
    assert tensors_of(tmp_path) == tensors_of(folders["llama"])
    files = sorted(set(tensor_files(tmp_path).values()))
    assert len(files) > 3 and all(file.stat().st_size < 22_000 for file in files)
    assert sorted(tmp_path.glob("model*")) == sorted([*files, tmp_path / INDEX_FILE])
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_import_of_many_files(tmp_path):
    folder = save_random("qwen3", tmp_path / "cut", max_shard_size="20kB")
    assert (folder / INDEX_FILE).is_file()
    built = build(World.single(torch.device("cpu")), Case(folder, Layout()))
    export_hf(tmp_path / "out", built.config, built.shard_map, built.storages, World.single(torch.device("cpu")))
    assert tensors_of(tmp_path / "out") == tensors_of(folder)


def test_dtype_of_the_files_is_kept(tmp_path):
    """bf16 weights trained in fp32 are exported in bf16 unless told; a tensor of another dtype keeps its own."""
    folder = save_random("qwen2", tmp_path / "bf16", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.rand(32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    world = World.single(torch.device("cpu"))
    built = build(world, Case(folder, Layout()))
    export_hf(tmp_path / "same", built.config, built.shard_map, built.storages, world)
    assert tensors_of(tmp_path / "same") == tensors_of(folder)
    export_hf(tmp_path / "wide", built.config, built.shard_map, built.storages, world, dtype=torch.float32)
    assert set(stored_dtypes(tmp_path / "wide").values()) == {torch.float32}
    hf = json.loads((tmp_path / "wide/config.json").read_text())
    assert hf["dtype"] == "float32" and hf["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize(("layout", "chunks"), [(Layout(), None), (Layout(2, 2), None), (Layout(2, 2), CHUNKED[0]),
                                                (Layout(2, 2), CHUNKED[1])], ids=str)
def test_score_head(folders, layout, chunks):
    """A ForSequenceClassification folder gives transformers' score of each row, read at its last token."""
    model = LlamaForSequenceClassification.from_pretrained(folders["score"]).eval()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([row])).logits[0] for row in ROWS])
    answers = run_ranks(layout.size, scores, Case(folders["score"], layout, Head.SCORE, layout.tp > 1,
                                                 chunks=chunks))
    for answer in answers:
        if answer is not None:
            torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-5, atol=1e-5)


def test_value_head_starts_fresh_and_alike(folders):
    (one,) = run_ranks(1, fresh_value_head, Case(folders["qwen2"], Layout(), Head.VALUE))
    assert one.shape == (1, 32) and 0 < abs(one).max() < 0.2
    for chunks, head_ranks in ((Chunks(2), (2, 3)), (CHUNKED[0], (2, 3)), (CHUNKED[1], (0, 1))):
        case = Case(folders["qwen2"], Layout(2, 2), Head.VALUE, chunks=chunks)
        answers = run_ranks(4, fresh_value_head, case)
        assert all((answer == one).all() if rank in head_ranks else answer is None
                   for rank, answer in enumerate(answers))


def test_value_head_round_trip(folders, tmp_path):
    """A critic's export has its value head and no language-model head, and loads again as it was."""
    world = World.single(torch.device("cpu"))
    built = build(world, Case(folders["llama"], Layout(), Head.VALUE))
    built.storages["head.weight"].fill_(0.5)
    export_hf(tmp_path, built.config, built.shard_map, built.storages, world)
    assert "lm_head.weight" not in tensor_files(tmp_path) and "value_head.weight" in tensor_files(tmp_path)
    assert (build(world, Case(tmp_path, Layout(), Head.VALUE)).storages["head.weight"] == 0.5).all()


def load_changed(folder, out, change):
    """Import `folder` after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    built = build(World.single(torch.device("cpu")), Case(folder, Layout()))
    load_hf(out, built.storages, built.shard_map, 0)
    return built


def test_faults_of_the_files(folders, tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)

    told = r"not the model.s: .*up_proj.weight: missing.*norm.weight: shape \(31,\).*q_proj.bias"
    with pytest.raises(ValueError, match=told):
        load_changed(folders["llama"], tmp_path, spoil)
    with pytest.raises(ValueError, match="model.safetensors.*is there"):
        tensor_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="score.weight: missing"):
        build(World.single(torch.device("cpu")), Case(folders["llama"], Layout(), Head.SCORE))


def test_buffers_of_old_files_are_left_out(folders, tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    built = load_changed(folders["llama"], tmp_path, lambda tensors: tensors.update(buffer))
    assert not any(bool(storage.isnan().any()) for storage in built.storages.values())


def test_config_of_the_folder_names_itself(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="config.json: model_type: 'gpt2'"):
        ModelConfig.from_hf_folder(tmp_path)


def test_all_processes_plan_an_export_in_the_same_order():
    """Whatever their hashes of strings are: a plan goes through tensors in the order of the maps."""
    shapes = {f"tensor {number}": (number,) for number in range(1, 30)}
    pieces = [(None, Box.whole(name, shape)) for name, shape in reversed(shapes.items())]
    round_map = Round(torch.float32, {0: pieces[:9], 1: pieces[9:]}).shard_map(shapes)
    assert list(round_map.shapes) == [box.name for _, box in pieces]
