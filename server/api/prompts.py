"""The four forms of a completion's prompt: text, token ids, or a list of either."""

from collections.abc import Sequence

from server.api.schemas import MAX_CHOICES, CompletionRequest
from server.api.text import encode
from server.errors import bad_request
from server.front.served import ServedModel

_FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids."
_NONE = f"Either prompt or prompt_embeds must be provided and non-empty, and this server takes no embeddings. {_FORMS}"


async def encode_prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """Bring the four forms of a prompt to lists of token ids.

    Raises:
        ApiError: 400, none of the four forms, empty, or an id that the model does not have.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await _encode_text(body, prompt, model)]
    if prompt is None or prompt == []:
        raise bad_request(_NONE, "prompt")
    if not isinstance(prompt, list):
        raise bad_request(_FORMS, "prompt")
    if all(type(each) is int for each in prompt):
        return [_check_ids(prompt, model)]
    if len(prompt) > MAX_CHOICES:
        raise bad_request(
            f"prompt is a list of {len(prompt)}; up to {MAX_CHOICES} are taken at once.", "prompt"
        )
    if all(isinstance(each, str) for each in prompt):
        return [await _encode_text(body, each, model) for each in prompt]
    if all(isinstance(each, list) and all(type(number) is int for number in each) for each in prompt):
        return [_check_ids(each, model) for each in prompt]
    raise bad_request(_FORMS, "prompt")


def echo_of(body: CompletionRequest, place: int, prompt_ids: Sequence[int], model: ServedModel) -> str:
    """Return the text of prompt number `place`: as it was sent, where it was text and is whole."""
    sent = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(sent[place], str) and body.truncate_prompt_tokens is None:
        return str(sent[place])
    return model.tokenizer.decode(prompt_ids, skip_special_tokens=False)


async def _encode_text(body: CompletionRequest, text: str, model: ServedModel) -> list[int]:
    return await encode(text, model, add_special_tokens=body.add_special_tokens is not False, param="prompt")


def _check_ids(token_ids: list[int], model: ServedModel) -> list[int]:
    if not token_ids:
        raise bad_request("prompt is empty: there is no token to start from.", "prompt")
    low, high, last = min(token_ids), max(token_ids), model.tokenizer.vocab_size - 1
    if low < 0:
        raise bad_request(f"prompt has token id {low}; ids must be greater than or equal to 0.", "prompt")
    if high > last:
        raise bad_request(
            f"prompt has token id {high}, which is out of vocabulary; ids are 0 to {last}.", "prompt"
        )
    return token_ids
