"""GPT-2's printable alphabet: how byte-level tokenizers write bytes as characters."""

import functools


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Character → byte: printable Latin-1 stands for itself, the rest for U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


@functools.cache
def _characters() -> tuple[str, ...]:
    characters = {byte: character for character, byte in byte_of_character().items()}
    return tuple(characters[byte] for byte in range(256))


def text_of(token: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    characters = _characters()
    return "".join(characters[byte] for byte in token)


def bytes_of(token: str) -> bytes:
    """The bytes that a vocabulary's token stands for."""
    alphabet = byte_of_character()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()  # An added token with a character outside the alphabet is written as it is.
