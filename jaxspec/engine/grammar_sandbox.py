"""Trying a grammar out in a process of its own, which a hostile one may hang, crash or fill in this one's place.

A grammar may nest so deeply that compiling it overflows a common stack, or take minutes. This file is also the program
of that process, and imports nothing of jaxspec.
"""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import llguidance

SECONDS = 5.0
PROCESSES = 2
MEMORY_BYTES = 2 << 30
STACK_BYTES = 512 << 20  # Of address space, and of memory only where it is used.

# How llguidance reads each of the kinds of `jaxspec.config.GRAMMAR_KINDS`.
COMPILERS: dict[str, Any] = {
    "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "lark": llguidance.LLMatcher.grammar_from_lark,
}
# The size of the stack of threads to come is one for the whole process.
_stack_size = threading.Lock()
_free = threading.BoundedSemaphore(PROCESSES)


def try_out(kind: str, source: str) -> None:
    """Compiles a grammar and makes its first mask, for a vocabulary of bytes; any thread may wait for it.

    What is wrong with the grammar is not told: that is for whoever compiles it in earnest.

    Raises:
      ValueError: it takes too long, or more memory than it may.
      TimeoutError: others take long, and leave no process for it.
    """
    if not _free.acquire(timeout=SECONDS):
        raise TimeoutError("grammar: others take long to compile; try again later")
    try:
        command, data = [sys.executable, "-P", __file__], json.dumps([kind, source]).encode()
        done = subprocess.run(command, input=data, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"grammar: found one that takes more than {SECONDS:g} s to compile, expected a simpler one"
        ) from None
    finally:
        _free.release()
    if done.returncode != 0:
        raise ValueError(f"grammar: found one that can't be compiled (exit {done.returncode}), expected a simpler one")


def on_deep_stack(function: Callable[[], Any]) -> Any:
    """Runs a function on a thread whose stack holds whatever grammars nest; returns or raises what it does."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar")
    with _stack_size:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _compile(kind: str, source: str) -> None:
    try:
        grammar = COMPILERS[kind](source)
    except ValueError:
        return
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES):  # elsewhere it can't be set
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    kind, source = json.load(sys.stdin)
    on_deep_stack(lambda: _compile(kind, source))


if __name__ == "__main__":
    _main()
