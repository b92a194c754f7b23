"""The house: imports run kernels <- parallel <- hybridflow, config words stay at the edge, nothing unsafe is called."""

import ast
from pathlib import Path

import pytest

from hybridflow.algorithms.dpo import DpoLoss
from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.config import words
from hybridflow.data.preference_pairs import WrongAnswer
from hybridflow.data.token_rows import Overlong
from hybridflow.models.config import Family
from hybridflow.parallel.optimizer import Decay
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.rewards.function import ReasoningScoring

ROOT = Path(__file__).parent.parent
FOLDERS = {"kernels": "kernels", "parallel": "parallel", "hybridflow": "hybridflow"}
MAY_IMPORT = {"kernels": {"kernels"}, "parallel": {"kernels", "parallel"}}
UNSAFE = {"eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
          "torch.load", "yaml.load", "yaml.unsafe_load", "sympify", "parse_expr", "__import__"}


def sources(folder: str) -> list[Path]:
    linked = (ROOT / "hybridflow" / "parallel", ROOT / "hybridflow" / "kernels")
    files = [path for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(link) for link in linked)]
    assert files
    return files


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("folder", list(MAY_IMPORT))
def test_imports_follow_the_arrow(folder: str):
    for path in sources(folder):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("hybridflow.")}
        assert ours <= MAY_IMPORT[folder], f"{path} imports {ours - MAY_IMPORT[folder]}"


def test_the_bare_folder_names_are_not_imported():
    for folder in FOLDERS:
        for path in sources(folder):
            assert not {name.split(".")[0] for name in imports(path)} & {"parallel", "kernels"}, path


def test_only_the_edge_reads_the_config():
    for path in sources("hybridflow"):
        package = path.relative_to(ROOT / "hybridflow").parts[0]
        if package in ("algorithms", "data", "engine", "generation", "models", "observe", "rewards"):
            read = {name for name in imports(path) if name.startswith("hybridflow.config")}
            assert read <= {"hybridflow.config.words"}, path


def test_the_words_of_a_config_are_those_of_what_they_choose():
    for word, chosen in ((words.Decay, Decay), (words.KLEstimatorName, KlEstimator), (words.ScheduleName, ScheduleKind),
                         (words.LossReduction, LossReduction), (words.Overlong, Overlong), (words.ModelFamily, Family),
                         (words.GymScoring, ReasoningScoring), (words.PreferenceLoss, DpoLoss),
                         (words.RejectedAnswer, WrongAnswer)):
        assert {item.value for item in word} == {item.value for item in chosen}, word


def test_nothing_runs_text_as_code_or_reads_pickles():
    for folder in FOLDERS:
        for path in sources(folder):
            calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.Call)}
            assert not calls & UNSAFE, f"{path} calls {calls & UNSAFE}"


def test_what_a_reward_replies_is_never_unpickled():
    """Calls go to a worker as pickles; replies come as JSON, since a function could write what it likes."""
    for path in sources("hybridflow/rewards"):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert path.name == "worker.py" or not {call for call in calls if call.endswith("connection.recv")}, path
    assert "json.loads" in (ROOT / "hybridflow" / "rewards" / "process.py").read_text()


def test_no_global_statements():
    for folder in FOLDERS:
        for path in sources(folder):
            assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text()))), path
