"""For scripts: `from wideep import LLM, SamplingParams`. What stands here is public."""

from server.batches.bulk_client import ServiceLostError
from server.clients.llm.llm import LLM
from server.clients.llm.requests import LLMError
from server.clients.llm.results import CompletionOutput, Logprob, RequestOutput, SamplingParams
from server.options.flag import OptionsError
from server.process.private_service import ServiceEndedError

__all__ = [
    "LLM",
    "CompletionOutput",
    "LLMError",
    "Logprob",
    "OptionsError",
    "RequestOutput",
    "SamplingParams",
    "ServiceEndedError",
    "ServiceLostError",
]
