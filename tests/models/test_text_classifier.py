"""Classifiers of other architectures against transformers' own forward of each row alone."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from hybridflow.data.records import ChatMessage
from hybridflow.models.text_classifier import TextClassifier, require_classifier
from tests.models.tiny_classifiers import deberta, gpt2

CPU = torch.device("cpu")
ROWS = [("what is ab ?", " ab"), ("question: ", "the answer is abcdefgh ijklm 0123 !"), ("ab", ""), ("a b c", " ? ? ?"),
        ("what is the answer ?", " the answer is [SEP] ab"), ("z", "z")]
TEMPLATE = "{% for m in messages %}[CLS]{{ m.role }} : {{ m.content }}[SEP]{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deberta(tmp_path_factory.mktemp("deberta"))


def direct(folder: Path, encoded: dict, label: int = 0, dtype=torch.float32) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(**encoded).logits[0, label].item()


def scored(classifier: TextClassifier, rows=ROWS) -> list[float]:
    return classifier.score([classifier.read(prompt, response)[0] for prompt, response in rows]).tolist()


def test_each_row_has_the_score_that_it_has_alone(folder: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [direct(folder, tokenizer(prompt + response, return_tensors="pt", split_special_tokens=True))
                for prompt, response in ROWS]
    assert max(expected) - min(expected) > 0.1
    for at_once in (1, 2, 4, 100):
        found = scored(TextClassifier.open(str(folder), CPU, torch.float32, micro_batch_size=at_once))
        assert found == pytest.approx(expected, abs=1e-5)


def test_pairs_have_types_of_their_own(folder: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [direct(folder, tokenizer(*row, return_tensors="pt", split_special_tokens=True)) for row in ROWS]
    assert scored(TextClassifier.open(str(folder), CPU, torch.float32, pair=True)) == pytest.approx(expected, abs=1e-5)
    assert scored(TextClassifier.open(str(folder), CPU, torch.float32)) != pytest.approx(expected, abs=1e-2)


def test_a_special_token_written_out_is_text(folder: Path):
    classifier = TextClassifier.open(str(folder), CPU, torch.float32)
    ids = classifier.read("a", "b [SEP] [PAD] c")[0]["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2 and not {0, 1, 2} & set(ids[1:-1])


def test_messages_go_through_the_model_s_own_template(tmp_path: Path):
    folder = deberta(tmp_path, template=TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classifier = TextClassifier.open(str(folder), CPU, torch.float32)
    rows = [((ChatMessage("user", "what"), ChatMessage("assistant", "ab"), ChatMessage("user", "is")), "the"),
            ("what is", "ab")]
    texts = ["[CLS]user : what[SEP][CLS]assistant : ab[SEP][CLS]user : is[SEP][CLS]assistant : the[SEP]",
             "[CLS]user : what is[SEP][CLS]assistant : ab[SEP]"]
    expected = [direct(folder, tokenizer(text, return_tensors="pt", add_special_tokens=False)) for text in texts]
    assert scored(classifier, rows) == pytest.approx(expected, abs=1e-5)


def test_one_label_of_several(tmp_path: Path):
    folder = deberta(tmp_path, num_labels=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [direct(folder, tokenizer("ab", return_tensors="pt"), label) for label in range(3)]
    for label in range(3):
        classifier = TextClassifier.open(str(folder), CPU, torch.float32, label=label)
        assert scored(classifier, [("ab", "")]) == pytest.approx([expected[label]], abs=1e-5)
    with pytest.raises(ValueError, match="has 3 labels; choose one in model.reward_model.label, 0 to 2"):
        require_classifier(str(folder), None)
    with pytest.raises(ValueError, match="has no label 3"):
        require_classifier(str(folder), 3)
    require_classifier(str(folder), 2)


def test_a_model_that_pads_with_its_end_is_given_rows_alone(tmp_path: Path):
    folder = gpt2(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classifier = TextClassifier.open(str(folder), CPU, torch.float32, micro_batch_size=8)
    assert classifier.rows_at_once == 1
    expected = [direct(folder, tokenizer(p + r, return_tensors="pt", split_special_tokens=True))
                for p, r in ROWS]
    assert scored(classifier) == pytest.approx(expected, abs=1e-5)


def test_what_is_too_long_loses_its_beginning(folder: Path):
    classifier = TextClassifier.open(str(folder), CPU, torch.float32)
    assert classifier.max_tokens == 64
    whole, cut = classifier.read("z " * 200, "ab")
    ids, tail = whole["input_ids"], classifier.read("", "ab")[0]["input_ids"]
    assert cut and len(ids) == 64 == len(whole["token_type_ids"]) and ids[0] == 1 and ids[-len(tail) + 2:] == tail[2:]
    assert classifier.read("z", "ab")[1] is False
    assert torch.isfinite(classifier.score([whole])).all()


def test_precision_is_the_caller_s(folder: Path):
    exact = scored(TextClassifier.open(str(folder), CPU, torch.float64))
    assert scored(TextClassifier.open(str(folder), CPU, torch.float32)) == pytest.approx(exact, abs=1e-5)
    rough = scored(TextClassifier.open(str(folder), CPU, torch.bfloat16))
    assert rough != pytest.approx(exact, abs=1e-5) and rough == pytest.approx(exact, abs=0.5)


def test_folders_that_hold_something_else(folder: Path, tmp_path: Path):
    config = json.loads((folder / "config.json").read_text())

    def refused(message: str, **changes) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            require_classifier(str(tmp_path), None)

    refused("model_type 'unheard-of' is no sequence classifier", model_type="unheard-of")
    refused("is no sequence classifier that transformers has by itself", auto_map={"AutoModel": "code.Model"})
    refused("name no .ForSequenceClassification", architectures=["DebertaV2ForMaskedLM"])
    refused("has no ..safetensors")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    refused("has no tokenizer; put the model.s own beside it")
    model = transformers.DebertaV2Model.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weights are missing, the first of them classifier"):
        TextClassifier.open(str(tmp_path), CPU, torch.float32)
