"""ModelService: what is served, how busy it is, and its tokenizer."""

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jaxspec.serve.requests.request_fields import SUPPORTED_FIELDS
from jaxspec.serve.requests.served_model import ServedModel
from jaxspec.serve.runtime.engine_thread import EngineThread
from jaxspec.serve.runtime.health import Health
from jaxspec.serve.runtime.metrics import Metrics
from jaxspec.serve.runtime.refusal import invalid
from jaxspec.serve.runtime.server_config import ServerConfig
from jaxspec.serve.services.messages import statistics_message
from jaxspec.v1 import generation_pb2, model_pb2
from jaxspec.v1.model_pb2_grpc import ModelServiceServicer


class ModelService(ModelServiceServicer):
    """Tells clients about one engine and its model.

    Args:
      model: gives what is served, or raises Refusal while there is nothing yet.
    """

    def __init__(
        self,
        model: Callable[[], ServedModel],
        engine: EngineThread,
        health: Health,
        metrics: Metrics,
        config: ServerConfig,
    ):
        self._model, self._engine, self._health = model, engine, health
        self._metrics, self._config = metrics, config
        self._began = time.monotonic()

    async def GetModelInfo(self, request: Any, context: Any) -> model_pb2.GetModelInfoResponse:
        """Tells the model's name, its limits, and the fields that are supported."""
        model = self._model()
        engine, config = model.engine, model.engine.target.config
        info = model_pb2.GetModelInfoResponse(
            name=model.name,
            family=config.family,
            vocab_size=config.vocab_size,
            max_context=model.max_context,
            eos_token_ids=engine.eos_token_ids,
            has_chat_template=model.tokenizer.chat_template is not None,
            dtype=engine.dtype,
            supported_fields=SUPPORTED_FIELDS,
            default_sampling=generation_pb2.SamplingOptions(**model.default_sampling),
        )
        if engine.depth:
            info.speculation.budget = engine.speculation.budget
            info.speculation.top_k_cap = engine.speculation.top_k_cap
            info.speculation.draft_length = engine.depth
        return info

    async def GetServerInfo(self, request: Any, context: Any) -> model_pb2.GetServerInfoResponse:
        """Tells versions, devices, state and limits; what is not known before loading is empty until then."""
        info = model_pb2.GetServerInfoResponse(
            version=_version("jaxspec"),
            jax_version=_version("jax"),
            state=f"SERVER_STATE_{self._health.state.name}",
            uptime_seconds=time.monotonic() - self._began,
            queue=self._config.queue,
            max_message_bytes=self._config.max_message_bytes,
            max_request_seconds=self._config.max_request_seconds,
        )
        engine = self._engine.engine
        if engine is not None:
            info.device_kind = engine.mesh.devices.flat[0].device_kind
            info.devices = engine.mesh.size
            info.slots = engine.config.slots
        return info

    async def GetLoad(self, request: Any, context: Any) -> model_pb2.GetLoadResponse:
        """Tells how busy the engine is."""
        engine = self._model().engine
        load = engine.load
        return model_pb2.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            slots=engine.config.slots,
            cache_pages_used=load.pages_used,
            cache_pages=load.pages,
            speculation=statistics_message(self._metrics.speculation),
        )

    async def Tokenize(self, request: model_pb2.TokenizeRequest, context: Any) -> model_pb2.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        _, ids = await self._model().prompts.read(request)
        return model_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: model_pb2.DetokenizeRequest, context: Any) -> model_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        model = self._model()
        if len(request.token_ids) > model.max_context:
            raise invalid("token_ids", f"{len(request.token_ids)} ids", f"at most {model.max_context} (context limit)")
        vocab = model.engine.target.config.vocab_size
        if wrong := [index for index in request.token_ids if not 0 <= index < vocab]:
            raise invalid("token_ids", wrong[0], f"0 to {vocab - 1}")
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        text = await model.prompts.in_thread(lambda: model.tokenizer.decode(request.token_ids, skip))
        return model_pb2.DetokenizeResponse(text=text)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # run from a folder of sources
