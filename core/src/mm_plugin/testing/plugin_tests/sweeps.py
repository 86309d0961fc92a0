"""Sweeps that every plugin runs: options and source keys, chat messages and special tokens, odd media, what an import costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mm_plugin.demo.base import sample_images
from mm_plugin.items import Modality
from mm_plugin.registry import Registry
from mm_plugin.testing.corpus.audio_entries import audios
from mm_plugin.testing.corpus.image_entries import images
from mm_plugin.testing.corpus.plugin_sweep import sweep
from mm_plugin.testing.corpus.video_entries import videos
from mm_plugin.testing.options import sweep_options
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.media import half_transparent_png, video_file
from mm_plugin.testing.provenance import sweep_provenance

_ENTRIES = {Modality.IMAGE: images, Modality.VIDEO: videos, Modality.AUDIO: audios}


class OptionSweepTests(PluginTests):
    """Every option is tried: what changes an item changes its source key, and nothing else does. Needs `registry`, `checkpoint`.

    Attributes:
        CHANGING: by modality, the options some value of which must change the item.
        MAY_CHANGE: by modality, further options that may, depending on the media.
        VALUES: by option, the values to try, where those near the default are not enough.

    >>> class TestOptions(OptionSweepTests):
    ...     CHANGING = {Modality.IMAGE: {"background", "max_pixels"}}
    """

    CHANGING: ClassVar[Mapping[Modality, Collection[str]]]
    MAY_CHANGE: ClassVar[Mapping[Modality, Collection[str]]] = {}
    VALUES: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def media(self) -> Mapping[Modality, Any]:
        """A media input of each modality: a transparent image, and a video of three seconds."""
        found: dict[Modality, Any] = {Modality.IMAGE: half_transparent_png()}
        if Modality.VIDEO in self.CHANGING:
            found[Modality.VIDEO] = video_file(72, 24)
        return found

    def test_every_option_that_changes_an_item_changes_its_source_key(
        self, registry: Registry, checkpoint: Path
    ) -> None:
        trials = sweep_options(
            lambda **options: registry.load_processor(checkpoint, **options), self.media(), values=self.VALUES
        )
        for modality, changing in self.CHANGING.items():
            changed = {trial.option for trial in trials if trial.changed and trial.modality is modality}
            may = set(changing) | set(self.MAY_CHANGE.get(modality, ()))
            assert set(changing) <= changed <= may, f"{modality.argument}: {sorted(changed ^ set(changing))}"


class ProvenanceTests(PluginTests):
    """Client text that looks like special tokens stays text. Needs `processor`.

    Attributes:
        ROUNDS: random messages to try, in addition to one for each added token.

    >>> class TestProvenance(ProvenanceTests):
    ...     ROUNDS = 300
    """

    ROUNDS: ClassVar[int] = 150

    def test_no_text_in_a_message_becomes_a_token_of_the_model(self, processor: Any) -> None:
        assert sweep_provenance(processor, media=sample_images()[1][1], rounds=self.ROUNDS) == 0


class CorpusTests(PluginTests):
    """Every odd media input becomes an item, or is refused as the client's fault. Needs `processor`.

    Attributes:
        TAKEN: by modality, how many entries of the corpus become items, at least.
        MAY_REFUSE: names of readable entries that the model cannot take, and therefore refuses.

    >>> class TestCorpus(CorpusTests):
    ...     TAKEN = {Modality.IMAGE: 100}
    ...     MAY_REFUSE = ("png/1 x 300", "png/300 x 1")
    """

    PARAMETERS: ClassVar[Mapping[str, str]] = {"modality": "modalities"}
    TAKEN: ClassVar[Mapping[Modality, int]]
    MAY_REFUSE: ClassVar[Collection[str]] = ()

    @property
    def modalities(self) -> list[Modality]:
        """Whose entries are tried."""
        return list(self.TAKEN)

    def test_every_odd_media_input_is_taken_or_refused_as_it_must(self, processor: Any, modality: Modality) -> None:
        if modality is not Modality.IMAGE:
            pytest.importorskip("av")
        taken = sweep(processor, _ENTRIES[modality](), may_refuse=self.MAY_REFUSE)
        assert len(taken) > self.TAKEN[modality]
        assert not set(self.MAY_REFUSE) & set(taken)


class ImportTests(PluginTests):
    """What importing parts of a plugin costs, each in a fresh interpreter.

    Attributes:
        PACKAGE: import name of the plugin.
        LIGHT: modules that a server without torch imports.
        RUNTIME: modules that a server imports to serve requests.

    >>> class TestImports(ImportTests):
    ...     PACKAGE = "my_vl"
    """

    PACKAGE: ClassVar[str]
    LIGHT: ClassVar[Sequence[str]] = ("hooks",)
    RUNTIME: ClassVar[Sequence[str]] = ("processor", "encoder")

    def test_light_modules_import_neither_torch_nor_transformers(self) -> None:
        loaded = self._imported_with(self.LIGHT, call="hooks.mm_register_models()")
        assert not {"torch", "transformers"} & loaded

    def test_what_serves_imports_no_demo_no_command_and_no_kit(self) -> None:
        loaded = self._imported_with(self.RUNTIME)
        assert not {"mm_plugin.cli", "mm_plugin.demo", "mm_plugin.testing", "pytest"} & loaded

    def _imported_with(self, modules: Sequence[str], *, call: str = "") -> set[str]:
        imports = "".join(f"from {self.PACKAGE} import {module}\n" for module in modules)
        code = f"import json, sys\n{imports}{call}\nprint(json.dumps(sorted(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - our own code
        assert done.returncode == 0, done.stderr
        return set(json.loads(done.stdout))
