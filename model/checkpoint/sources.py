"""The formats that models are read from."""

from pathlib import Path

from jaxspec.model.checkpoint.safetensors_source import CONFIG, SINGLE_FILE, SafetensorsSource
from jaxspec.model.checkpoint.source import Source


def open_source(path: Path) -> Source:
    """Opens a Hugging Face folder or a GGUF file.

    Raises:
      ValueError: in one line, if it is neither, or damaged.
    """
    if path.is_dir():
        return SafetensorsSource(path)
    if path.is_file() and path.suffix == ".gguf":
        # Not needed for the other format, and slow to import.
        from jaxspec.model.checkpoint.gguf_source import GGUFSource

        return GGUFSource(path)
    found = "a file of another kind" if path.is_file() else "nothing there"
    raise ValueError(f"{path}: found {found}, expected a folder with {CONFIG} and {SINGLE_FILE}, or a .gguf file")
