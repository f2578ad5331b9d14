"""`LLM`: tokens for a script, without a server of its own to look after.

    from wideep import LLM, SamplingParams

    with LLM("demo", data_parallel_size=2) as llm:
        for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(result.outputs[0].text)

The names are those of vLLM's class. Behind it runs a private service (see `processes.private_service`, which says why), so the
tokens are the ones that `wideep serve` gives. A chat is rendered and tokenized by the service and then completed like
any other prompt: its text is what the model wrote, with no tool call or reasoning cut out of it, as in vLLM's class.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from server.batches.bulk_client import BulkClient
from server.clients.llm.requests import LLMError, Question, complete_all
from server.clients.llm.results import RequestOutput, SamplingParams
from server.options.reading import options_from_keywords
from server.options.table import DEMO_MODEL
from server.process.private_service import PrivateService

Result = TypeVar("Result")
Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers this script. A context manager: leaving ends all of its processes."""

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        """Start the model's ranks and wait until they answer.

        Args:
            model: a Hugging Face directory, a hub name, or "demo".
            options: those of `wideep serve`, with underscores: data_parallel_size=2, max_model_len=4096, ...

        Raises:
            OptionsError: an option that does not exist, or a wrong value.
            ServiceEndedError: the ranks did not start; the message says why.
        """
        self._service = PrivateService(options_from_keywords(model, options))
        self._loop = _LoopThread()
        # Also when the script forgets about us, or ends.
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
        """Continue prompts, as many at once as the ranks have room for; results are in the prompts' order.

        Args:
            prompts: one or several: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all, or one for each; None is `SamplingParams()`.
            use_tqdm: show a bar, where stderr is a terminal.

        Raises:
            LLMError: the service refused a prompt or a parameter; nothing is generated any more.
            ServiceLostError: a process of the service died.
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
        """Answer chats through the checkpoint's chat template; otherwise as `generate`.

        Args:
            messages: one conversation or several, each a list of {"role": ..., "content": ...}.
            add_generation_prompt: end the prompt where the assistant begins to speak.
            continue_final_message: leave the last message open, to be continued; then give
                add_generation_prompt=False.
            tools: what the template tells the model that it may call.
            chat_template_kwargs: more for the template.
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
        """End every process of the service. May be called again."""
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
            raise RuntimeError("this LLM was closed; make another one")
        params = _params_for(prompts, sampling_params)
        questions = [Question(*each) for each in zip(range(len(prompts)), prompts, params, strict=True)]
        return self._loop.run(complete_all(questions, self._client(), shows_bar=use_tqdm))

    def _client(self) -> BulkClient:
        service = self._service
        return BulkClient(
            service.url, service.api_key, concurrency=service.num_places, why_gone=service.why_gone
        )


class _LoopThread:
    """An event loop in a thread of its own: the script's thread may have a loop already, as notebooks do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wideep-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run to the end; Ctrl-C in the waiting thread cancels the work, and with it every open request."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(owner_pid: int, service: PrivateService, loop: _LoopThread) -> None:
    if os.getpid() == owner_pid:  # a forked child must not end what its parent uses
        service.close()
        loop.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, whether one or several were given."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _prompt_of(prompt: Prompt) -> str | list[int]:
    """Bring the forms of a prompt to two: text and token ids."""
    if isinstance(prompt, Mapping):
        known = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
        if not known:
            raise LLMError(f"a prompt has {sorted(prompt)}; give 'prompt' or 'prompt_token_ids'")
        [prompt, *_] = known
    return prompt if isinstance(prompt, str) else [int(token_id) for token_id in prompt]


def _params_for(
    prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise LLMError(f"{len(prompts)} prompts have {len(given)} sampling_params; give one for each")
    return given
