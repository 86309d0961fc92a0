"""An opened checkpoint with all that was learned about it: what processor and encoder ask."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import transformers

from mm_plugin import Checkpoint, Modality, UsageError
from mm_plugin.cache import ComputeCache, MemoryStore
from mm_plugin.errors import SizeError
from mm_plugin.identity import digest, frame
from mm_plugin_transformers_auto.compare import CompositionCheck, with_axes
from mm_plugin_transformers_auto.loading import Opened
from mm_plugin_transformers_auto.probing import Prober
from mm_plugin_transformers_auto.runner import ProcessorRaised, ProcessorRunner, ids_of
from mm_plugin_transformers_auto.samples import make_blank, make_sample
from mm_plugin_transformers_auto.single_item import NotComposable, SingleItemRunner
from mm_plugin_transformers_auto.traits import Kwargs, ModalityTraits

# Capacity of the cache of layouts, bytes.
_LAYOUT_BYTES = 64 * 1024 * 1024
# Sets of arguments whose check is remembered.
_CHECKED_KWARGS = 1024


class ProbedModel:
    """An opened checkpoint with all that was learned about it. Safe to use from several threads.

    Args:
        opened: the checkpoint as transformers opened it.
        checkpoint: the checkpoint, for messages.

    Attributes:
        opened: the checkpoint as transformers opened it.
        tokenizer: a copy of the processor's tokenizer.
        runner: runs the processor.
        single: runs it on one media input.
        traits: by modality.
        joint_reason: why requests are prepared jointly; None if media inputs are prepared one by one.

    Raises:
        UsageError: the processor prepares neither images nor audio for the model.
    """

    def __init__(self, opened: Opened, checkpoint: Checkpoint) -> None:
        self.opened = opened
        # A copy of its own: a fast tokenizer must not be used by one thread while another changes its settings.
        self.tokenizer = copy.deepcopy(opened.processor.tokenizer)
        self.runner = ProcessorRunner(opened)
        self.single = SingleItemRunner(self.runner, self.tokenizer, _media_tokens(opened.processor))
        self._layouts = ComputeCache(MemoryStore(_LAYOUT_BYTES))
        self._checked = ComputeCache(MemoryStore(_CHECKED_KWARGS))  # entries of one byte each
        probed = Prober(opened, self.runner, self.single, self.tokenizer).probe()
        self.traits, self.joint_reason = probed.traits, probed.joint_reason
        if not self.traits:
            raise UsageError(
                f"{checkpoint.folder}: {opened.label} prepares neither images nor audio for {opened.model_class.__name__}",
                argument="checkpoint",
            )
        if self.joint_reason is None:
            self.joint_reason = self._find_axes()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """What was learned about a checkpoint that a registry opened.

        Raises:
            UsageError: nothing was learned about it.
        """
        state = checkpoint.specialization[1] if checkpoint.specialization is not None else None
        if not isinstance(state, cls):
            raise UsageError(
                f"{checkpoint.folder}: expected a checkpoint opened by the plugin transformers_auto, got another one; open it "
                "with Registry.load_processor or Registry.load_encoder",
                argument="checkpoint",
            )
        return state

    def _find_axes(self) -> str | None:
        """Complete the traits by the tensors' axes and compare whole prompts; why media cannot be prepared one by one."""
        try:
            for modality, traits in self.traits.items():
                self.traits[modality] = with_axes(self.runner, self.single, traits)
            self._composition.run({})
        except (NotComposable, ProcessorRaised, SizeError) as error:
            return str(error)
        return None

    @cached_property
    def _composition(self) -> CompositionCheck:
        return CompositionCheck(self.runner, self.single, self.traits, self.tokenizer)

    def check_kwargs(self, kwargs: Mapping[Modality, Kwargs]) -> str | None:
        """Why media cannot be prepared one by one with these arguments, None if they can; each set of arguments is tried once.

        Raises:
            ProcessorRaised: the processor raised an error.
        """

        def attempt() -> tuple[str | None]:
            try:
                self._composition.run(kwargs)
            except (NotComposable, SizeError) as error:
                return (str(error),)
            return (None,)

        key = digest(frame([[int(modality), dict(given)] for modality, given in sorted(kwargs.items())]))
        found: tuple[tuple[str | None], bool] = self._checked.get_or_compute(key, attempt, lambda _: 1)
        return found[0][0]

    def layout(self, traits: ModalityTraits, size: tuple[int, ...], kwargs: Kwargs) -> dict[str, np.ndarray]:
        """Ids and fields of a media input from its size alone, as a blank one gives them; remembered.

        Args:
            traits: how the processor takes its modality.
            size: (height, width) of an image, pixels; (samples,) of audio.
            kwargs: arguments for the processor's part.

        Raises:
            ProcessorRaised: the processor raised an error.
            NotComposable: the text around the media input depends on its size.
            SizeError: no token stands for a media input of this size.
        """

        def make() -> dict[str, np.ndarray]:
            found = self.single.run(traits, make_blank(traits.modality, size), kwargs)
            if found.placeholder_affixes != traits.placeholder_affixes:
                raise NotComposable(f"the text around {traits.modality.argument} depends on their size")
            return found.fields(traits)

        key = digest(frame([int(traits.modality), list(size), dict(kwargs)]))
        made: dict[str, np.ndarray]
        made, _ = self._layouts.get_or_compute(key, make, lambda fields: sum(value.nbytes for value in fields.values()))
        return made

    def sample_output(self, traits: ModalityTraits) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """Ids and tensors of a prompt with one sample, the feature first.

        Shape:
            returns ids [n] int64.
        """
        sample = make_sample(traits.modality, 0, self.runner.sampling_rate)
        out = self.runner.run(traits.example, {traits.modality: [sample]}, {})
        return ids_of(out), {name: out[name] for name in traits.tensor_names}

    @cached_property
    def digest(self) -> str:
        """Identifies the processor's settings, vocabulary, version and the classes that it is made of: 64 hexadecimal digits.

        transformers chooses another class for one settings file where torchvision is installed, whose pixels are others.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        processor = self.opened.processor
        return digest(frame([transformers.__version__, _classes(processor), processor.to_json_string(), words])).hex()


def _classes(processor: Any) -> list[list[str | None]]:
    """The classes of a processor and its parts, with the backend of each that has one."""
    parts = {name: part for name, part in vars(processor).items() if hasattr(part, "to_dict")}
    named = [("processor", processor), *sorted(parts.items())]
    return [[name, type(part).__module__, type(part).__qualname__, _backend(part)] for name, part in named]


def _backend(part: Any) -> str | None:
    found = getattr(part, "backend", None)
    return None if found is None else str(found)


def _media_tokens(processor: Any) -> frozenset[str]:
    names = ("image_token", "video_token", "audio_token", "boi_token")
    return frozenset(str(getattr(processor, name, "")) for name in names)
