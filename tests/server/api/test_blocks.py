"""Deltas to blocks: opened, extended and closed in order, for deltas of any kind and split."""

from hypothesis import given
from hypothesis import strategies as st

from server.api.blocks import Block, BlockEvent, BlockKind, Blocks, Closed, Grew, Opened
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta


def told(*deltas: Delta) -> tuple[list[BlockEvent], Blocks]:
    blocks = Blocks()
    return [event for delta in deltas for event in blocks.push([delta])] + blocks.finish(), blocks


def kinds(blocks: Blocks) -> list[tuple[BlockKind, str]]:
    return [(block.kind, block.text) for block in blocks.all]


def call(index: int, arguments: str, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index}" if name else None, name)


def test_blank_text_before_a_call_makes_no_block() -> None:
    _, blocks = told(
        ReasoningDelta("r"), ContentDelta("\n"), ContentDelta("\n"), call(0, "{}", "f"), ContentDelta(" ")
    )
    assert [kind for kind, _ in kinds(blocks)] == [BlockKind.REASONING, BlockKind.CALL]


def test_an_answer_of_blanks_alone_is_still_an_answer() -> None:
    _, blocks = told(ContentDelta(" "), ContentDelta("\n"))
    assert kinds(blocks) == [(BlockKind.TEXT, " \n")]


def test_empty_deltas_open_nothing() -> None:
    _, blocks = told(
        ReasoningDelta(""), ContentDelta(""), ContentDelta("x"), ReasoningDelta(""), ContentDelta("y")
    )
    assert kinds(blocks) == [(BlockKind.TEXT, "xy")]


@given(
    st.lists(
        st.one_of(
            st.builds(ContentDelta, st.text("a \n", max_size=3)),
            st.builds(ReasoningDelta, st.text("r ", max_size=2)),
            st.builds(lambda arguments: arguments, st.sampled_from(["{}", '{"a":1}'])),
        )
    )
)
def test_blocks_are_opened_grown_and_closed_one_after_the_other(
    made: list[ContentDelta | ReasoningDelta | str],
) -> None:
    deltas = [call(at, each, "f") if isinstance(each, str) else each for at, each in enumerate(made)]
    events, blocks = told(*deltas)
    open_block: Block | None = None
    grown: dict[int, str] = {}
    for event in events:
        if isinstance(event, Opened):
            assert open_block is None and event.block.index == len(grown)
            open_block, grown[event.block.index] = event.block, ""
        elif isinstance(event, Grew):
            assert event.block is open_block
            grown[event.block.index] += event.text
        else:
            assert isinstance(event, Closed) and event.block is open_block
            open_block = None
    assert open_block is None
    assert list(grown.values()) == [block.text for block in blocks.all]
    text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    shown = "".join(block.text for block in blocks.all if block.kind is BlockKind.TEXT)
    assert "".join(shown.split()) == "".join(text.split()), "only blanks may be missing"
