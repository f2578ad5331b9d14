"""Run decoder layers as programs if these give the results of their modules; tried before the first step.

The model runs once on a few tokens, and each layer's input and output are recorded. A layer's program replaces the modules
if its output agrees. In the trial, a cheap function of all inputs replaces the experts. So it is local and does not
depend on the number of ranks, as the result must not. With one rank, programs that include the
experts are tried too, bit for bit against those without.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dispatch.dispatcher import Dispatcher
from dispatch.wires.local import LocalWire
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Step
from moe.adopt.adopt import FOREIGN_ERRORS, Candidate, first_agreeing
from moe.adopt.norms import epsilon, weight_of
from moe.adopt.whole import TRIAL_BLOCKS, any_experts, note_products, run_whole
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.program.activations import Activations
from moe.cpu.program.draft import DraftProgram, is_fit
from moe.cpu.program.layer import LayerProgram, why_not_whole
from moe.cpu.program.layer_parts import Norm, parts_of
from moe.cpu.program.net import NetProgram, are_fit
from moe.cpu.program.step import DecoderProgram, StepProgram
from moe.mtp.layers import Drafted, Origin, drafting_of
from moe.text_part import body_of

_TOLERANCE = 1e-4  # for hidden values; sums have another order


class _Call(NamedTuple):
    """Call of a layer in the model's own run."""

    x: Tensor
    options: dict[str, Any]
    returned: Any
    num_rows: int  # without padding


def adopt_layers(net: Any, step: Step, shapes: Sequence[LayerShape]) -> int:
    """Let decoder layers run as programs. Return how many do. Local; refills the step.

    Args:
        net: Model with loaded weights and adopted routers.
        step: Step that the model's steps will be filled into.
        shapes: Shapes of what its layers cache.
    """
    mixed = [
        module for module in net.modules() if hasattr(module, "self_attn") or hasattr(module, "linear_attn")
    ]
    found = [(module, parts_of(module, shapes)) for module in mixed]
    layers = [(module, parts) for module, parts in found if parts is not None]
    if step.num_adapters:
        note_products(net, step, _cache(step, shapes))
    if not layers:
        return 0
    activations = Activations(len(step.token_T))
    adopted = []
    with torch.no_grad():
        with any_experts(net):
            calls = _run_once(net, [module for module, _ in layers], step, _cache(step, shapes))
            pages = _cache(step, shapes)
            for module, parts in layers:
                program = LayerProgram(module, parts, step, activations)
                if module in calls and _is_adopted(module, program, calls[module], pages):
                    adopted.append((module, program))
            programs, pages_of_all = dict(adopted), _cache(step, shapes)
            _adopt_decoder(net, programs, step, activations, pages_of_all)
            _adopt_drafts(net, programs, step, activations, pages_of_all)
        for module, program in adopted:
            _try_whole(program, calls[module], pages)
    return len(adopted)


def _cache(step: Step, shapes: Sequence[LayerShape]) -> PagedCache:
    """Return pages for the trials. They have no codes: those of nearly equal numbers may differ by a whole step."""
    plain = [replace(shape, codes=None) for shape in shapes]
    cache = PagedCache(plain, TRIAL_BLOCKS)
    cache.step = step
    return cache


def _run_once(
    net: Any, modules: Sequence[nn.Module], step: Step, cache: PagedCache
) -> dict[nn.Module, _Call]:
    """Run a prompt and, if there is room, a decode. Return the calls of the modules with their results."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], returned: Any) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            answer = returned.clone() if isinstance(returned, Tensor) else returned
            calls[module] = _Call(inputs[0].clone(), options, answer, step.num_tokens)

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        run_whole(net, step, cache)
        _run_drafts(net, step, cache)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _run_drafts(net: Any, step: Step, cache: PagedCache) -> list[Drafted]:
    """Run all multi-token-prediction layers on the rows that have just run. Return copies of the results."""
    drafting = drafting_of(net)
    if drafting is None:
        return []
    vocabulary, width = net.get_input_embeddings().weight.shape
    generator, rows = torch.Generator().manual_seed(1), step.num_tokens
    token_T = torch.randint(vocabulary, (step.num_padded,), generator=generator)
    origin = Origin(torch.randn(step.num_padded, width, generator=generator), torch.arange(step.num_padded))
    drafts = []
    for depth in range(drafting.num_layers):
        logits_RV, hidden_TD = drafting.draft(
            depth, token_T, origin, step.model_positions, cache, torch.arange(rows)
        )
        drafts.append(Drafted(logits_RV, hidden_TD[:rows].clone()))
    return drafts


def _adopt_drafts(
    net: Any, programs: dict[nn.Module, LayerProgram], step: Step, activations: Activations, pages: PagedCache
) -> None:
    """Let multi-token-prediction layers run as programs if logits and hidden values are bit-identical."""
    drafting, hidden = drafting_of(net), net.get_input_embeddings().weight.shape[1]
    if drafting is None or not are_fit(net):
        return
    run_whole(net, step, pages)
    wanted = _run_drafts(net, step, pages)
    for layer, head in enumerate(drafting.heads):
        blocks = drafting.blocks(layer)
        if not is_fit(head, hidden) or not all(block in programs for block in blocks):
            continue
        parts = [programs[block] for block in blocks]
        drafting.programs[layer] = DraftProgram(net, head, parts, step, activations)
    for layer, (ours, own) in enumerate(zip(_run_drafts(net, step, pages), wanted, strict=True)):
        if not all(map(torch.equal, ours, own)):
            drafting.programs.pop(layer, None)


def _adopt_decoder(
    net: Any, programs: dict[nn.Module, LayerProgram], step: Step, activations: Activations, pages: PagedCache
) -> None:
    """Run a decoder with only programs as one program, and also the whole model, if logits are bit-identical."""
    decoder: Any = body_of(net)
    layers = list(getattr(decoder, "layers", ()))
    eps = epsilon(decoder.norm) if hasattr(getattr(decoder, "norm", None), "multiplied") else None
    if not layers or eps is None or not all(layer in programs for layer in layers):
        return
    outputs: list[Any] = []
    hook = decoder.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    wanted = run_whole(net, step, pages).clone()
    hook.remove()
    parts = [programs[layer] for layer in layers], Norm(weight_of(decoder.norm), eps), step, activations
    program = DecoderProgram(decoder, StepProgram(*parts))
    program.returns(outputs[0])

    def gives_the_same(module: Any, forward: Any) -> bool:
        module.forward = forward
        try:
            is_same = torch.equal(run_whole(net, step, pages), wanted)
        except FOREIGN_ERRORS:
            is_same = False
        if not is_same:
            del module.forward
        return is_same

    if gives_the_same(decoder, program.forward) and are_fit(net):
        gives_the_same(net, NetProgram(net, *parts).forward)


def _is_adopted(module: nn.Module, program: LayerProgram, call: _Call, pages: PagedCache) -> bool:
    rows = call.num_rows

    def own(_x: Tensor) -> Tensor:
        if not isinstance(call.returned, Tensor):
            raise TypeError  # the layer returns more than rows
        return call.returned[:, :rows]

    def ours(x: Tensor) -> Tensor:
        out: Tensor = program.forward(x, **_on(pages, call.options))
        return out[:, :rows]

    install = partial(setattr, module, "forward", program.forward)
    candidate = Candidate(
        own=own, ours=ours, arguments=lambda: (call.x,), tolerance=_TOLERANCE, install=install
    )
    adopted = (
        program.takes(call.x, call.options.get("position_embeddings"))
        and first_agreeing([candidate]) is not None
    )
    if adopted:
        install()
    return adopted


def _try_whole(program: LayerProgram, call: _Call, pages: PagedCache) -> None:
    """Include a lone rank's experts in a layer's program if the result is bit-identical."""
    experts = program.parts.experts
    layer = None if experts is None else experts.expert_layer
    if not isinstance(layer, PackedExpertLayer) or layer.dispatcher.world_size > 1:
        return
    if why_not_whole(layer, program.parts.hidden) is not None:
        return
    options = _on(pages, call.options)
    before = layer.counts, layer.dispatcher
    alone = Dispatcher(LocalWire(), slots_per_rank=layer.num_groups)
    layer.counts, layer.dispatcher = None, alone  # on a rank that joins later, its own does not work yet
    apart = program.forward(call.x, **options)
    program.may_be_whole = True
    program.may_be_whole = torch.equal(program.forward(call.x, **options), apart)
    alone.close()
    (layer.counts, layer.dispatcher), layer.sample_TD = before, None


def _on(pages: PagedCache, options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options with its pages replaced."""
    return {name: pages if isinstance(option, PagedCache) else option for name, option in options.items()}
