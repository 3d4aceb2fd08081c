from jaxspec.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_STUCK: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_STUCK: ServerState
SERVER_STATE_FAILED: ServerState

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "family", "vocab_size", "max_context", "eos_token_ids", "has_chat_template", "dtype", "supported_fields", "default_sampling", "speculation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    dtype: str
    supported_fields: _containers.RepeatedScalarFieldContainer[str]
    default_sampling: _generation_pb2.SamplingOptions
    speculation: SpeculationInfo
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., dtype: _Optional[str] = ..., supported_fields: _Optional[_Iterable[str]] = ..., default_sampling: _Optional[_Union[_generation_pb2.SamplingOptions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationInfo, _Mapping]] = ...) -> None: ...

class SpeculationInfo(_message.Message):
    __slots__ = ("budget", "top_k_cap", "draft_length")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOP_K_CAP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    budget: int
    top_k_cap: int
    draft_length: int
    def __init__(self, budget: _Optional[int] = ..., top_k_cap: _Optional[int] = ..., draft_length: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "jax_version", "device_kind", "devices", "state", "uptime_seconds", "slots", "queue", "max_message_bytes", "max_request_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    jax_version: str
    device_kind: str
    devices: int
    state: ServerState
    uptime_seconds: float
    slots: int
    queue: int
    max_message_bytes: int
    max_request_seconds: float
    def __init__(self, version: _Optional[str] = ..., jax_version: _Optional[str] = ..., device_kind: _Optional[str] = ..., devices: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., uptime_seconds: _Optional[float] = ..., slots: _Optional[int] = ..., queue: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_request_seconds: _Optional[float] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "slots", "cache_pages_used", "cache_pages", "speculation")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    CACHE_PAGES_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    slots: int
    cache_pages_used: int
    cache_pages: int
    speculation: _generation_pb2.SpeculationStatistics
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[int] = ..., cache_pages_used: _Optional[int] = ..., cache_pages: _Optional[int] = ..., speculation: _Optional[_Union[_generation_pb2.SpeculationStatistics, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "conversation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    conversation: _generation_pb2.Conversation
    def __init__(self, text: _Optional[str] = ..., conversation: _Optional[_Union[_generation_pb2.Conversation, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
