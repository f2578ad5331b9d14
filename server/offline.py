"""The public names for scripts: `from wideep import LLM, SamplingParams`."""

from server.api.openai.batches.bulk_client import ServiceLostError as ServiceLostError
from server.clients.llm.llm import LLM as LLM
from server.clients.llm.requests import LLMError as LLMError
from server.clients.llm.results import CompletionOutput as CompletionOutput
from server.clients.llm.results import Logprob as Logprob
from server.clients.llm.results import RequestOutput as RequestOutput
from server.clients.llm.results import SamplingParams as SamplingParams
from server.clients.private_service import ServiceEndedError as ServiceEndedError
from server.options.flag import OptionsError as OptionsError
