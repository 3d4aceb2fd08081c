"""What is installed is the whole of the packages, and imports wherever it is used."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def folders(package: str, folder: Path) -> set[str]:
    """The import names of a package and of all within it."""
    inner = (path.parent.relative_to(folder).parts for path in folder.rglob("__init__.py"))
    return {".".join((package, *parts)) for parts in inner}


def test_every_package_is_listed():
    found = set().union(*(folders(package, ROOT / folder) for package, folder in SETUPTOOLS["package-dir"].items()))
    assert SETUPTOOLS["packages"] == sorted(found)


def test_a_wheel_holds_every_file(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheel", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").iterdir()
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {
        "/".join((*package.split("."), *path.relative_to(tmp_path / folder).parts))
        for package, folder in SETUPTOOLS["package-dir"].items()
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    }
    assert held == written
    assert {"jaxspec/model/families/llama.py", "jaxspec/py.typed", "jaxspec/v1/generation.proto"} <= held


def test_files_beside_the_users_program_are_not_taken_for_ours(tmp_path):
    for name in ("model", "sharding", "serve"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')\n")
    code = "from jaxspec import Engine; print(Engine.__module__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "jaxspec.engine.engine\n"


def test_the_version_is_one():
    from importlib.metadata import version

    import jaxspec

    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxspec.__version__)
    assert version("jaxspec") == jaxspec.__version__
