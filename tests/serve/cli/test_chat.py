"""`jaxspec chat` against a real server process."""

import subprocess
import sys

from jaxspec.v1 import generation_pb2 as pb


def chat(server, lines, *options):
    """Runs `jaxspec chat` on lines of input."""
    command = [sys.executable, "-m", "jaxspec", "chat", "--address", server.address, *map(str, options)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_chat_goes_on(server, generation):
    def answer(*turns):
        messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
        built = pb.GenerateRequest(
            conversation=pb.Conversation(messages=messages),
            sampling=pb.SamplingOptions(temperature=0),
            stopping=pb.StoppingOptions(max_tokens=12),
        )
        return generation.Generate(built).choices[0].text

    start = [("system", "Be"), ("user", "Hello")]
    first = answer(*start)
    second = answer(*start, ("assistant", first), ("user", "Go on"))
    options = ("--system", "Be", "--temperature", 0, "--max-tokens", 12)
    code, out, err = chat(server, ["Hello", "Go on", "", "/reset", "Hello", "/exit", "never"], *options)
    assert (code, out) == (0, f"{first}\n{second}\n{first}\n")
    assert err.count("12 tokens, ") == 3
    assert "τ 1." in err


def test_a_chat_goes_on_after_words_that_are_too_long(server):
    options = ("--temperature", 0, "--max-tokens", 5)
    code, out, err = chat(server, ["Hello " * 300, "Hello " * 3_000_000, "Hello"], *options)
    assert code == 0, err
    assert "error: conversation: found " in err
    assert "(INVALID_ARGUMENT)" in err
    assert "larger than max" in err
    assert out == chat(server, ["Hello"], *options)[1]
