"""The Python client of Baton, async and sync.

    with BatonClient("127.0.0.1:50051") as baton:
        for event in baton.generate("Once upon a time", max_tokens=50):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

The events do not depend on the workers that serve them. The client knows prefill, decode and blocks only from
`AdminClient.status`.
"""

from baton.client.async_client import AsyncAdminClient, AsyncBatonClient
from baton.client.cluster import (
    CacheView,
    Candidate,
    ClusterStatus,
    EndedRequests,
    ExplainedAttempt,
    Latency,
    Link,
    Load,
    PageCounts,
    PlannerStatus,
    Quantiles,
    RecentRequest,
    RequestDrafts,
    RequestExplanation,
    RequestStages,
    RequestStall,
    RequestTotals,
    RouterStatus,
    StallCausePart,
    TokenTimes,
    WorkerStatus,
)
from baton.client.errors import (
    BatonClientError,
    Busy,
    Cancelled,
    DeadlineExceeded,
    ErrorDetails,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    ProtocolError,
    ServerError,
    Unavailable,
)
from baton.client.requests import GenerateOptions
from baton.client.retry import RetryPolicy
from baton.client.sync_client import AdminClient, BatonClient
from baton.client.types import (
    Alternative,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Message,
    Model,
    PromptPart,
    Started,
    Timings,
    TokenLogprob,
    ToldPrompt,
    Usage,
)
from baton.client.why import (
    BlockRun,
    CacheAutopsy,
    ColocatedPrefill,
    RequestWhy,
)

__all__ = [
    "AdminClient",
    "Alternative",
    "AsyncAdminClient",
    "AsyncBatonClient",
    "BatonClient",
    "BatonClientError",
    "BlockRun",
    "Busy",
    "CacheAutopsy",
    "CacheView",
    "Cancelled",
    "Candidate",
    "Choice",
    "ClusterStatus",
    "ColocatedPrefill",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "EndedRequests",
    "ErrorDetails",
    "Event",
    "ExplainedAttempt",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InvalidRequest",
    "Latency",
    "Link",
    "Load",
    "Message",
    "Model",
    "ModelNotFound",
    "NotAllowed",
    "PageCounts",
    "PlannerStatus",
    "PromptPart",
    "ProtocolError",
    "Quantiles",
    "RecentRequest",
    "RequestDrafts",
    "RequestExplanation",
    "RequestStages",
    "RequestStall",
    "RequestTotals",
    "RequestWhy",
    "RetryPolicy",
    "RouterStatus",
    "ServerError",
    "StallCausePart",
    "Started",
    "Timings",
    "TokenLogprob",
    "TokenTimes",
    "ToldPrompt",
    "Unavailable",
    "Usage",
    "WorkerStatus",
]
