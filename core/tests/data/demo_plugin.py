"""A model small enough to be shown whole: the rows of an image are the mean colors of its quarters."""

import io
import json
import os

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mm_plugin import BaseOptions, Encoder, EncodesImages, Modality, ModelProcessor, Replacement
from mm_plugin.demo import Demo, EmbeddingBoxes, ReferenceOutput


class Processor(ModelProcessor):
    Options = BaseOptions

    def context(self, counts):
        return None

    def layout(self, modality, size, options, context):
        return {}

    def prepare(self, decoded, layout, options):
        height, width = (side // 2 * 2 for side in decoded.pixels.shape[:2])
        quarters = decoded.pixels[:height, :width].reshape(2, height // 2, 2, width // 2, 3)
        return quarters.mean(axis=(1, 3)).reshape(4, 3).astype(np.float32)

    def replacement(self, layout):
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], 4)


class Model(Encoder, EncodesImages):
    def __init__(self, weight):
        self.weight = weight

    @classmethod
    def load(cls, checkpoint, device, dtype):
        return cls(checkpoint.tensors(("vision.",), device=device, dtype=dtype)["weight"])

    def get_image_feature(self, items):
        return [torch.as_tensor(item.feature) @ self.weight for item in items]


class Show(Demo):
    def make_checkpoint(self, folder):
        (folder / "config.json").write_text(json.dumps({"architectures": ["Shown"], "vocab_size": 4}))
        (folder / "preprocessor_config.json").write_text("{}")
        tokenizer = Tokenizer(models.WordLevel({"?": 0, "see": 1}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(str(folder))
        weight = torch.linspace(-1, 1, 15).reshape(3, 5)
        save_file({"vision.weight": weight, "text.weight": torch.eye(4, 5)}, folder / "model.safetensors")

    def prompt(self, num_images):
        return "see " + " see ".join(["<image>"] * num_images)

    def open_model(self, checkpoint):
        from mm_plugin import Checkpoint

        tensors = Checkpoint.open(checkpoint).tensors(("",))
        return {name: tensors[name] for name in ("vision.weight", "text.weight")}

    def input_embedding(self, model):
        return torch.nn.Embedding.from_pretrained(model["text.weight"])

    def reference(self, model, checkpoint, input_ids, images):
        embeds = model["text.weight"][torch.from_numpy(input_ids)].clone()
        rows = []
        for data in images:
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float64)
            half_h, half_w = pixels.shape[0] // 2, pixels.shape[1] // 2
            for top in (0, half_h):
                for left in (0, half_w):
                    rows.append(pixels[top : top + half_h, left : left + half_w].mean(axis=(0, 1)))
        embeds[torch.from_numpy(input_ids) == 2] = torch.tensor(np.array(rows)).float() @ model["vision.weight"]
        if os.environ.get("SHOWN_WRONG"):
            embeds[0] += 1
        return ReferenceOutput(embeds, embeds * 2)

    def logits(self, model, input_embeds, position_ids):
        return input_embeds * 2

    def embedding_boxes(self, processor, item):
        return EmbeddingBoxes(64, 64, tuple((x, y, x + 32, y + 32) for y in (0, 32) for x in (0, 32)))
