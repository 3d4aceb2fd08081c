"""The committed code of the protos is what the protos say."""

from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("jaxspec") / "v1"
NAMES = sorted(path.stem for path in (ROOT / FOLDER).glob("*.proto"))


def read(root, name):
    return (root / FOLDER / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_generated_code_is_current(name, tmp_path):
    """Another compiler's code may differ around the descriptor, so what depends on its version is left out."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, str(ROOT / FOLDER / f"{name}.proto")]) == 0
    for file, mark in [(f"{name}_pb2.py", "AddSerializedFile"), (f"{name}_pb2.pyi", ""), (f"{name}_pb2_grpc.py", "'/")]:
        committed, fresh = (
            [line for line in read(root, file).splitlines() if mark in line] for root in (ROOT, tmp_path)
        )
        assert committed, file
        assert committed == fresh, f"{file}: run `make protos`"
