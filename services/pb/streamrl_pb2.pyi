from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class CommitPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_POLICY_UNSPECIFIED: _ClassVar[CommitPolicy]
    COMMIT_POLICY_BOUNDARY: _ClassVar[CommitPolicy]
    COMMIT_POLICY_IMMEDIATE: _ClassVar[CommitPolicy]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
COMMIT_POLICY_UNSPECIFIED: CommitPolicy
COMMIT_POLICY_BOUNDARY: CommitPolicy
COMMIT_POLICY_IMMEDIATE: CommitPolicy

class SampleId(_message.Message):
    __slots__ = ("prompt_id", "k")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    k: int
    def __init__(self, prompt_id: _Optional[str] = ..., k: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorRef(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest", "inline", "handle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    inline: bytes
    handle: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ..., inline: _Optional[bytes] = ..., handle: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "token_ids", "tensors")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorRef]
    def __init__(self, prompt_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[_Union[TensorRef, _Mapping]]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queued_at", "started_at", "finished_at")
    QUEUED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    queued_at: float
    started_at: float
    finished_at: float
    def __init__(self, queued_at: _Optional[float] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("id", "token_ids", "logprobs", "finish_reason", "spans", "timings", "unit_id", "kept_counts", "kept_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_IDS_FIELD_NUMBER: _ClassVar[int]
    id: SampleId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: FinishReason
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    timings: Timings
    unit_id: str
    kept_counts: _containers.RepeatedScalarFieldContainer[int]
    kept_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[SampleId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., unit_id: _Optional[str] = ..., kept_counts: _Optional[_Iterable[int]] = ..., kept_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("id", "code", "message", "unit_id")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Failure.Code]
        DEADLINE: _ClassVar[Failure.Code]
        DOES_NOT_FIT: _ClassVar[Failure.Code]
        ENGINE: _ClassVar[Failure.Code]
    CODE_UNSPECIFIED: Failure.Code
    DEADLINE: Failure.Code
    DOES_NOT_FIT: Failure.Code
    ENGINE: Failure.Code
    ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    id: SampleId
    code: Failure.Code
    message: str
    unit_id: str
    def __init__(self, id: _Optional[_Union[SampleId, _Mapping]] = ..., code: _Optional[_Union[Failure.Code, str]] = ..., message: _Optional[str] = ..., unit_id: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "session", "stream", "rank", "total_prompts", "prompts", "n", "sampling", "seed", "min_version", "deadline_s", "have")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    stream: str
    rank: int
    total_prompts: int
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    n: int
    sampling: Sampling
    seed: int
    min_version: int
    deadline_s: float
    have: _containers.RepeatedCompositeFieldContainer[SampleId]
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., stream: _Optional[str] = ..., rank: _Optional[int] = ..., total_prompts: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., n: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., min_version: _Optional[int] = ..., deadline_s: _Optional[float] = ..., have: _Optional[_Iterable[_Union[SampleId, _Mapping]]] = ...) -> None: ...

class SampleEvent(_message.Message):
    __slots__ = ("samples", "failures", "overdue")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    overdue: _containers.RepeatedCompositeFieldContainer[Overdue]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., overdue: _Optional[_Iterable[_Union[Overdue, _Mapping]]] = ...) -> None: ...

class Overdue(_message.Message):
    __slots__ = ("id", "unit_id", "attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: SampleId
    unit_id: str
    attempt: int
    def __init__(self, id: _Optional[_Union[SampleId, _Mapping]] = ..., unit_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("run_id", "session", "stream", "ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    stream: str
    ids: _containers.RepeatedCompositeFieldContainer[SampleId]
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., stream: _Optional[str] = ..., ids: _Optional[_Iterable[_Union[SampleId, _Mapping]]] = ...) -> None: ...

class AcknowledgeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TensorMeta(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "nbytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    nbytes: int
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class WeightSource(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("version", "transfer_id", "tensors", "total_bytes", "digest", "sources")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    version: int
    transfer_id: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorMeta]
    total_bytes: int
    digest: bytes
    sources: _containers.RepeatedCompositeFieldContainer[WeightSource]
    def __init__(self, version: _Optional[int] = ..., transfer_id: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorMeta, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[WeightSource, _Mapping]]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("run_id", "session", "manifest", "commit", "deadline_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    manifest: WeightManifest
    commit: CommitPolicy
    deadline_s: float
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., commit: _Optional[_Union[CommitPolicy, str]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: int
    def __init__(self, units: _Optional[int] = ...) -> None: ...

class WeightStatusRequest(_message.Message):
    __slots__ = ("version", "wait_s", "until")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    version: int
    wait_s: float
    until: UnitWeights.State
    def __init__(self, version: _Optional[int] = ..., wait_s: _Optional[float] = ..., until: _Optional[_Union[UnitWeights.State, str]] = ...) -> None: ...

class WeightStatusReply(_message.Message):
    __slots__ = ("version", "units")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    version: int
    units: _containers.RepeatedCompositeFieldContainer[UnitWeights]
    def __init__(self, version: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitWeights, _Mapping]]] = ...) -> None: ...

class UnitWeights(_message.Message):
    __slots__ = ("unit_id", "version", "state", "error", "stage_started_at", "staged_at", "committed_at", "commit_pause_s", "transfer_id")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[UnitWeights.State]
        STAGING: _ClassVar[UnitWeights.State]
        STAGED: _ClassVar[UnitWeights.State]
        COMMITTED: _ClassVar[UnitWeights.State]
        FAILED: _ClassVar[UnitWeights.State]
    NONE: UnitWeights.State
    STAGING: UnitWeights.State
    STAGED: UnitWeights.State
    COMMITTED: UnitWeights.State
    FAILED: UnitWeights.State
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGE_STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    STAGED_AT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    unit_id: str
    version: int
    state: UnitWeights.State
    error: str
    stage_started_at: float
    staged_at: float
    committed_at: float
    commit_pause_s: float
    transfer_id: str
    def __init__(self, unit_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[UnitWeights.State, str]] = ..., error: _Optional[str] = ..., stage_started_at: _Optional[float] = ..., staged_at: _Optional[float] = ..., committed_at: _Optional[float] = ..., commit_pause_s: _Optional[float] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("transfer_id", "version", "offset")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    version: int
    offset: int
    def __init__(self, transfer_id: _Optional[str] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UnitEvent(_message.Message):
    __slots__ = ("register", "finished", "heartbeat", "weights", "leaving")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    register: Register
    finished: Finished
    heartbeat: Heartbeat
    weights: UnitWeights
    leaving: Leaving
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., weights: _Optional[_Union[UnitWeights, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("unit_id", "engine", "slots", "kv_tokens", "max_sequence", "host", "datacenter", "version", "run_id", "session", "running", "metrics_address", "transfer_id")
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DATACENTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    unit_id: str
    engine: str
    slots: int
    kv_tokens: int
    max_sequence: int
    host: str
    datacenter: str
    version: int
    run_id: str
    session: str
    running: _containers.RepeatedCompositeFieldContainer[SampleId]
    metrics_address: str
    transfer_id: str
    def __init__(self, unit_id: _Optional[str] = ..., engine: _Optional[str] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_sequence: _Optional[int] = ..., host: _Optional[str] = ..., datacenter: _Optional[str] = ..., version: _Optional[int] = ..., run_id: _Optional[str] = ..., session: _Optional[str] = ..., running: _Optional[_Iterable[_Union[SampleId, _Mapping]]] = ..., metrics_address: _Optional[str] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("run_id", "session", "samples", "failures")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("running", "waiting", "kv_tokens_used", "tokens_per_s")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_tokens_used: int
    tokens_per_s: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_tokens_used: _Optional[int] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class HeadCommand(_message.Message):
    __slots__ = ("welcome", "assign", "cancel", "forget", "stage", "commit", "refuse")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    assign: Assign
    cancel: Cancel
    forget: Forget
    stage: Stage
    commit: Commit
    refuse: Refuse
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("run_id", "session", "seed", "sampling", "groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    seed: int
    sampling: Sampling
    groups: _containers.RepeatedCompositeFieldContainer[AssignedGroup]
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[AssignedGroup, _Mapping]]] = ...) -> None: ...

class AssignedGroup(_message.Message):
    __slots__ = ("prompt", "ks", "queued_at")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    KS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_AT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    ks: _containers.RepeatedScalarFieldContainer[int]
    queued_at: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., ks: _Optional[_Iterable[int]] = ..., queued_at: _Optional[float] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedCompositeFieldContainer[SampleId]
    def __init__(self, ids: _Optional[_Iterable[_Union[SampleId, _Mapping]]] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedCompositeFieldContainer[SampleId]
    def __init__(self, ids: _Optional[_Iterable[_Union[SampleId, _Mapping]]] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("manifest", "deadline_s")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    deadline_s: float
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("version", "transfer_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    version: int
    transfer_id: str
    def __init__(self, version: _Optional[int] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("started_at", "version", "units", "streams", "dispatch")
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    started_at: float
    version: int
    units: _containers.RepeatedCompositeFieldContainer[UnitStatus]
    streams: _containers.RepeatedCompositeFieldContainer[StreamStatus]
    dispatch: str
    def __init__(self, started_at: _Optional[float] = ..., version: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitStatus, _Mapping]]] = ..., streams: _Optional[_Iterable[_Union[StreamStatus, _Mapping]]] = ..., dispatch: _Optional[str] = ...) -> None: ...

class UnitStatus(_message.Message):
    __slots__ = ("unit_id", "engine", "host", "slots", "assigned", "version", "weights", "heartbeat", "heartbeat_age_s", "finished", "metrics_address")
    UNIT_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    unit_id: str
    engine: str
    host: str
    slots: int
    assigned: int
    version: int
    weights: UnitWeights
    heartbeat: Heartbeat
    heartbeat_age_s: float
    finished: int
    metrics_address: str
    def __init__(self, unit_id: _Optional[str] = ..., engine: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., assigned: _Optional[int] = ..., version: _Optional[int] = ..., weights: _Optional[_Union[UnitWeights, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., heartbeat_age_s: _Optional[float] = ..., finished: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class StreamStatus(_message.Message):
    __slots__ = ("run_id", "stream", "queued", "running", "delivered", "acknowledged", "failed", "min_version", "connected")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    stream: str
    queued: int
    running: int
    delivered: int
    acknowledged: int
    failed: int
    min_version: int
    connected: bool
    def __init__(self, run_id: _Optional[str] = ..., stream: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., delivered: _Optional[int] = ..., acknowledged: _Optional[int] = ..., failed: _Optional[int] = ..., min_version: _Optional[int] = ..., connected: bool = ...) -> None: ...
