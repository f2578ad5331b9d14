"""The passes of low-latency combine for the CPU, compiled: check the choices, pack answers, sum them.

A combine message: a header of 8 words (see `cpu_kernels`), then answers by local expert, then source token: both sides
know that order from the dispatch, so answers carry nothing else. Sums multiply, then add, in the order of the choices.

Legend as in `cpu_kernels`.
"""

from dispatch.low_latency.cpu_kernels import COMBINE, HEADER_BYTES, HEADER_KIND, HEADER_ROW_BYTES
from dispatch.native import compiled, copy, floats, inlined, int32s, uint16s, words


@compiled
def find_other_choice(topk: int, sent: int, T: int, K: int) -> int:
    """Return the flat index of the first choice that is neither -1 nor what was dispatched, or -1."""
    chosen, kept = words(topk, T * K), words(sent, T * K)
    for i in range(T * K):
        if chosen[i] != -1 and chosen[i] != kept[i]:
            return i
    return -1


@compiled
def size_answers(
    owed: int, expected: int, row_bytes: int, R: int, rank: int, mask: int, send_bytes: int, recv_bytes: int
) -> None:
    """Size the combine messages, both ways, from int64 [R] counts of answers."""
    gives, takes, masked = words(owed, R), words(expected, R), words(mask, R)
    sends, receives = words(send_bytes, R), words(recv_bytes, R)
    for r in range(R):
        sends[r], receives[r] = HEADER_BYTES + gives[r] * row_bytes, HEADER_BYTES + takes[r] * row_bytes
        if r == rank or masked[r] != 0:
            sends[r] = receives[r] = 0


@compiled
def pack_answers(
    y: int, row_bytes: int, L: int, R: int, rank: int, M: int, mask: int, layout_range: int,
    send_addresses: int, own: int, own_bases: int,
) -> None:  # fmt: skip
    """Write each rank's answers, an expert's block at a time.

    `own`: where to copy this rank's own answers, or 0 to leave them in y. `own_bases`: int64 [L], set so that answer i
    to this rank itself, of local expert l, lies at own_bases[l] + i * row_bytes.
    """
    windows, masked, ranges = words(send_addresses, R), words(mask, R), words(layout_range, L * R)
    bases = words(own_bases, L)
    for r in range(R):
        if r != rank and masked[r] != 0:
            continue
        if r != rank:
            header = words(windows[r], 8)
            header[:] = 0
            header[HEADER_ROW_BYTES], header[HEADER_KIND] = row_bytes, COMBINE
        at = own if r == rank else windows[r] + HEADER_BYTES
        done = 0
        for local in range(L):
            begin, count = ranges[local * R + r] >> 32, ranges[local * R + r] & 0xFFFFFFFF
            block = y + (local * R * M + begin) * row_bytes
            if r != rank or own != 0:
                copy(at + done * row_bytes, block, count * row_bytes)
            if r == rank:
                bases[local] = own if own != 0 else block - done * row_bytes
            done += count


@inlined
def _answer_at(
    expert: int, index: int, L: int, R: int, rank: int, row_bytes: int, own_bases: int, recv_addresses: int
) -> int:
    """Address of an answer, or 0 if its rank is masked."""
    if expert // L == rank:
        return int(words(own_bases, L)[expert - rank * L] + index * row_bytes)
    window = words(recv_addresses, R)[expert // L]
    return 0 if window == 0 else int(window + HEADER_BYTES + index * row_bytes)


@compiled
def sum_float32(
    topk: int, answers: int, weights: int, T: int, K: int, H: int, L: int, R: int, rank: int,
    own_bases: int, recv_addresses: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """out[t] = sum over k in order of weights[t, k] * answer, float32. `scratch` is not used."""
    chosen, answer, weight = words(topk, T * K), int32s(answers, T * K), floats(weights, T * K)
    for t in range(T):
        total = floats(out + t * 4 * H, H)
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            if chosen[i] < 0:
                continue
            at = _answer_at(chosen[i], answer[i], L, R, rank, 4 * H, own_bases, recv_addresses)
            if at != 0:
                row, w = floats(at, H), weight[i]
                for h in range(H):
                    total[h] += w * row[h]


@compiled
def sum_bfloat16(
    topk: int, answers: int, weights: int, T: int, K: int, H: int, L: int, R: int, rank: int,
    own_bases: int, recv_addresses: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """The same for bfloat16 rows: exact to float32, summed there, rounded once to nearest even. `scratch`: 8*H bytes."""
    chosen, answer, weight = words(topk, T * K), int32s(answers, T * K), floats(weights, T * K)
    total, wide = floats(scratch, H), floats(scratch + 4 * H, H)
    total_bits, wide_bits = int32s(scratch, H), int32s(scratch + 4 * H, H)
    for t in range(T):
        total[:] = 0.0
        for i in range(t * K, t * K + K):
            if chosen[i] < 0:
                continue
            at = _answer_at(chosen[i], answer[i], L, R, rank, 2 * H, own_bases, recv_addresses)
            if at != 0:
                row, w = uint16s(at, H), weight[i]
                for h in range(H):
                    wide_bits[h] = row[h] << 16
                for h in range(H):
                    total[h] += w * wide[h]
        rounded = uint16s(out + t * 2 * H, H)
        for h in range(H):
            bits = total_bits[h]
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            rounded[h] = 0x7FC0 if is_nan else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def gather_answers(
    topk: int, answers: int, T: int, K: int, row_bytes: int, L: int, R: int, rank: int,
    own_bases: int, recv_addresses: int, positions: int, out: int,
) -> None:  # fmt: skip
    """Copy each choice's answer to out [T*K, row_bytes], for types without a sum above.

    `positions`: int64 [T, K], the answer's row of `out`, or -1 where there is none.
    """
    chosen, answer, position = words(topk, T * K), int32s(answers, T * K), words(positions, T * K)
    for i in range(T * K):
        position[i] = -1
        if chosen[i] < 0:
            continue
        at = _answer_at(chosen[i], answer[i], L, R, rank, row_bytes, own_bases, recv_addresses)
        if at != 0:
            position[i] = i
            copy(out + i * row_bytes, at, row_bytes)


KERNELS = (find_other_choice, size_answers, pack_answers, sum_float32, sum_bfloat16, gather_answers)
