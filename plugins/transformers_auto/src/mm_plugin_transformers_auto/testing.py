"""Tiny checkpoints with seeded weights of the families that the fallback is tested on, written by transformers itself.

They have the files of released checkpoints: config.json, a tokenizer, processor_config.json, safetensors. Only the model is small;
images are cut, and prompts are written, by the same rules.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from mm_plugin.testing import byte_level_tokenizer, fill_weights, write_json
from mm_plugin_transformers_auto.families import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "make_checkpoint", "missing_packages", "tiny_tokenizer"]

_TURN = (
    "{{% for message in messages %}}<turn>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% elif part['type'] == 'audio' %}}{audio}"
    "{{% elif part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<end>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<turn>assistant\n{{% endif %}}"
)


def tiny_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which two line ends are one token, as in released vocabularies, with the family's special tokens.

    Args:
        family: the family.
    """
    tokenizer = byte_level_tokenizer(
        ("<pad>", "<bos>", "<end>", "<turn>", *family.special),
        bos_token="<bos>",
        eos_token="<end>",
        pad_token="<pad>",
        chat_template=_TURN.format(image=family.image, audio=family.audio),
        extra_special_tokens=dict(family.tokens),
    )
    if family.bos:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    return tokenizer


def make_checkpoint(folder: str | Path, family: str, *, seed: int = 20260101) -> Path:
    """Write a whole tiny checkpoint.

    Args:
        folder: created if it does not exist.
        family: a key of `FAMILIES`.
        seed: of the weights.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = FAMILIES[family]
    tokenizer = tiny_tokenizer(described)
    tokenizer.save_pretrained(str(folder))
    write_json(folder / "processor_config.json", described.processor)
    cls = getattr(transformers, described.architecture)
    config = cls.config_class(**described.config(tokenizer.get_vocab()), tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).eval()
    model.load_state_dict(fill_weights(dict(model.named_parameters()), seed=seed), strict=False)
    model.save_pretrained(str(folder))
    return folder


def missing_packages(family: Family) -> list[str]:
    """Packages that a family's processor needs and that are not installed.

    Args:
        family: the family.
    """
    return [name for name in family.needs if importlib.util.find_spec(name) is None]
