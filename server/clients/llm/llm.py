"""`LLM`: generate tokens in a script, without running a server.

    from wideep import LLM, SamplingParams

    with LLM("demo", data_parallel_size=2) as llm:
        for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(result.outputs[0].text)

The names are those of vLLM's class. A private service runs behind it (`clients.private_service` explains why), so the
tokens are those of `wideep serve`. The service renders and tokenizes a chat, and then completes it like any other prompt:
its text is the model's output, including tool calls and reasoning, as in vLLM's class.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from server.api.openai.batches.bulk_client import BulkClient
from server.clients.llm.requests import LLMError, Question, complete_all
from server.clients.llm.results import RequestOutput, SamplingParams
from server.clients.private_service import PrivateService
from server.options.reading import options_from_keywords
from server.options.table import DEMO_MODEL

Result = TypeVar("Result")
Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model for this script. A context manager: leaving it ends all processes of the service."""

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        """Start the model's ranks and wait until they are ready.

        Args:
            model: Hugging Face directory, hub name, or "demo".
            options: Options of `wideep serve`, with underscores: data_parallel_size=2, max_model_len=4096, ...

        Raises:
            OptionsError: An option is unknown or has an invalid value.
            ServiceEndedError: The ranks did not start; the message names the cause.
        """
        self._service = PrivateService(options_from_keywords(model, options))
        self._loop = _LoopThread()
        # Also closes the service if the script drops its last reference to this object, or ends.
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._service, self._loop)
        try:
            self._service.wait_ready()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at once as the ranks can run; results are in the order of the prompts.

        Args:
            prompts: One or several prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: One for all prompts, or one for each; None is `SamplingParams()`.
            use_tqdm: Show a progress bar if stderr is a terminal.

        Raises:
            LLMError: The service refused a prompt or a parameter; the other prompts are cancelled.
            ServiceLostError: A process of the service died.
        """
        wanted = [_prompt_of(prompt) for prompt in _listed(prompts)]
        return self._run(wanted, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer chats with the checkpoint's chat template; otherwise the same as `generate`.

        Args:
            messages: One or several conversations, each a list of {"role": ..., "content": ...}. Content may have image
                parts, as in /v1/chat/completions.
            add_generation_prompt: End the prompt at the beginning of the assistant's message.
            continue_final_message: Leave the last message open for continuation; requires
                add_generation_prompt=False.
            tools: Tools that the template describes to the model.
            chat_template_kwargs: Additional variables of the template.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        said = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        common = {name: value for name, value in said.items() if value is not None} | {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        chats = [{"messages": list(conversation), **common} for conversation in conversations]
        return self._run(chats, sampling_params, use_tqdm)

    def close(self) -> None:
        """End every process of the service. Further calls have no effect."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed; create another one")
        params = _params_for(prompts, sampling_params)
        questions = [Question(*each) for each in zip(range(len(prompts)), prompts, params, strict=True)]
        return self._loop.run(complete_all(questions, self._client(), shows_bar=use_tqdm))

    def _client(self) -> BulkClient:
        service = self._service
        return BulkClient(
            service.url, service.api_key, concurrency=service.num_places, why_gone=service.why_gone
        )


class _LoopThread:
    """An event loop in a separate thread: the script's thread may already have a loop, as in notebooks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wideep-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run the work to its end; Ctrl-C in the waiting thread cancels it and every open request."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(owner_pid: int, service: PrivateService, loop: _LoopThread) -> None:
    if os.getpid() == owner_pid:  # a forked child must not close its parent's service
        service.close()
        loop.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, even if only one was given."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _prompt_of(prompt: Prompt) -> str | list[int]:
    """Reduce the forms of a prompt to two: text and token ids."""
    if isinstance(prompt, Mapping):
        known = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
        if not known:
            raise LLMError(f"a prompt has {sorted(prompt)}; give 'prompt' or 'prompt_token_ids'")
        [prompt, *_] = known
    return prompt if isinstance(prompt, str) else [int(token_id) for token_id in prompt]


def _params_for(
    prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """Return the parameters for each prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise LLMError(f"{len(prompts)} prompts, but {len(given)} sampling_params; give one for each prompt")
    return given
