"""Structured outputs in tests: a vocabulary of bytes and some longer tokens, a matcher, and a model of pure noise."""

from collections.abc import Sequence as List

import numpy as np
import torch

from scheduler.policy.request import Request, SamplingParams, Structure
from scheduler.policy.sequence import Sequence
from scheduler.sampling.sampler import sample
from scheduler.structure.compiler import Vocabulary
from scheduler.structure.grammar import GrammarMatcher, compile_structure, open_tokenizer

END, OTHER_END, ROLE = 256, 257, 258
LONGER = (
    b'{"',
    b'":',
    b'": ',
    b", ",
    b'", "',
    b"}}",
    b"]}",
    b"true",
    b"false",
    b"null",
    b"12",
    b"ab",
    b"  ",
    b"\xc3\xa9",
)
VOCABULARY = Vocabulary(
    tokens=(
        *(bytes([byte]) for byte in range(256)),
        b"<end>",
        b"<other end>",
        b"<role>",
        *LONGER,
        b"",
        b"ab",
    ),
    special_ids=frozenset({END, OTHER_END, ROLE}),
    end_ids=frozenset({END, OTHER_END}),
)
TOKENIZER = open_tokenizer(VOCABULARY)
NUM_TOKENS = len(VOCABULARY.tokens)
BLANKS = [place for place, token in enumerate(VOCABULARY.tokens) if token and not token.strip()]


def matcher_of(structure: Structure, *, ignore_eos: bool = False) -> GrammarMatcher:
    """Return a matcher at the start of a structure."""
    return GrammarMatcher(compile_structure(structure, TOKENIZER), VOCABULARY, ignore_eos=ignore_eos)


def ids_of(text: str) -> list[int]:
    """Return the bytes of a text, which are token ids."""
    return list(text.encode())


def text_of(token_ids: List[int]) -> str:
    """Return the text of tokens. Tokens that end an answer have none."""
    return b"".join(VOCABULARY.tokens[each] for each in token_ids if each not in VOCABULARY.end_ids).decode()


def allowed_by(matcher: GrammarMatcher, size: int = NUM_TOKENS) -> set[int]:
    """Return the tokens allowed next."""
    row = np.zeros(size, dtype=np.float32)
    matcher.mask(row)
    assert not matcher.failure
    return set(np.flatnonzero(row == 0).tolist())


def accepts(structure: Structure, text: str) -> bool:
    """Return whether a structure accepts a complete text: each byte is allowed, and then the end."""
    matcher = matcher_of(structure)
    for token_id in ids_of(text):
        if matcher.has_ended or token_id not in allowed_by(matcher):
            return False
        matcher.advance(token_id)
    return matcher.has_ended or END in allowed_by(matcher)


def generate(structure: Structure, *, seed: int = 0, max_tokens: int = 4000, **params: object) -> Sequence:
    """Sample from noise under a structure's mask until the sequence ends. Blanks are made less likely, since random
    text would be full of them."""
    end_ids = () if params.pop("ignore_eos", False) else (END, OTHER_END)
    settings = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=end_ids,
        structure=structure,
        **params,  # type: ignore[arg-type]
    )
    request = Request(request_id="r", prompt_ids=(1,), params=settings, arrival_s=0.0)
    sequence = Sequence.from_request(request, matcher_of(structure, ignore_eos=not end_ids))
    noise = torch.randn(64, NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    noise[:, BLANKS] -= 3
    assert sequence.matcher is not None
    while sequence.finish_reason(1 << 20) is None and not sequence.matcher.failure:
        row = noise[len(sequence.token_ids) % len(noise)][None].clone()
        sequence.token_ids += sample(row, [sequence]).token_ids
        sequence.matcher.advance(sequence.token_ids[-1])
    return sequence


def answer_of(sequence: Sequence) -> str:
    """Return the generated text."""
    return text_of(sequence.token_ids[sequence.num_prompt_tokens :])
