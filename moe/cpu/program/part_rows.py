"""Writes a layer's parts as rows of a program: attention to heads or latents, gated delta nets, linear layers, feed-forwards.

The rows write to activations that all layers share, under fixed names.

Legend: as in `layer`.
"""

from torch import Tensor

from attention.cpu.attention import Queries, attention_row
from attention.cpu.heads import HeadNorms, heads_row
from attention.cpu.latents import ROWS_AT_ONCE, LatentRooms, latent_rows, place_row, room_floats
from attention.cpu.lone_latents import MOST, lone_floats
from attention.cpu.norm import norm_rows
from attention.cpu.tiles import LANES
from attention.recurrences.cpu import Side, convolve_row, delta_row
from attention.recurrences.cpu_delta_net import GATE, NORM_GATED, ORDER, RATES
from attention.recurrences.mixers import UNIT_LENGTH
from dispatch.compiled.native import bits_of
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.cpu.kernels.local_experts import SHARE
from moe.cpu.kernels.low_rank import SILU_ROWS, adapt_row
from moe.cpu.kernels.products import grouped_row, linear_row
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.layer_parts import Attention, DeltaNet, Latents, Matrix, Mlp


class PartRows:
    """Returns the rows of the parts of one layer."""

    def __init__(
        self, hidden: int, step: Step, activations: Activations, *, has_adapters: bool = False
    ) -> None:
        """`has_adapters`: for steps with rows that have adapters. Other rows get the same bits as without."""
        self._hidden, self._step, self._activations = hidden, step, activations
        self._has_adapters = has_adapters

    @property
    def facts(self) -> int:
        """Address of T, padded T and the number of decodes. The word before T is 0."""
        return self._step.facts.data_ptr() + 8

    def mixer(
        self, mixer: Attention | Latents | DeltaNet, pages: PagedCache, rotary_dim: int
    ) -> tuple[Tensor, Rows]:
        """Return the memory of the mixer's output, [R, H * V], and the rows from normed rows to it."""
        if isinstance(mixer, Latents):
            return self._latents(mixer, pages)
        if isinstance(mixer, DeltaNet):
            return self._delta_net(mixer, pages)
        return self._heads(mixer, pages, rotary_dim)

    def _heads(self, attention: Attention, pages: PagedCache, rotary_dim: int) -> tuple[Tensor, Rows]:
        room, step = self._activations.room, self._step
        keys, values = pages.keys[attention.layer], pages.values[attention.layer]
        shape, heads, width = (
            pages.shapes[attention.layer],
            attention.heads,
            attention.qkv.format.panels * LANES,
        )
        qkv, attended = room("qkv", width), room("attended", heads * shape.value_dim)
        query_norm, key_norm = attention.query_norm, attention.key_norm
        head_norms = HeadNorms()
        if query_norm is not None and key_norm is not None:
            head_norms = HeadNorms(query_norm.weight.data_ptr(), key_norm.weight.data_ptr(), query_norm.eps)
        rows = self.linear(attention.qkv, room("normed", self._hidden), qkv, attention.qkv_bias)
        query_dim = shape.key_dim * (1 + attention.has_gate)
        rows += [
            heads_row(
                qkv.data_ptr(), width * 4, heads, shape.value_dim, rotary_dim, head_norms, (keys, values), step,
                query_dim=query_dim,
            ),
            attention_row(
                Queries(qkv.data_ptr(), width * 4, query_dim * 4), heads, keys, values, step,
                value_dim=shape.value_dim, scale=attention.scale, window=shape.window,
                chunk=shape.chunk, sinks=0 if attention.sinks_H is None else attention.sinks_H.data_ptr(),
                out=attended.data_ptr(), sees_images=shape.sees_images,
            ),
        ]  # fmt: skip
        if attention.has_gate:
            gates = qkv.data_ptr() + shape.key_dim * 4
            rows.append(
                GATE.row(
                    attended.data_ptr(), gates, width * 4, query_dim * 4, heads, shape.value_dim, self.facts
                )
            )
        return attended, rows

    def _delta_net(self, net: DeltaNet, pages: PagedCache) -> tuple[Tensor, Rows]:
        room, step, facts = self._activations.room, self._step, self.facts
        normed = room("normed", self._hidden)
        keys, values, heads = net.key_heads * net.key_dim, net.heads * net.value_dim, net.heads
        convolved_width, width = 2 * keys + values, net.first.format.panels * LANES
        made = room("made", width)
        rows = self.linear(net.first, normed, made)
        if net.order is not None:
            ordered = room("ordered", convolved_width + values)
            order, num_parts, ordered_bytes = net.order.ctypes.data, len(net.order), ordered.shape[1] * 4
            rows.append(
                ORDER.row(
                    made.data_ptr(), width * 4, ordered.data_ptr(), ordered_bytes, order, num_parts, facts
                )
            )
            made, width = ordered, ordered.shape[1]
        sources = []
        for name, matrix in zip(("fading", "following"), net.rates, strict=False):
            source = room(name, matrix.format.panels * LANES)
            rows += self.linear(matrix, normed, source)
            sources.append((source.data_ptr(), source.shape[1] * 4))
        decays, rates = room("decays", heads), room("rates", heads)
        convolved, found = room("convolved", convolved_width), room("found", values)
        attended = room("attended", values)
        query, (fade_places, follow_places) = convolved.data_ptr(), net.rates_at
        rows += [
            RATES.row(
                *sources[0], *sources[-1], heads, fade_places.ctypes.data, follow_places.ctypes.data,
                net.factors_H.data_ptr(), net.biases_H.data_ptr(), decays.data_ptr(), rates.data_ptr(), facts,
            ),
            convolve_row(
                made.data_ptr(), width * 4, query, net.taps_KC, None, pages.tails[net.layer], step, has_silu=True
            ),
            delta_row(
                Side(query, convolved_width * 4, net.key_heads), Side(query + keys * 4, convolved_width * 4, net.key_heads),
                Side(query + 2 * keys * 4, convolved_width * 4, heads), decays.data_ptr(), rates.data_ptr(),
                pages.states[net.layer], found.data_ptr(), step, decay_dim=1, mode=UNIT_LENGTH,
            ),
            NORM_GATED.row(
                found.data_ptr(), made.data_ptr() + convolved_width * 4, width * 4, net.norm.weight.data_ptr(),
                bits_of(net.norm.eps), heads, net.value_dim, attended.data_ptr(), facts,
            ),
        ]  # fmt: skip
        return attended, rows

    def _latents(self, attention: Latents, pages: PagedCache) -> tuple[Tensor, Rows]:
        room, step, heads = self._activations.room, self._step, attention.heads
        weight, rotary_dim, latents = attention.absorbed, attention.rotary_dim, pages.keys[attention.layer]
        width, query_dim = attention.first.format.panels * LANES, attention.query_dim
        made, attended = room("made", width), room("attended", heads * weight.value_dim)
        unrotated, latent_dim = weight.key.shape[2], weight.value.shape[2]
        rows = self.linear(attention.first, room("normed", self._hidden), made)
        head_bytes = (unrotated + rotary_dim) * 4
        queries = Queries(made.data_ptr(), width * 4, head_bytes)
        if attention.query is not None and attention.query_norm is not None:
            source = room("query source", query_dim)
            queried = room("queries", attention.query.format.panels * LANES)
            rows += [
                norm_rows(
                    made.data_ptr(), attention.query_norm.weight.data_ptr(), attention.query_norm.eps, query_dim,
                    source.data_ptr(), self.facts, stride=width * 4,
                ),
                *self.linear(attention.query, source, queried),
            ]  # fmt: skip
            queries = Queries(queried.data_ptr(), queried.shape[1] * 4, head_bytes)
        query_floats, found_floats = room_floats(heads, latent_dim, rotary_dim)
        rooms = LatentRooms(
            room("latent queries", query_floats, rows=ROWS_AT_ONCE).zero_(),
            room("latents found", found_floats, rows=ROWS_AT_ONCE),
            room("lone latents", lone_floats(step.block_table_SM.shape[1]), rows=MOST),
        )
        rows += [
            place_row(
                made.data_ptr() + query_dim * 4, width * 4, attention.latent_norm, queries.address, queries.token_stride,
                heads, unrotated, rotary_dim, latents, step, is_interleaved=attention.is_interleaved,
            ),
            *latent_rows(
                queries, heads, latents, step, weight, rooms, rotary_dim=rotary_dim, scale=attention.scale,
                window=pages.shapes[attention.layer].window, out=attended.data_ptr(), has_adapters=self._has_adapters,
            ),
        ]  # fmt: skip
        return attended, rows

    def linear(self, weight: Matrix, x: Tensor, out: Tensor, bias: Tensor | None = None) -> Rows:
        """Return the rows of a linear layer."""
        before, rows = self._activations.taken(weight.format, x, self.facts)
        scales = 0 if weight.scales is None else weight.scales.data_ptr()
        product = linear_row(
            rows, weight.format.row_bytes, weight.panels.data_ptr(), scales, weight.format, out.data_ptr(),
            out.shape[1] * 4, self.facts, 0 if bias is None else bias.data_ptr(),
        )  # fmt: skip
        return [*before, product, *self._adapted(weight, x, out)]

    def _adapted(self, weight: Matrix, x: Tensor, out: Tensor) -> Rows:
        """Return the rows that add what adapters give."""
        if not self._has_adapters:
            return []
        adapters, stride = self._step.adapter_T.data_ptr(), out.shape[1] * 4
        return [
            adapt_row(
                x.data_ptr(), x.shape[1] * 4, weight.format.k, adapters, each.table, out.data_ptr() + each.begin * 4, stride,
                each.num, self.facts,
            )
            for each in weight.adapted
        ]  # fmt: skip

    def mlp(self, mlp: Mlp, x: Tensor, out: Tensor) -> Rows:
        """Return the rows of a dense feed-forward or a shared expert."""
        kind = mlp.gate_up.format
        inner = self._activations.room("inner", kind.panels * LANES // 2)
        codes, scales = (row.ctypes.data for row in mlp.addresses)
        if self._has_adapters:  # their products are added before the gate
            both = self._activations.room("gate and up", kind.panels * LANES)
            silu = SILU_ROWS.row(
                both.data_ptr(), both.shape[1] * 4, kind.panels // 2, self.facts - 8, 1, inner.data_ptr(),
                inner.shape[1] * 4,
            )  # fmt: skip
            raising = [*self.linear(mlp.gate_up, x, both), silu]
        else:
            before, rows = self._activations.taken(kind, x, self.facts)
            up = grouped_row(rows, kind, codes, scales, self.facts - 8, 1, inner.data_ptr(), is_gated=True)
            raising = [*before, up]
        rows_of_all = [*raising, *self.linear(mlp.down, inner, out)]
        if mlp.share is not None:
            shares = self._activations.room("shares", mlp.share.format.panels * LANES)
            share = SHARE.row(
                out.data_ptr(), out.shape[1], shares.data_ptr(), shares.shape[1] * 4, self.facts
            )
            rows_of_all += [*self.linear(mlp.share, x, shares), share]
        return rows_of_all
