"""Rows that a rank sends: those of its tokens, and no memory after them."""

import torch

from tests.support.ranks import RankPool

TOKENS, PLACES, HIDDEN, CHOICES = 2, 4, 16, 2
ROW_BYTES, CHOICES_AT, ROWS_AT, STAGING_AT = 4 * HIDDEN, 0, 64, 512


def stage() -> torch.Tensor:
    """Send two tokens of at most four to this rank itself, with peers that would be reached by puts. Return the staged rows."""
    import triton  # noqa: PLC0415 - in the interpreter

    from dispatch.gpu.kernels.low_latency import send_rows  # noqa: PLC0415

    memory = torch.zeros(2 * STAGING_AT, dtype=torch.uint8)
    # Memory after the last token belongs to another tensor; on a device it may not be mapped.
    x = torch.full((PLACES, HIDDEN), float("nan"))
    x[:TOKENS] = torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) + 1.0
    topk = torch.tensor([[0, -1], [-1, 1]])
    sent = torch.empty(PLACES, CHOICES, dtype=torch.int64)
    sent_bytes, ended = torch.zeros(2, 1, dtype=torch.int64)
    send_rows[(PLACES,)](
        x, topk, None, sent, sent_bytes, torch.tensor([memory.data_ptr()]), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64), ended, TOKENS, 0, 0, CHOICES_AT, ROWS_AT, STAGING_AT, 0, R=1, L=2, M=PLACES, K=CHOICES,
        K_PAD=triton.next_power_of_2(CHOICES), H=HIDDEN, ROW_BYTES=ROW_BYTES, SCALES_AT=0, GROUPS=1, IS_FP8=False,
        ROUND_SCALE=False, IS_BFLOAT16=False, HAS_REMOTE=True, BEGINS=False,
    )  # fmt: skip
    assert (sent[TOKENS:] == -1).all()
    return memory[STAGING_AT : STAGING_AT + PLACES * ROW_BYTES].view(torch.float32).view(PLACES, HIDDEN)


def test_rows_after_the_last_token_are_not_read(interpreter: RankPool) -> None:
    (staged,) = interpreter.run(stage)
    assert torch.equal(staged[:TOKENS].flatten(), torch.arange(TOKENS * HIDDEN) + 1.0)
    assert (staged[TOKENS:] == 0).all()
