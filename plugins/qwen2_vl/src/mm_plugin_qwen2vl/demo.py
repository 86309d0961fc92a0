"""`mm-plugin demo` of Qwen2-VL: a tiny checkpoint, compared with transformers' own forward."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2VLForConditionalGeneration

from mm_plugin.families.patch_grid import PatchGridDemo
from mm_plugin_qwen2vl.testing import make_checkpoint


class Qwen2VLDemo(PatchGridDemo):
    """Qwen2-VL with two layers and seeded weights."""

    model_class = Qwen2VLForConditionalGeneration

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`; images of up to a quarter of a megapixel, so that the demo is quick."""
        make_checkpoint(folder, preprocessor={"max_pixels": 512 * 512})
