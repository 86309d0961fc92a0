"""Options of one media input: names and values checked one by one, then put before those of its request."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.errors import MMPluginError, ProcessorError, RequestError, UsageError, is_readable
from mm_plugin.foreign import is_interruption, shown, text_of, words
from mm_plugin.items import Modality
from mm_plugin.media.with_options import WithOptions
from mm_plugin.processor.options import DETAIL, DETAILS, BaseOptions, OptionScope, plain
from mm_plugin.prompt.messages import copied

if TYPE_CHECKING:
    from mm_plugin.spec import ModelSpec


class ItemOptions:
    """What may be given for one media input of an open model. Final; safe to use from several threads.

    Args:
        declared: the author's `Options`.
        author: the class that declares them, for messages.
        spec: the model's declaration.
        scopes: what each option is about, by name.
        owner: plugin, distribution and version, for errors.
    """

    def __init__(
        self,
        declared: type[BaseOptions],
        author: str,
        spec: ModelSpec,
        scopes: Mapping[str, OptionScope],
        owner: Mapping[str, str],
    ) -> None:
        self._declared, self._author, self._name, self._owner = declared, author, spec.name, owner
        self._scopes = scopes
        hints = typing.get_type_hints(declared, include_extras=True)
        self._hints = {name: hints[name] for name in scopes}
        self._names = {modality: self._allowed(modality) for modality in spec.modalities}

    def _allowed(self, modality: Modality) -> dict[str, str]:
        """The names that may be given, each with its option."""
        own = {
            name: name
            for name, scope in self._scopes.items()
            if scope.at == "request" and scope.per_item and scope.is_about(modality)
        }
        used = self._declared.ITEM_NAMES.get(modality.name.lower(), {})
        return own | {name: option for name, option in used.items() if option in own}

    def resolve(self, media: WithOptions, modality: Modality, path: str, options: Any) -> Any:
        """The options that are in force for a media input.

        Args:
            media: the media input with its own.
            modality: what it is.
            path: where it stands in the request.
            options: those of the request, all resolved.

        Raises:
            RequestError: a value does not fit its option, or a client's name is unknown.
            UsageError: a server's name is unknown.
        """
        given = {name: value for name, value in plain(media.options).items() if value is not None}
        if not given:
            return options
        where = media.path or path
        self._check_names(given, modality, where, media.path is not None)
        values = {name: self._converted(name, value, modality, where) for name, value in given.items()}
        try:
            own = dict(self._declared.for_item(values, modality, options))
            return msgspec.convert(msgspec.structs.asdict(options) | own, self._declared, strict=True)
        except ValueError as error:  # msgspec's are too
            raise RequestError(f"{where}: {text_of(error)}", path=where) from error
        except BaseException as error:
            if is_interruption(error) or (isinstance(error, MMPluginError) and is_readable(error)):
                raise
            raise ProcessorError(f"{self._author}.Options.for_item failed: {words(error)}", **self._owner) from error

    def check_sampling(self, media: WithOptions, modality: Modality, path: str) -> None:
        """Refuse options that choose frames for a video whose frames were chosen before it came.

        Raises:
            RequestError: there are some.
        """
        for name, value in media.options.items():
            option = self._names[modality].get(name)
            if value is not None and option is not None and self._scopes[option].sampling:
                where = f"{media.path or path}.{name}"
                raise RequestError(
                    f"{where}: the frames of this video were chosen before it came; leave {name} out, or send the video itself",
                    path=where,
                )

    def _check_names(self, given: Mapping[str, Any], modality: Modality, where: str, client: bool) -> None:
        names, kind = self._names[modality], modality.name.lower()
        taken: dict[str, str] = {}
        for name in given:
            if name == DETAIL and modality is Modality.IMAGE:
                continue
            if name not in names:
                known = sorted([*names, DETAIL] if modality is Modality.IMAGE else names)
                place = f"{where}.{name}"
                message = f"{place}: unknown option of one {kind}; {self._name} takes {', '.join(known)}"
                if client:
                    raise RequestError(message, path=place)
                raise UsageError(message, argument=name)
            other = taken.setdefault(names[name], name)
            if other != name:
                raise RequestError(f"{where}: {other} and {name} are the same option; give one of them", path=where)

    def _converted(self, name: str, value: Any, modality: Modality, where: str) -> Any:
        """A value that fits its option."""
        if name == DETAIL and modality is Modality.IMAGE:
            if not isinstance(value, str) or value not in DETAILS:
                raise RequestError(
                    f"{where}.{name}: expected {', '.join(DETAILS)}, got {shown(value):.40}", path=f"{where}.{name}"
                )
            return value
        value = copied(value, f"{where}.{name}")
        try:
            return msgspec.convert(value, self._hints[self._names[modality][name]], strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"{where}.{name}: {error}", path=f"{where}.{name}") from error
