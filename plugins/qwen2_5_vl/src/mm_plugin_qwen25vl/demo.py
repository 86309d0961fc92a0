"""`mm-plugin demo` of Qwen2.5-VL: a tiny checkpoint, compared with transformers' own forward."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2_5_VLForConditionalGeneration

from mm_plugin.families.patch_grid import PatchGridDemo
from mm_plugin_qwen25vl.testing import make_checkpoint


class Qwen25VLDemo(PatchGridDemo):
    """Qwen2.5-VL with three layers and seeded weights."""

    model_class = Qwen2_5_VLForConditionalGeneration

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`; images of up to a quarter of a megapixel, so that the demo is quick."""
        make_checkpoint(folder, preprocessor={"max_pixels": 512 * 512})
