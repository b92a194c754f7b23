"""Case 27: no dead knobs. Each key of the schema is read by code outside of the config package.

A field of the key's own block is looked for (`config_reads`), so that train.layout.tp does not stand for
generation.layout.tp; the tests of the parts that use a key show that it changes something.
"""

from pathlib import Path

import pytest

import hybridflow
from hybridflow.config.load import known_keys
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.schema import CriticOptimizerConfig, GenerationLayoutConfig, OptimizerConfig, TrainConfig
from tests.config.config_reads import Read, Reader, keys

PACKAGE = Path(hybridflow.__file__).parent
# Numbers and names that config/ itself turns into what the rest reads (layouts, batch numbers, decoder shapes).
USED_IN_CONFIG = [PACKAGE / "config" / name for name in ("batch_math.py", "shapes.py", "layouts.py")]
ONLY_CHECKED = {(TrainConfig, "gradient_accumulation_steps"), (LayoutConfig, "dp")}  # derived; a wrong value is refused


@pytest.fixture(scope="module")
def read_elsewhere() -> set[Read]:
    files = [file for file in PACKAGE.rglob("*.py") if "config" not in file.relative_to(PACKAGE).parts[:1]]
    return Reader([*files, *USED_IN_CONFIG]).reads()


@pytest.mark.parametrize(("key", "field"), [(key, field) for key, field in keys() if field not in ONLY_CHECKED])
def test_key_is_read(key: str, field: Read, read_elsewhere: set[Read]):
    assert field in read_elsewhere, key


def test_the_walk_finds_every_key():
    found = dict(keys())
    inner = {key for key in known_keys() if any(other.startswith(f"{key}.") for other in known_keys())}
    assert set(found) == set(known_keys()) - inner
    assert found["train.optimizer.lr"] == (OptimizerConfig, "lr")


def test_reads_are_told_apart_by_their_block(tmp_path: Path):
    file = tmp_path / "reader.py"
    file.write_text("def first(self):\n    train, other = self.config.train, 3\n    return train.seed, other.steps\n"
                    "def second(config: Config, tp: int):\n    return config.generation.layout.tp + len(tp.path)\n"
                    "def third(own: CriticOptimizerConfig | None):\n    return vars(own)\n"
                    "def fourth(config: Config):\n    return [task.weight for task in config.data.tasks]\n")
    reads = Reader([file]).reads()
    assert {(TrainConfig, "seed"), (GenerationLayoutConfig, "tp"), (CriticOptimizerConfig, "eps")} <= reads
    assert (LayoutConfig, "tp") not in reads and (OptimizerConfig, "eps") not in reads
    assert {name for _, name in reads} >= {"weight", "tasks"} and not {"steps", "path"} & {name for _, name in reads}
