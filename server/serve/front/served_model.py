"""The model as clients see it: its tokenizer and template, defaults of sampling, limits, parsers and images."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server.api.parsers.registry import markup_of, shows_known_calls
from server.api.served import ServedModel
from server.front.adapters.registry import KnownAdapters
from server.front.images.encoder import Encoder, EncoderSettings
from server.front.images.input import ImageInput, ReadFile
from server.front.images.seeing import ImageSupport, image_support_of
from server.front.images.sources import ImageSources
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import TemplateFacts, Tokenizer
from server.http.exchanges import seeds_from
from server.link.image_rows import MOST_ROW_BYTES
from server.link.ranks import Ranks
from server.options.table import PRIORITY, Options
from server.serve.preflight.memory import has_image_experts

_LOG = logging.getLogger("wideep.front")
# The same fields of generation_config.json that vLLM uses as defaults.
_DEFAULTS: dict[str, type[float] | type[int]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "max_new_tokens"), int),
}


def served_model(
    options: Options, tokenizer: Tokenizer, ranks: Ranks, adapters: KnownAdapters, read_file: ReadFile
) -> ServedModel:
    warn_of_unknown_calls(options, tokenizer.template)
    support = image_support(options, tokenizer.special_ids)
    return ServedModel(
        names=options.served_model_names,
        adapters=adapters,
        directory=options.model,
        has_metrics=options.per_request_metrics,
        has_priorities=options.scheduling_policy == PRIORITY,
        tokenizer=tokenizer,
        sampling_defaults=_sampling_defaults(Path(options.model)),
        draw_seed=seeds_from(options.seed),
        max_logprobs=options.max_logprobs,
        max_len=_max_len(options, tokenizer, ranks),
        created=int(time.time()),
        structures=StructureChecks(tokenizer.vocabulary),
        images=None if support.why_not else _image_input(options, support, ranks, read_file),
        why_no_images=support.why_not,
        markup=markup_of(
            tokenizer.template.text, tools=options.tool_call_parser, reasoning=options.reasoning_parser
        ),
    )


def image_support(options: Options, special_ids: Mapping[str, int]) -> ImageSupport:
    """Return how the ranks of a service take images, or why they or the operator refuse them."""
    support = image_support_of(Path(options.model), special_ids, has_image_experts=has_image_experts(options))
    return support._replace(why_not=options.images.why_off or support.why_not)


def _image_input(options: Options, support: ImageSupport, ranks: Ranks, read_file: ReadFile) -> ImageInput:
    images = options.images

    def most_rows() -> int:
        steps = [stream.facts.max_num_batched_tokens for stream in ranks.attached.values()]
        return min(steps, default=0) if support.stays_whole else 0

    def most_bytes() -> int:
        return MOST_ROW_BYTES if ranks.has_far else 0

    settings = EncoderSettings(
        options.model,
        images.most_pixels,
        device=images.encoder_device,
        threads=images.encoder_threads,
        processor=images.processor_settings,
    )
    encoder = Encoder(settings, cache_bytes=images.cache_bytes)
    return ImageInput(
        support.tokens, images.most_images, ImageSources(images), encoder, most_rows, most_bytes, read_file
    )


def _max_len(options: Options, tokenizer: Tokenizer, ranks: Ranks) -> Callable[[], int]:
    """Return a function for the length limit: the ranks' once they attach, before that the user's or the checkpoint's."""

    def limit() -> int:
        said = [stream.facts.max_model_len for stream in ranks.attached.values()]
        return min(said, default=options.engine.max_model_len or tokenizer.model_max_len or 0)

    return limit


def warn_of_unknown_calls(options: Options, template: TemplateFacts) -> None:
    """Warn if the chat template has tools but no parser reads its calls: they would stay in the content."""
    if options.tool_call_parser is None and template.knows_tools and not shows_known_calls(template.text):
        _LOG.warning(
            "No tool parser matches the chat template of %s. Calls are parsed in Hermes' format (<tool_call>{...}</tool_call>); "
            "other formats stay in the content. Choose a parser with --tool-call-parser",
            options.chat_template or options.model,
        )


def _sampling_defaults(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: kind(config[name]) for name, kind in _DEFAULTS.items() if config.get(name) is not None}
