"""Whether what a processor returns for several media inputs is composed of what it returns for each of them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mm_plugin import Modality, Replacement
from mm_plugin.placeholders import expand
from mm_plugin.prompt import PromptReader
from mm_plugin_transformers_auto.runner import ProcessorRunner, ids_of
from mm_plugin_transformers_auto.samples import blank_like, make_sample
from mm_plugin_transformers_auto.single_item import NotComposable, SingleItemOutput, SingleItemRunner
from mm_plugin_transformers_auto.tensors import is_same, join, rounding_difference
from mm_plugin_transformers_auto.traits import Kwargs, ModalityTraits

# Which samples stand in a prompt, by index: one, two, touching ones, one twice, three in other orders.
ORDERS = ((1,), (2, 1), (1, 1), (0, 2, 1), (2, 0, 0))


def with_axes(runner: ProcessorRunner, single: SingleItemRunner, traits: ModalityTraits) -> ModalityTraits:
    """Traits with the axis along which the processor concatenates each tensor of several media inputs.

    Raises:
        NotComposable: a tensor of several media inputs is not a concatenation of those of each alone.
        ProcessorRaised: the processor raised an error.
        SizeError: no token stands for a sample.
    """
    media = [make_sample(traits.modality, index, runner.sampling_rate) for index in range(3)]
    parts = [single.run(traits, media_input, {}).tensors for media_input in media]
    whole = runner.run(prompt_of([traits] * 3), {traits.modality: media}, {})
    axes = {}
    for name in traits.tensor_names:
        given = [part[name] for part in parts]
        joined = {axis: join(given, axis) for axis in range(min(2, given[0].ndim))}
        fits = [axis for axis, found in joined.items() if is_same(found, whole.get(name))]
        if not fits:
            what = f"{name} of several {traits.modality.argument}"
            raise _difference(what, list(joined.values()), whole.get(name))
        axes[name] = fits[0]
    return msgspec.structs.replace(traits, axes=axes)


def prompt_of(traits: Sequence[ModalityTraits]) -> str:
    """A prompt with up to five media inputs, some of which touch text, line ends or one another."""
    texts = ("a ", "", "\n", " b\n\n", "c", "")
    return "".join(text + one.placeholder for text, one in zip(texts, traits, strict=False)) + " d\n"


class CompositionCheck:
    """Compares prompts with several media inputs with what is composed of each of them alone.

    Args:
        runner: runs the processor.
        single: runs it on one media input.
        traits: with axes, by modality.
        tokenizer: the processor's tokenizer, or a copy.
    """

    def __init__(
        self,
        runner: ProcessorRunner,
        single: SingleItemRunner,
        traits: Mapping[Modality, ModalityTraits],
        tokenizer: Any,
    ) -> None:
        self._runner, self._single, self._traits = runner, single, traits
        # Reads prompts as an open processor does.
        self._reader = PromptReader(
            tokenizer,
            {modality: int(tokenizer.convert_tokens_to_ids(one.placeholder)) for modality, one in traits.items()},
            placeholder_affixes={modality: one.placeholder_affixes for modality, one in traits.items()},
        )

    def run(self, kwargs: Mapping[Modality, Kwargs]) -> None:
        """Compare prompts of one, two and three samples, and samples with blank ones.

        Args:
            kwargs: arguments for the processor's parts, by modality.

        Raises:
            NotComposable: something differs.
            ProcessorRaised: the processor raised an error.
            SizeError: no token stands for a sample.
        """
        known: dict[tuple[Modality, int], SingleItemOutput] = {}
        for modality, traits in self._traits.items():
            for index in range(3):
                known[modality, index] = self._run_single(traits, index, kwargs.get(modality, {}))
        orders = [[(modality, index) for index in order] for modality in self._traits for order in ORDERS]
        if len(self._traits) > 1:
            orders.append([(modality, index) for index in range(2) for modality in self._traits])
        for order in orders:
            self._compare(order, known, kwargs)

    def _sample(self, modality: Modality, index: int) -> Any:
        return make_sample(modality, index, self._runner.sampling_rate)

    def _run_single(self, traits: ModalityTraits, index: int, kwargs: Kwargs) -> SingleItemOutput:
        """The output of a sample, in which everything but the feature must depend on its size alone."""
        sample, name = self._sample(traits.modality, index), traits.modality.argument
        found = self._single.run(traits, sample, kwargs)
        blank = self._single.run(traits, blank_like(sample), kwargs)
        same = [is_same(found.tensors[field], blank.tensors[field]) for field in traits.field_names]
        if not np.array_equal(found.ids, blank.ids) or not all(same):
            raise NotComposable(f"tokens or fields of {name} depend on more than their size")
        if found.placeholder_affixes != traits.placeholder_affixes:
            raise NotComposable(f"the text around {name} depends on their size or on the arguments")
        return found

    def _compare(
        self,
        order: Sequence[tuple[Modality, int]],
        known: Mapping[tuple[Modality, int], SingleItemOutput],
        kwargs: Mapping[Modality, Kwargs],
    ) -> None:
        """Compare ids and tensors of one prompt."""
        prompt = prompt_of([self._traits[modality] for modality, _ in order])
        media: dict[Modality, list[Any]] = {}
        for modality, index in order:
            media.setdefault(modality, []).append(self._sample(modality, index))
        whole = self._runner.run(prompt, media, kwargs)
        read = self._reader.read(prompt)
        parts = [known[entry] for entry in order]
        expanded = expand(read.ids, [slot for slot, _ in read.slots], [Replacement(part.ids) for part in parts]).ids
        counted = " and ".join(f"{len(given)} {modality.argument}" for modality, given in media.items())
        if not np.array_equal(expanded, ids_of(whole)):
            raise NotComposable(f"the tokens of {counted} differ from those of each of them alone")
        for modality in media:
            own = [part for part, (other, _) in zip(parts, order, strict=True) if other is modality]
            for name, axis in self._traits[modality].axes.items():
                joined = join([part.tensors[name] for part in own], axis)
                if not is_same(joined, whole.get(name)):
                    raise _difference(f"{name} of {counted}", [joined], whole.get(name))


def _difference(what: str, composed: Sequence[Any], whole: Any) -> NotComposable:
    """The error for a tensor that differs, which says so if it differs by rounding alone."""
    found = [largest for part in composed if (largest := rounding_difference(part, whole)) is not None]
    if found:
        return NotComposable(
            f"{what} differ from those of each of them alone by rounding (at most {min(found):.1g}): on this machine their last "
            "bits depend on how many are prepared together; MKL_CBWR=COMPATIBLE in the environment may prevent it"
        )
    return NotComposable(f"{what} differ from those of each of them alone")
