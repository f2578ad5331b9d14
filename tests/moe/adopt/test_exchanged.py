"""An index over pools of tokens is tried before it serves, and rejected if blocks cannot keep its pools."""

from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as glm

from moe.families import UnsupportedModelError
from moe.model import Skeleton
from tests.support.engines.serving import build
from tests.support.models.families import make_config, write_checkpoint


def test_an_index_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    write_checkpoint("glm5_next", tmp_path)
    own = glm.Glm5NextTextIndexer.get_pooled_states

    def last_of_pool(self: glm.Glm5NextTextIndexer, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Use the keys of pools' last tokens."""
        keys, indices, valid = own(self, packed_states)
        return packed_states[:, indices[0, :, -1].clamp(min=0), : keys.shape[-1]], indices, valid

    with (
        mock.patch.object(glm.Glm5NextTextIndexer, "get_pooled_states", last_of_pool),
        pytest.raises(UnsupportedModelError, match="layer 1 chooses pools of tokens by an unknown rule"),
    ):
        build(tmp_path, max_model_len=64)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"index_kpool": 32, "index_topk": 64},
            "has an index over pools of 32 tokens; blocks have 16, and index keys 32 values",
        ),
        ({"index_kpool_always_select_tail": False}, "leaves out the tokens of an incomplete pool"),
    ],
)
def test_pools_that_blocks_cannot_keep_are_refused(
    fields: dict[str, object], text: str, tmp_path: Path
) -> None:
    make_config("glm5_next", **fields).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=text):
        Skeleton(tmp_path)
