"""What `mm-plugin demo` shows of Qwen2.5-VL: a tiny checkpoint, and transformers' own forward to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import Qwen2_5_VLForConditionalGeneration

from mm_plugin.demo import PatchGridDemo
from mm_plugin_qwen25vl.testing import make_checkpoint

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
except ModuleNotFoundError:
    # The first versions of transformers 5 have the Pillow backend under the name that later is the torchvision one's.
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessorPil

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


class Qwen25VLDemo(PatchGridDemo):
    """Qwen2.5-VL with three layers and seeded weights."""

    # transformers' image processor is its Pillow backend wherever torchvision is not installed.
    options: ClassVar[Mapping[str, Any]] = {"resize": "pillow"}
    model_class: ClassVar[Any] = Qwen2_5_VLForConditionalGeneration
    image_processor: ClassVar[Any] = Qwen2VLImageProcessorPil

    def make_checkpoint(self, folder: Path) -> None:
        """See `Demo`; images of up to a quarter megapixel, so that the demo is quick."""
        make_checkpoint(folder, preprocessor={"max_pixels": 512 * 512})

    def video_prompt(self, num_images: int, num_videos: int) -> str:
        """See `ShowsVideos`."""
        images = "".join(f"Image {n + 1}: {IMAGE} " for n in range(num_images))
        videos = "".join(f"Video {n + 1}: {VIDEO} " for n in range(num_videos))
        question = "What is to be seen?"
        return f"<|im_start|>user\n{images}{videos}{question}<|im_end|>\n<|im_start|>assistant\n"
