"""Requests to a server of the tiny models, and what its streams bring."""

import time

from google.protobuf import json_format

from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1 import model_pb2

GREEDY = {"temperature": 0}


def request(prompt="Hello", sampling=GREEDY, max_tokens=24, **fields):
    """A request; fields as in `stopping__stop`."""
    built = pb.GenerateRequest(sampling=pb.SamplingOptions(**sampling))
    if isinstance(prompt, str):
        built.text = prompt
    elif prompt is not None:
        built.token_ids.ids.extend(prompt)
    if max_tokens is not None:
        built.stopping.max_tokens = max_tokens
    json_format.ParseDict(_nested(fields), built)
    return built


def _nested(fields):
    tree = {}
    for name, value in fields.items():
        *path, last = name.split("__")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def streamed(generation, built, **options):
    """Tokens, text and the finished event of a request of one choice, and every event."""
    events = list(generation.GenerateStream(pb.GenerateStreamRequest(request=built), **options))
    deltas = [event.delta for event in events if event.HasField("delta")]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in deltas), events[-1].finished, events


def begun(generation, built, **options):
    """A stream that has brought its first tokens."""
    call = generation.GenerateStream(pb.GenerateStreamRequest(request=built), **options)
    while not next(call).HasField("delta"):
        pass
    return call


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


def load(model):
    return model.GetLoad(model_pb2.GetLoadRequest())
