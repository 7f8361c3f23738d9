"""Python client of Baton, asyncio and blocking.

    with BatonClient("127.0.0.1:50051") as baton:
        for event in baton.generate("Once upon a time", max_tokens=50):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

Events do not depend on the workers behind them; only `AdminClient` shows prefill, decode and blocks.
"""

from baton.client.async_client import AsyncAdminClient as AsyncAdminClient
from baton.client.async_client import AsyncBatonClient as AsyncBatonClient
from baton.client.cluster import AdapterStatus as AdapterStatus
from baton.client.cluster import CacheView as CacheView
from baton.client.cluster import Candidate as Candidate
from baton.client.cluster import ClusterStatus as ClusterStatus
from baton.client.cluster import EndedRequests as EndedRequests
from baton.client.cluster import ExplainedAttempt as ExplainedAttempt
from baton.client.cluster import Latency as Latency
from baton.client.cluster import Link as Link
from baton.client.cluster import Load as Load
from baton.client.cluster import PageCounts as PageCounts
from baton.client.cluster import PlannerStatus as PlannerStatus
from baton.client.cluster import Quantiles as Quantiles
from baton.client.cluster import RecentRequest as RecentRequest
from baton.client.cluster import RequestDrafts as RequestDrafts
from baton.client.cluster import RequestExplanation as RequestExplanation
from baton.client.cluster import RequestStages as RequestStages
from baton.client.cluster import RequestStall as RequestStall
from baton.client.cluster import RequestTotals as RequestTotals
from baton.client.cluster import RouterStatus as RouterStatus
from baton.client.cluster import StallCausePart as StallCausePart
from baton.client.cluster import TierView as TierView
from baton.client.cluster import TokenTimes as TokenTimes
from baton.client.cluster import WorkerStatus as WorkerStatus
from baton.client.errors import BatonClientError as BatonClientError
from baton.client.errors import Busy as Busy
from baton.client.errors import Cancelled as Cancelled
from baton.client.errors import DeadlineExceeded as DeadlineExceeded
from baton.client.errors import ErrorDetails as ErrorDetails
from baton.client.errors import InvalidRequest as InvalidRequest
from baton.client.errors import ModelNotFound as ModelNotFound
from baton.client.errors import NotAllowed as NotAllowed
from baton.client.errors import ProtocolError as ProtocolError
from baton.client.errors import ServerError as ServerError
from baton.client.errors import Unavailable as Unavailable
from baton.client.requests import ChatOptions as ChatOptions
from baton.client.requests import GenerateOptions as GenerateOptions
from baton.client.requests import VectorOptions as VectorOptions
from baton.client.retry import RetryPolicy as RetryPolicy
from baton.client.sync_client import AdminClient as AdminClient
from baton.client.sync_client import BatonClient as BatonClient
from baton.client.types import Alternative as Alternative
from baton.client.types import CallBegins as CallBegins
from baton.client.types import CallPart as CallPart
from baton.client.types import Choice as Choice
from baton.client.types import Completion as Completion
from baton.client.types import Delta as Delta
from baton.client.types import Embeddings as Embeddings
from baton.client.types import Event as Event
from baton.client.types import Finished as Finished
from baton.client.types import FinishReason as FinishReason
from baton.client.types import Message as Message
from baton.client.types import Model as Model
from baton.client.types import PromptPart as PromptPart
from baton.client.types import Scores as Scores
from baton.client.types import Started as Started
from baton.client.types import ThoughtPart as ThoughtPart
from baton.client.types import Timings as Timings
from baton.client.types import TokenLogprob as TokenLogprob
from baton.client.types import ToldPrompt as ToldPrompt
from baton.client.types import Tool as Tool
from baton.client.types import ToolCall as ToolCall
from baton.client.types import Usage as Usage
from baton.client.why import BlockRun as BlockRun
from baton.client.why import CacheAutopsy as CacheAutopsy
from baton.client.why import ColocatedPrefill as ColocatedPrefill
from baton.client.why import PromptChange as PromptChange
from baton.client.why import RequestWhy as RequestWhy
