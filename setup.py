"""Package metadata: what is installed, under which import names, with which requirements. No build logic.

The folders `parallel/` and `kernels/` lie at the top of the repository and are imported as `hybridflow.parallel` and
`hybridflow.kernels`. In a source tree the committed links `hybridflow/parallel` and `hybridflow/kernels` do that; in a
wheel `package_dir` does. Neither folder has an `__init__.py` at its root.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).resolve().parent
MAPPED = ("parallel", "kernels")  # top-level folder -> hybridflow.<folder>


def version() -> str:
    """The one version number, read from `hybridflow/__init__.py` without importing it."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "hybridflow/__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "hybridflow/__init__.py has no __version__ line"
    return found.group(1)


def packages() -> list[str]:
    """Every import name once: `hybridflow.*` from its own folder, the mapped folders under their mapped names."""
    own = find_packages(str(ROOT), include=["hybridflow", "hybridflow.*"])
    names = [name for name in own if not name.startswith(tuple(f"hybridflow.{folder}" for folder in MAPPED))]
    for folder in MAPPED:
        inner = find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__*"])
        names += [f"hybridflow.{folder}"] + [f"hybridflow.{folder}.{name}" for name in inner]
    return names


setup(
    name="hybridflow",
    version=version(),
    description="Megatron-style 3D-parallel RL post-training of language models, after the HybridFlow paper",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=packages(),
    package_dir={f"hybridflow.{folder}": folder for folder in MAPPED},
    package_data={"hybridflow.kernels.native": ["*.h", "*.cpp"]},  # compiled at first use on the host
    entry_points={"console_scripts": ["hybridflow=hybridflow.cli:main"]},
    # Without a GPU install a CPU torch first (`launch/env.sh` does): the default wheel brings gigabytes of CUDA.
    install_requires=[
        "torch>=2.8",  # the first with torch.mm(out_dtype=)
        "megatron-core>=0.12",
        "sentencepiece>=0.2",
        "wandb>=0.17",
        "transformers>=4.51",  # the first with Qwen3
        "safetensors>=0.4.3",
        "omegaconf>=2.3",
        "numpy>=1.26",
        "scipy>=1.11",
        "rich>=13",
        "pyarrow>=15",
        "matplotlib>=3.8",
        "reasoning-gym>=0.1.19",
    ],
    # NVIDIA apex is never a requirement: it has no wheels. README.md has its source install.
    extras_require={
        "cuda": ["transformer-engine[pytorch]>=2.0", "triton>=3.0"],
        "dev": ["pytest>=8", "pytest-xdist>=3.6", "ruff>=0.9", "setuptools>=70.1", "tensorboard>=2.16"],
    },
)
