"""The forms of one vocabulary, compiled and kept by their text.

Imported when the first request asks for a form, because the rest of the engine does without llguidance.
"""

from collections import OrderedDict

from llguidance import LLMatcher

from scheduler.policy.request import Request, Structure
from scheduler.structure.grammar import compile_structure, open_tokenizer
from scheduler.structure.matcher import GrammarMatcher
from scheduler.structure.vocabulary import Vocabulary

MAX_KEPT = 64  # compiled forms


class Forms:
    """One thread's alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the token tree."""
        self._vocabulary, self._tokenizer = vocabulary, open_tokenizer(vocabulary)
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()

    def matcher_for(self, request: Request) -> GrammarMatcher:
        """Return a copy of the request's form that has followed the tokens which an earlier attempt delivered.

        Raises:
            StructureError: it cannot be compiled.
        """
        params = request.params
        assert params.structure is not None, "only requests that ask for a form come here"
        compiled = self._compile(params.structure)
        ignore_eos = not self._vocabulary.end_ids & set(params.stop_token_ids)
        matcher = GrammarMatcher(compiled.deep_copy(), self._vocabulary, ignore_eos=ignore_eos)
        for token_id in request.replayed_ids:
            matcher.advance(token_id)
        return matcher

    def _compile(self, structure: Structure) -> LLMatcher:
        if structure not in self._compiled:
            self._compiled[structure] = compile_structure(structure, self._tokenizer)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structure)
        return self._compiled[structure]
