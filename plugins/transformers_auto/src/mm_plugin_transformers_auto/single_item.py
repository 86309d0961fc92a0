"""What a processor returns for one media input, separated from the prompt around it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from mm_plugin import Modality
from mm_plugin.errors import SizeError
from mm_plugin_transformers_auto.runner import ProcessorRunner, ids_of
from mm_plugin_transformers_auto.traits import Kwargs, ModalityTraits

# The field that holds the token ids of one item's replacement.
IDS = "prompt_ids"


class NotComposable(Exception):
    """What a processor returns for a prompt is not composed of what each media input gives alone; the message says why."""


class SingleItemOutput(msgspec.Struct, frozen=True, eq=False):
    """What a processor returns for one media input.

    Attributes:
        ids: [n] int64, the tokens that stand for it, without the text around them.
        tensors: by name.
        placeholder_affixes: the text before and after the tokens.
    """

    ids: np.ndarray
    tensors: dict[str, torch.Tensor]
    placeholder_affixes: tuple[str, str]

    def fields(self, traits: ModalityTraits) -> dict[str, np.ndarray]:
        """Ids and the tensors beside the feature, as the fields of an item."""
        return {IDS: self.ids, **{name: self.tensors[name].numpy() for name in traits.field_names}}


class SingleItemRunner:
    """Runs a processor on one media input.

    Its placeholder is put between two special tokens, so that the tokens on either side cannot merge with those of the media
    input; whatever is between them in the output is the replacement of the placeholder.

    Args:
        runner: runs the processor.
        tokenizer: the processor's tokenizer, or a copy.
        media_tokens: tokens that stand for media, which cannot be used as delimiters.
    """

    def __init__(self, runner: ProcessorRunner, tokenizer: Any, media_tokens: frozenset[str]) -> None:
        self._runner, self._tokenizer, self._media_tokens = runner, tokenizer, media_tokens

    def run(self, traits: ModalityTraits, media_input: Any, kwargs: Kwargs) -> SingleItemOutput:
        """Prepare one media input.

        Args:
            traits: how the processor takes its modality.
            media_input: a PIL image or float32 samples.
            kwargs: arguments for the processor's part.

        Raises:
            ProcessorRaised: the processor raised an error.
            NotComposable: the processor also changes the prompt elsewhere.
            SizeError: no token stands for the media input.
        """
        delimiter, _ = self._delimiter
        before, after = self._delimiters_alone
        text = delimiter + traits.placeholder + delimiter
        out = self._runner.run(text, {traits.modality: [media_input]}, {traits.modality: kwargs})
        ids = ids_of(out)
        inside = ids[len(before) : len(ids) - len(after)]
        unchanged = np.array_equal(ids[: len(before)], before) and np.array_equal(ids[len(ids) - len(after) :], after)
        if not unchanged or len(ids) < len(before) + len(after):
            raise NotComposable(f"it rewrites the prompt around its {traits.modality.argument}")
        if not np.any(inside == traits.embed_token_id):
            raise SizeError("no token stands for a media input of this size")
        core, affixes = self._split(inside, traits.modality)
        self._check_delimiters(traits.placeholder, core)
        tensors = {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}
        return SingleItemOutput(core, tensors, affixes)

    def _split(self, inside: np.ndarray, modality: Modality) -> tuple[np.ndarray, tuple[str, str]]:
        """The ids from the first to the last added token, and the text before and after them."""
        known = np.flatnonzero(np.isin(inside, self._added_ids))
        if not len(known):
            raise NotComposable(f"no special token delimits what stands for its {modality.argument}")
        first, last = known[0], known[-1]
        return inside[first : last + 1], (self._text_of(inside[:first]), self._text_of(inside[last + 1 :]))

    def _text_of(self, ids: np.ndarray) -> str:
        """The text of ids, if the tokenizer maps it back to the same ids."""
        if not len(ids):
            return ""
        delimiter, delimiter_id = self._delimiter
        text = str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        again = self._tokenizer(delimiter + text + delimiter, add_special_tokens=False)["input_ids"]
        if again != [delimiter_id, *ids.tolist(), delimiter_id]:
            raise NotComposable("the text around a media input cannot be recovered from its tokens")
        return text

    def _check_delimiters(self, placeholder: str, core: np.ndarray) -> None:
        """A token that strips the spaces beside it must do so both before and after it is replaced."""
        given = self._added.get(self._tokenizer.convert_tokens_to_ids(placeholder))
        left, right = self._added.get(int(core[0])), self._added.get(int(core[-1]))
        if given is None or left is None or right is None:
            raise NotComposable("its placeholder is not an added token")
        if given.lstrip != left.lstrip or given.rstrip != right.rstrip or given.single_word or given.normalized:
            raise NotComposable("its placeholder strips other spaces than the tokens that replace it")

    @cached_property
    def _delimiter(self) -> tuple[str, int]:
        """A special token that does not stand for a media input, with its id; text beside it is tokenized separately."""
        tokenizer = self._tokenizer
        named = [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token]
        for token in [*named, *tokenizer.all_special_tokens]:
            if token and str(token) not in self._media_tokens:
                found = tokenizer(str(token) * 2, add_special_tokens=False)["input_ids"]
                index = tokenizer.convert_tokens_to_ids(str(token))
                if found == [index, index]:
                    return str(token), int(index)
        raise NotComposable("its tokenizer has no special token other than those of media")

    @cached_property
    def _delimiters_alone(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of two delimiters with nothing between them: up to the first, and from the second on."""
        delimiter, delimiter_id = self._delimiter
        ids = np.asarray(self._tokenizer(delimiter * 2)["input_ids"], dtype=np.int64)
        first = int(np.flatnonzero(ids == delimiter_id)[0])
        return ids[: first + 1], ids[first + 1 :]

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        return dict(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _added_ids(self) -> np.ndarray:
        return np.array(sorted(self._added), dtype=np.int64)
