"""For scripts: `from server.offline import LLM, SamplingParams`. What stands here is public."""

from server.offline.llm import LLM
from server.offline.requests import LLMError
from server.offline.results import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "Logprob", "RequestOutput", "SamplingParams"]
