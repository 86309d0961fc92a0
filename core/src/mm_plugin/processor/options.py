"""Options: declared by an author in one struct, resolved in one order, digested by modality."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from mm_plugin.errors import ProcessorError, RequestError, UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import frame
from mm_plugin.items import Modality
from mm_plugin.media.types import WHITE
from mm_plugin.processor.settings_keys import check_settings
from mm_plugin.prompt.messages import copied

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.spec import ModelSpec


class OptionScope(msgspec.Struct, frozen=True):
    """Says in an `Options` annotation which media an option is about, and when it may be given.

    `max_pixels: Annotated[int, OptionScope("image")] = 1003520`. Without it an option is about every modality.

    Attributes:
        modalities: names of the modalities whose outputs it changes; none means all.
        at: the latest moment at which it may be given: `request`, `load` for a switch that is fixed when the model is opened,
            or `checkpoint` for a number that only the checkpoint's own files may set.
        per_item: whether it may be given for one media input, by a client too, who writes it into a part of a chat message;
            False for what only the server may decide.
        sampling: whether it only decides which frames of a video are used; it cannot be given for one whose frames were chosen
            before it came.

    Example:
        >>> from mm_plugin import Modality
        >>> scope = OptionScope.load("image")
        >>> scope.at, scope.is_about(Modality.IMAGE), scope.is_about(Modality.VIDEO)
        ('load', True, False)
    """

    modalities: tuple[str, ...] = ()
    at: Literal["request", "load", "checkpoint"] = "request"
    per_item: bool = True
    sampling: bool = False

    def is_about(self, modality: Modality) -> bool:
        """Whether it changes this modality's outputs."""
        return not self.modalities or modality.name.lower() in self.modalities

    @classmethod
    def checkpoint(cls, *modalities: str) -> OptionScope:
        """A number that belongs to the weights: encoder and processor must agree on it, so nobody may change it."""
        return cls(modalities, "checkpoint")

    @classmethod
    def load(cls, *modalities: str) -> OptionScope:
        """A switch that is fixed when the model is opened."""
        return cls(modalities, "load")

    @classmethod
    def request(cls, *modalities: str, per_item: bool = True, sampling: bool = False) -> OptionScope:
        """An option that a request may give, for all of its media inputs or for one of them."""
        return cls(modalities, "request", per_item, sampling)


# OpenAI's key beside an image, and what it may say.
DETAIL = "detail"
DETAILS = ("auto", "low", "high")
Level = typing.Annotated[int, msgspec.Meta(ge=0, le=255)]


class BaseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the core itself reads; an author's `Options` subclasses it.

    Attributes:
        background: RGB levels behind transparent pixels, of images and of frames.

    Example:
        >>> from typing import Annotated
        >>> class Options(BaseOptions, frozen=True, kw_only=True):
        ...     max_pixels: Annotated[int, OptionScope.request("image")] = 1_003_520
        >>> Options(max_pixels=4096).background
        (255, 255, 255)
    """

    # By modality, names that the model's own utilities use in a part of a chat message: the option that each stands for.
    ITEM_NAMES: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    background: typing.Annotated[tuple[Level, Level, Level], OptionScope(("image", "video"))] = WHITE

    @classmethod
    def for_item(cls, given: Mapping[str, Any], modality: Modality, usual: Self) -> dict[str, Any]:
        """Options of one media input, by option; overridden where a name beside a part means more than an option of that value.

        OpenAI's `detail` is here, for models with `min_pixels` and `max_pixels`: `low` makes the least area the largest, `high`
        leaves the largest; `max_pixels` beside it comes first.

        Args:
            given: as they were given, by the names of options or of `ITEM_NAMES`; each value fits its option.
            modality: what the media input is.
            usual: the options of the request, which are in force for its other media inputs.

        Raises:
            ValueError: they cannot go together.
        """
        names = cls.ITEM_NAMES.get(modality.name.lower(), {})
        options = {names.get(name, name): value for name, value in given.items() if name != DETAIL}
        detail = given.get(DETAIL, "auto")
        if detail != "auto" and {"min_pixels", "max_pixels"} <= set(cls.__struct_fields__):
            least = options.get("min_pixels", getattr(usual, "min_pixels", None))
            options.setdefault("max_pixels", least if detail == "low" else getattr(usual, "max_pixels", None))
        return options

    @classmethod
    def read_settings(cls, checkpoint: Checkpoint, modality: Modality) -> Mapping[str, Any]:
        """What the checkpoint's files say, by option; overridden where a model keeps its settings in other files.

        Args:
            checkpoint: the opened checkpoint.
            modality: the modality whose settings are read.

        Raises:
            UsageError: the files cannot be read, or contradict one another.
        """
        return checkpoint.preprocessor(modality)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, modalities: Sequence[Modality], given: Mapping[str, Any] | None = None
    ) -> Self:
        """The options that are in force when a model is opened: load over checkpoint over default.

        Args:
            checkpoint: what `read_settings` finds of a modality is taken by name for the options about it, and nothing else.
            modalities: whose settings; where two disagree, the first counts.
            given: options given at load.

        Raises:
            UsageError: a value does not fit its option.
        """
        scopes = option_scopes(cls)
        settings: dict[str, Any] = {}
        files = {modality: cls.read_settings(checkpoint, modality) for modality in modalities}
        for modality, found in reversed(files.items()):
            # A checkpoint's settings of videos bear names that are an image's here, and mean others by them.
            about = [name for name, scope in scopes.items() if scope.is_about(modality)]
            settings |= {name: found[name] for name in about if found.get(name) is not None}
        try:
            options = msgspec.convert(settings | plain(given or {}), cls, strict=True)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise UsageError(f"options for {checkpoint.folder}: {error}", argument="options") from error
        _check_keys(options, checkpoint, files)
        return options

    def settings_without_effect(self, modality: Modality) -> Mapping[str, Any]:
        """Keys of the checkpoint's settings that are not options and change nothing; overridden where there are some.

        A key that is neither here nor an option, nor in the core's own table (`*_type`, `processor_class`, `auto_map` and the
        like), is refused when the model opens, because it may change what the model sees.

        Args:
            modality: the modality whose settings have the keys.

        Returns:
            By key, such as `do_pad` or `size.height`: the value with which it changes nothing, or a function that is true of such
            values; `any_value` for a key that never does.
        """
        return {}


def option_scopes(declared: type[BaseOptions]) -> dict[str, OptionScope]:
    """What each option of an author's struct is about, by name."""
    scopes = {}
    hints = typing.get_type_hints(declared, include_extras=True)
    for name in declared.__struct_fields__:
        hint = hints[name]
        found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, OptionScope)]
        scopes[name] = found[0] if found else OptionScope()
    return scopes


def _check_keys(options: BaseOptions, checkpoint: Checkpoint, files: Mapping[Modality, Mapping[str, Any]]) -> None:
    """Refuse keys of the checkpoint's settings that nobody reads. Modalities may share a file."""
    scopes = option_scopes(type(options))
    sources = {modality: _source_of(checkpoint, modality, found) for modality, found in files.items()}
    for source, settings in sources.values():
        sharing = [modality for modality, (other, _) in sources.items() if other == source]
        here = {name for name, scope in scopes.items() if any(map(scope.is_about, sharing))}
        # An option about modalities that are not read has no effect, by its own declaration.
        elsewhere = {name for name, scope in scopes.items() if not any(map(scope.is_about, files))}
        without_effect: dict[str, Any] = {}
        for modality in sharing:
            without_effect |= options.settings_without_effect(modality)
        check_settings(
            settings,
            known=here | elsewhere,
            without_effect=without_effect,
            source=source,
            reader=type(options).__name__,
        )


def _source_of(checkpoint: Checkpoint, modality: Modality, found: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The file that the core reads for a modality, and what of it is in the settings, which an author may have made elsewhere."""
    if not found:
        return "", {}
    try:
        source, settings = checkpoint.preprocessor_source(modality), checkpoint.preprocessor(modality)
    except UsageError:  # there is no such file
        return "", {}
    return source, {name: value for name, value in settings.items() if name in found and found[name] == value}


class OptionTable:
    """An author's options for one open model: which there are, what is in force, and what enters a source key. Final.

    An option about modalities of which the spec serves none is unknown.

    Args:
        declared: the author's `Options`.
        author: the class that declares them, for messages.
        spec: the model's declaration.
        checkpoint: the opened checkpoint.
        given: options given at load.
        owner: plugin, distribution and version, for errors.

    Attributes:
        scopes: what each option is about, by name, of the options that this model has.
        loaded: the options that are in force where a call gives none.
    """

    def __init__(
        self,
        declared: Any,
        author: str,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        given: Mapping[str, Any],
        owner: Mapping[str, str],
    ) -> None:
        if not (isinstance(declared, type) and issubclass(declared, BaseOptions)):
            raise ProcessorError(f"{author}.Options must be a struct that subclasses BaseOptions", **owner)
        self._declared, self._author, self._name, self._owner = declared, author, spec.name, owner
        self.scopes = {
            name: scope for name, scope in option_scopes(declared).items() if any(map(scope.is_about, spec.modalities))
        }
        self._refuse_unknown(given, ("request", "load"))
        self.loaded = declared.from_checkpoint(checkpoint, spec.modalities, given)
        self._loaded_digests = {modality: self._digest(self.loaded, modality) for modality in spec.modalities}

    def call(self, given: Mapping[str, Any]) -> Any:
        """Call over load over checkpoint over default.

        Raises:
            UsageError: an option is unknown, or cannot be given per call.
            RequestError: a value does not fit its option.
        """
        if not given:
            return self.loaded
        self._refuse_unknown(given, ("request",))
        values = copied(plain(given), "options")
        try:
            return msgspec.convert(msgspec.structs.asdict(self.loaded) | values, self._declared, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"options: {error}", path="options") from error

    def received(self, options: Mapping[str, Any]) -> Any:
        """The author's struct of options that another process resolved, and sent as plain values.

        Raises:
            UsageError: they are not those of this model.
        """
        try:
            return msgspec.convert(options, self._declared, strict=True)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise UsageError(f"tasks: expected options of {self._name}: {error}", argument="tasks") from error

    def _refuse_unknown(self, given: Mapping[str, Any], moments: tuple[str, ...]) -> None:
        allowed = sorted(name for name, scope in self.scopes.items() if scope.at in moments)
        for name in given:
            if name not in allowed:
                fixed = {"load": "is fixed when the model is opened", "checkpoint": "is the checkpoint's alone"}
                why = fixed.get(self.scopes[name].at, "") if name in self.scopes else "is unknown"
                raise UsageError(
                    f"option {name!r} of {self._name} {why}; options here: {', '.join(allowed)}", argument=name
                )

    def given_at_load(self) -> dict[str, Any]:
        """The options that are fixed when the model opens, by name; positions may depend on them."""
        return {name: getattr(self.loaded, name) for name, scope in self.scopes.items() if scope.at == "load"}

    def effective(self, options: Any, modality: Modality) -> bytes:
        """Digest of the options that can change this modality's output: these, and no others, enter its source key.

        Returns:
            32 bytes.
        """
        if options is self.loaded:
            return self._loaded_digests[modality]
        return self._digest(options, modality)

    def _digest(self, options: Any, modality: Modality) -> bytes:
        effective = {
            option: getattr(options, option) for option, scope in self.scopes.items() if scope.is_about(modality)
        }
        try:
            return digest(frame(effective))
        except UsageError as error:
            raise ProcessorError(
                f"{self._author}.Options have what has no identity: {error.message}", **self._owner
            ) from error


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with numpy's numbers as Python's."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
