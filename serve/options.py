"""Options that hold several numbers."""


def integers(option: str, text: str) -> list[int]:
    """ "0,16,32" → [0, 16, 32].

    Raises:
      ValueError: naming the option and what was found.
    """
    return [int(number) for number in _parts(option, text, int, "whole numbers")]


def decimals(option: str, text: str) -> list[float]:
    """ "0,0.7" → [0.0, 0.7]; raises as `integers` does."""
    return [float(number) for number in _parts(option, text, float, "numbers")]


def _parts(option: str, text: str, kind: type, expected: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        try:
            kind(part)
        except ValueError:
            raise ValueError(f"{option}: found {part!r} in {text!r}, expected {expected} with commas between") from None
    return parts
