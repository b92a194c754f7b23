"""What is installed: the right packages once, requirements, links, and no bare imports of the mapped folders."""

import ast
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_links_point_at_the_folders():
    for name in ("parallel", "kernels"):
        link = ROOT / "hybridflow" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_requirements():
    for name in ("torch", "megatron-core", "sentencepiece", "wandb", "transformers", "safetensors", "omegaconf",
                 "numpy", "rich", "pyarrow", "matplotlib", "reasoning-gym"):
        assert f'"{name}>=' in SETUP, name
    assert "transformer-engine[pytorch]" in SETUP and "triton" in SETUP
    requirements = [node.value for node in ast.walk(ast.parse(SETUP))
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">=" in node.value]
    assert not any("apex" in requirement for requirement in requirements)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the tracked and untracked files, without touching the repository's folders."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "hybridflow", "parallel", "kernels"):
        subprocess.run(["cp", "-R", "-P", str(ROOT / name), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--no-index", "-w", str(out), str(source)], check=True, timeout=120)
    return next(out.glob("*.whl"))


def source_modules():
    """Import path -> file, for every module of the three folders."""
    found = {}
    for folder, prefix in (("hybridflow", "hybridflow"), ("parallel", "hybridflow/parallel"),
                           ("kernels", "hybridflow/kernels")):
        for top, folders, files in os.walk(ROOT / folder):  # links are not followed
            folders[:] = [name for name in folders if name != "__pycache__"]
            inner = Path(top).relative_to(ROOT / folder)
            found |= {str(Path(prefix) / inner / name): Path(top) / name for name in files if name.endswith(".py")}
    return found


def test_the_wheel_has_every_module_once(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    assert sorted(names) == sorted(source_modules())


def test_the_wheel_imports_from_anywhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = ("import hybridflow.parallel.world as w, hybridflow.kernels, hybridflow.cli, sys; print(w.__file__); "
            "print([m for m in sys.modules if m.split('.')[0] in ('parallel', 'kernels')])")
    ended = subprocess.run([sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)},
                           capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines() == [str(tmp_path / "hybridflow" / "parallel" / "world.py"), "[]"]


def test_the_wheel_has_the_console_script_and_the_licence(wheel):
    inside = zipfile.ZipFile(wheel)
    (entry,) = [name for name in inside.namelist() if name.endswith("entry_points.txt")]
    assert "hybridflow = hybridflow.cli:main" in inside.read(entry).decode().replace("=", " = ").replace("  ", " ")
    assert any(name.endswith("LICENSE") for name in inside.namelist())


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import hybridflow; print(sorted(set(sys.modules) - before))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['hybridflow']"


def test_imports_run_in_one_direction():
    allowed = {"kernels": {"kernels"}, "parallel": {"kernels", "parallel"}}
    wrong = []
    for path, file in source_modules().items():
        layer = Path(path).parts[1] if Path(path).parts[1] in allowed else None
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else \
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top, _, rest = name.partition(".")
                bare = top in allowed
                upward = layer and top == "hybridflow" and rest.partition(".")[0] not in allowed[layer]
                if bare or upward:
                    wrong.append(f"{path}: {name}")
    assert wrong == []


def test_no_module_is_named_after_the_standard_library():
    tops = {"parallel", "kernels"}
    assert not tops & set(sys.stdlib_module_names)
    assert importlib.util.find_spec("hybridflow.parallel.world") is not None
