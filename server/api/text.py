"""Clients' text to token ids."""

import asyncio

from server import errors
from server.errors import bad_request
from server.front.served import ServedModel

LONG_TEXT = 20_000  # characters; encoding more takes milliseconds and leaves the event loop


def check_unicode(text: str, param: str) -> None:
    """Refuse what is no text.

    Raises:
        ApiError: 400, half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} is not valid Unicode: {error.reason} at character {error.start}.", param
        ) from None


async def encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize, long texts beside the event loop.

    Raises:
        ApiError: 400, the text has half a surrogate pair, is empty, or longer than any text that fits.
    """
    check_unicode(text, param)
    # Tokenizing takes a hundred times the text's memory, so what cannot fit is not tokenized.
    least_tokens = -(-len(text) // model.tokenizer.longest_token_chars)
    if least_tokens > model.max_len():
        raise errors.too_long(least_tokens, model.max_len(), None, param, is_least=True)
    if len(text) < LONG_TEXT:
        token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        token_ids = await asyncio.to_thread(
            model.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    if not token_ids:
        raise bad_request(f"{param} is empty: there is no token to start from.", param)
    return token_ids
