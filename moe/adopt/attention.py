"""One launch between an attention module's products and its attention, on GPUs; the products of one input become one.

The launch norms heads, rotates them and writes the cache (`attention.gpu.prepare`). A module gets this forward if a trial on
seeded rows finds what its own forward computes: the queries that reach the attention function, the rows that reach the
cache, the options of both, and the module's result. In the trial, a cheap function takes the place of attention. Every
module is tried, because layers of one class may differ. Rows are small and large and positions are far, so that clamps and
scales by position show. Modules that do more (gates on the result, indexes, shared caches, other norms) keep their own code.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.gpu.prepare import Angles, HeadNorm, prepare, prepare_latents
from attention.gpu.rotary import Rotation
from attention.transformers_names import CACHE
from kvcache.paged_cache import BLOCK_TOKENS
from moe.adopt.adopt import SPREADS, Candidate, SampleRows, by_size, draw_spread
from moe.adopt.norms import epsilon, weight_of
from moe.adopt.products import Products
from moe.adopt.rotary import called_by, draw_angles, forward_of, kind_of

_TRIED = "wideep_trial"  # name of the function that takes the place of attention
_TAKEN = ["self", "hidden_states", "position_embeddings", "attention_mask"]  # first parameters of a forward
_POSITIONS = (3, 10_000, 100_000, 1_000_000)
_SLOTS, _BLOCKS = (5, 0, 17, 33), 3  # of the trial's pages
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}  # of a row's largest value
_OF_LATENTS = (
    "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
_FOREIGN_ERRORS = (KeyError, AssertionError)  # raised by caches and organs; others: see `adopt`


class Form(Protocol):
    """What runs between a module's input and its attention."""

    @property
    def products(self) -> Products:
        """Products of the module's input."""

    @property
    def angle_dim(self) -> int:
        """Number of dims that may be rotated."""

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a block of keys and a block of values."""

    def prepared(self, x: Tensor, angles: Angles, pages: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values. Return queries [1, H, T, D], and a tensor with V columns."""


class HeadsForm(NamedTuple):
    """Heads with keys and values."""

    products: Products
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None

    @property
    def angle_dim(self) -> int:
        """Number of dims that may be rotated."""
        return self.dim

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a block of keys and a block of values."""
        return (self.kv_heads, BLOCK_TOKENS, self.dim), (self.kv_heads, BLOCK_TOKENS, self.value_dim)

    def prepared(self, x: Tensor, angles: Angles, pages: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Norm and rotate heads, and write keys and values."""
        query, key, value = self.products(x)
        query_THD = query[0].view(-1, self.heads, self.dim)
        value_TGV = value[0].view(-1, self.kv_heads, self.value_dim)
        prepare(
            query_THD, key[0].view(-1, self.kv_heads, self.dim), value_TGV, angles,
            pages.step.on_device.cache_slot_P, pages.keys[layer], pages.values[layer], query_norm=self.query_norm,
            key_norm=self.key_norm, scales=pages.scales[layer],
        )  # fmt: skip
        return query_THD.transpose(0, 1)[None], value_TGV.transpose(0, 1)[None]


class LatentsForm(NamedTuple):
    """Multi-head latent attention. Queries may come from separate latents."""

    products: Products  # of queries or their latents, and of the cached latents
    query_tail: nn.Module | None  # from latents to queries
    heads: int
    dim: int
    value_dim: int
    rotary_dim: int
    latent_dim: int
    norm: HeadNorm

    @property
    def angle_dim(self) -> int:
        """Number of dims that may be rotated."""
        return self.rotary_dim

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of a block of latents."""
        return (BLOCK_TOKENS, self.latent_dim + self.rotary_dim), (0,)

    def prepared(self, x: Tensor, angles: Angles, pages: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Rotate queries and write latents."""
        query, latent = self.products(x)
        query = query if self.query_tail is None else self.query_tail(query)
        query_THD = query[0].view(-1, self.heads, self.dim)
        prepare_latents(
            query_THD, latent[0], self.norm, angles, pages.step.on_device.cache_slot_P, pages.keys[layer],
            pages.scales[layer],
        )  # fmt: skip
        query_1HTD = query_THD.transpose(0, 1)[None]
        return query_1HTD, query_1HTD[..., : self.value_dim]


def attention(module: Any, rows: SampleRows) -> Iterator[Candidate]:
    """Propose the launch for an attention module with known parts."""
    own = forward_of(module)
    if own is None or list(inspect.signature(own).parameters)[:4] != _TAKEN:
        return
    if any(not hasattr(module, name) for name in ("config", "layer_idx", "scaling")):
        return
    form = _heads_form(module) or _latents_form(module)
    if form is None:
        return
    for rotation in dict.fromkeys(kind_of(own.__globals__[name]) for name in called_by(own)):
        if rotation is not None:
            forward = MethodType(partial(_forward, form, rotation, _output_of(module)), module)
            seen: list[tuple[Any, ...]] = []  # the own attention's options
            yield Candidate(
                own=partial(_own_results, module, module.forward, seen),
                ours=partial(_our_results, module, forward, seen),
                arguments=partial(_draw, module, form, rotation, rows),
                tolerance=_TOLERANCE[rows.dtype],
                install=partial(_install, module, form, forward),
            )


def _install(module: Any, form: Form, forward: Callable[..., Any]) -> None:
    form.products.pack()
    module.forward = forward


def _forward(
    form: Form,
    rotation: Rotation,
    output: nn.Module,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    *_more: Any,
    pages: Any,
    **_options: Any,
) -> tuple[Tensor, None]:
    cosines, sines = position_embeddings
    angles = Angles(cosines[0], sines[0], rotation)
    query, value = form.prepared(hidden_states, angles, pages, module.layer_idx)
    attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    mean_1THV, _ = attend(
        module, query, value, value, attention_mask, scaling=module.scaling, pages=pages, s_aux=_sinks_of(module)
    )  # fmt: skip
    return output(mean_1THV.flatten(2)), None


def _sinks_of(module: Any) -> Tensor | None:
    sinks: Tensor | None = getattr(module, "sinks", None)
    return sinks


def _output_of(module: Any) -> Any:
    return getattr(module, "o_proj", None) or getattr(module, "out_proj", None)


def _heads_form(module: Any) -> HeadsForm | None:
    layers: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    output, dim = _output_of(module), getattr(module, "head_dim", None)
    if not all(isinstance(layer, nn.Linear) for layer in (*layers, output)) or not isinstance(dim, int):
        return None
    query_out, key_out, value_out = (int(layer.out_features) for layer in layers)
    heads, kv_heads = query_out // dim, key_out // dim
    if heads * dim != query_out or kv_heads * dim != key_out or value_out % max(kv_heads, 1):
        return None
    value_dim, is_known = value_out // kv_heads, True
    norms: list[HeadNorm | None] = []
    for names in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
        found = next(filter(None, (getattr(module, name, None) for name in names)), None)
        norms.append(_norm_of(found, dim))
        is_known = is_known and (found is None) == (norms[-1] is None)
    if not is_known or output.in_features != heads * value_dim or value_dim > dim:
        return None
    return HeadsForm(Products(layers), heads, kv_heads, dim, value_dim, *norms)


def _latents_form(module: Any) -> LatentsForm | None:
    output = _output_of(module)
    if any(getattr(module, name, None) is None for name in _OF_LATENTS) or not isinstance(output, nn.Linear):
        return None
    latent_dim, rotary_dim, value_dim = (
        int(each) for each in (module.kv_lora_rank, module.qk_rope_head_dim, module.v_head_dim)
    )
    dim, norm = int(module.qk_nope_head_dim) + rotary_dim, _norm_of(module.kv_a_layernorm, latent_dim)
    first: Any = getattr(module, "q_proj", None)
    last = first
    tail: nn.Module | None = None
    if first is None:
        parts: list[Any] = [getattr(module, name, None) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")]
        if any(part is None for part in parts):
            return None
        first, last, tail = parts[0], parts[2], nn.Sequential(*parts[1:])
    latents = module.kv_a_proj_with_mqa
    if norm is None or not all(isinstance(layer, nn.Linear) for layer in (first, last, latents)):
        return None
    heads = int(last.out_features) // dim
    is_known = last.out_features == heads * dim and output.in_features == heads * value_dim
    if not is_known or value_dim > dim or latents.out_features != latent_dim + rotary_dim:
        return None
    products = Products([first, latents])
    return LatentsForm(products, tail, heads, dim, value_dim, rotary_dim, latent_dim, norm)


def _norm_of(norm: Any, dim: int) -> HeadNorm | None:
    """Return an adopted norm of rows of this width."""
    eps = None if norm is None or "multiplied" not in vars(norm) else epsilon(norm)
    if eps is None or len(weight_of(norm)) != dim:
        return None
    return HeadNorm(weight_of(norm), eps)


class _Trial:
    """The pages and the cache of a trial: records what reaches them and attention."""

    def __init__(self, layer: int, form: Form, rows: SampleRows) -> None:
        self._slots = torch.tensor(_SLOTS, device=rows.device)
        self.step = SimpleNamespace(on_device=SimpleNamespace(cache_slot_P=self._slots))
        self.keys, self.values = (
            {layer: torch.zeros(_BLOCKS, *shape, dtype=rows.dtype, device=rows.device)}
            for shape in form.page_shapes
        )
        self.scales = {layer: None}
        self.is_latent = len(form.page_shapes[1]) == 1
        self._layer = layer
        self.cached: list[Tensor] = []
        self.attended: list[Tensor] = []
        self.options: tuple[Any, ...] = ()

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Record rows as [T, heads * dim]."""
        if layer != self._layer or self.cached:
            raise TypeError("a module that caches another layer's rows, or several")
        self.cached = [each[0].transpose(0, 1).flatten(1).clone() for each in (key, value)]
        return key, value

    def written(self) -> list[Tensor]:
        """Return the pages' rows of the slots, as `update` records them."""
        block, token = self._slots // BLOCK_TOKENS, self._slots % BLOCK_TOKENS
        keys, values = self.keys[self._layer], self.values[self._layer]
        if self.is_latent:
            return [keys[block, token]]
        return [pages[block, :, token].flatten(1) for pages in (keys, values)]


def _attend_in_trial(
    _module: Any, query: Tensor, _key: Tensor, value: Tensor, _mask: Any = None, *, scaling: float, pages: _Trial,
    s_aux: Tensor | None = None, indices: Tensor | None = None, **_options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Record the call; the result depends on the query only."""
    if indices is not None or pages.attended:
        raise TypeError("a module that attends to chosen tokens, or twice")
    pages.attended = [query.clone()]
    pages.options = float(scaling), value.shape[-1], s_aux is None
    if s_aux is not None:
        pages.attended.append(s_aux.detach().clone())
    return query.transpose(1, 2)[..., : value.shape[-1]].contiguous(), None


def _draw(
    module: Any, form: Form, rotation: Rotation, rows: SampleRows
) -> tuple[Tensor, Tensor, Tensor, _Trial]:
    hidden = draw_spread(rows, form.products.in_features)
    parameters = getattr(module.config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor") or 1.0
    is_partial = isinstance(form, HeadsForm) and isinstance(share, float)
    dim = int(form.angle_dim * share) // 2 * 2 if is_partial else form.angle_dim
    return hidden, *draw_angles(rows, rotation, len(SPREADS), dim), _Trial(int(module.layer_idx), form, rows)


def _run(
    module: Any, forward: Callable[..., Any], hidden: Tensor, cos: Tensor, sin: Tensor, trial: _Trial
) -> tuple[Tensor, ...]:
    """Run a forward. Return its results, except those that reached the cache."""
    ALL_ATTENTION_FUNCTIONS.register(_TRIED, _attend_in_trial)
    config = module.config
    before, config._attn_implementation = config._attn_implementation, _TRIED
    try:
        out = forward(
            hidden_states=hidden, position_embeddings=(cos, sin), attention_mask=None, pages=trial,
            position_ids=torch.tensor([_POSITIONS], device=hidden.device), **{CACHE: trial},
        )  # fmt: skip
    except _FOREIGN_ERRORS as error:
        raise TypeError("a module of another kind") from error
    finally:
        config._attn_implementation = before
    if not isinstance(out, tuple) or len(out) != 2 or not trial.attended:
        raise TypeError("a module with other results")
    return out[0], *trial.attended


def _own_results(
    module: Any,
    forward: Callable[..., Any],
    seen: list[tuple[Any, ...]],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    trial: _Trial,
) -> list[Tensor]:
    results = _run(module, forward, hidden, cos, sin, trial)
    if not trial.cached:
        raise TypeError("a module that caches nothing")
    seen.append(trial.options)
    cached = [torch.cat(trial.cached, -1)] if trial.is_latent else trial.cached
    return by_size([*results, *cached])


def _our_results(
    module: Any,
    forward: Callable[..., Any],
    seen: list[tuple[Any, ...]],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    trial: _Trial,
) -> list[Tensor]:
    """Return results like `_own_results`, or none if the options of attention differ."""
    results = _run(module, forward, hidden, cos, sin, trial)
    return by_size([*results, *trial.written()]) if trial.options == seen[-1] else []
