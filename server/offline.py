"""For scripts: `from wideep import LLM, SamplingParams`. What stands here is public."""

from server.clients.llm.llm import LLM
from server.clients.llm.requests import LLMError
from server.clients.llm.results import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "Logprob", "RequestOutput", "SamplingParams"]
