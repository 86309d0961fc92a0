"""What a class or function must be that a spec names: one place, which a model's opening and `mm-plugin doctor` both ask."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mm_plugin.spec import ModelSpec


class Call(NamedTuple):
    """How a function is called: so many arguments by place, and these by name."""

    places: int
    names: tuple[str, ...] = ()


class Contract(NamedTuple):
    """What a field of a `ModelSpec` must name.

    Attributes:
        base: `"module:Class"` that it subclasses; None for a function.
        mixins: `"module:function"` that gives the mixins that a class needs for modalities.
        call: how a function is called.
    """

    base: str | None = None
    mixins: str | None = None
    call: Call | None = None


CONTRACTS: Mapping[str, Contract] = {
    "processor": Contract("mm_plugin.processor.model:ModelProcessor", "mm_plugin.processor.mixins:required_mixins"),
    "encoder": Contract("mm_plugin.encoder.base:Encoder", "mm_plugin.encoder.base:required_mixins"),
    "padding": Contract(call=Call(3)),
    "positions": Contract(call=Call(1, ("seq", "config", "options"))),
    "tokenizer": Contract(call=Call(1)),
    "embed": Contract(call=Call(4)),
    "demo": Contract("mm_plugin.demo.base:Demo"),
    "specialize": Contract(call=Call(2)),
}


def import_reference(reference: str) -> Any:
    """What a `"module:Name"` string names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def contract_faults(spec: ModelSpec, field: str, found: Any) -> list[str]:
    """Everything that is wrong with what a field of a spec names, worded to follow its name; empty where it can be used.

    Args:
        spec: the declaration.
        field: a key of `CONTRACTS`.
        found: the class or function.
    """
    contract = CONTRACTS[field]
    if contract.base is None:
        if not callable(found):
            return ["must be callable"]
        assert contract.call is not None
        return list(_call_faults("it", found, contract.call))
    base = import_reference(contract.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        return [f"must be a subclass of mm_plugin's {base.__name__}"]
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    faults = [f"must define {', '.join(missing)}: without them the class is abstract"] if missing else []
    if contract.mixins is not None:
        for mixin in import_reference(contract.mixins)(spec.modalities):
            if not issubclass(found, mixin):
                served = ", ".join(modality.argument for modality in spec.modalities)
                faults.append(f"must subclass {mixin.__name__}: the spec declares {served}")
    if field == "processor":
        faults += _option_faults(found)
        accepts = import_reference("mm_plugin.processor:AcceptsPrecomputed")
        # A spec without modalities is specialized for each checkpoint.
        if issubclass(found, accepts) and spec.modalities and not spec.feature_names:
            faults.append("takes features by name, as AcceptsPrecomputed: the spec must declare feature_names")
    return [*faults, *_method_faults(found)]


# Arguments that `Registry.load_processor`, `Processor.process`, `count` and `prepare_item` have beside options.
_TAKEN = (
    *("checkpoint", "architecture", "plugin", "fallback"),
    *("prompt", "images", "videos", "audios", "modality", "media", "size", "counts"),
)


def _option_faults(cls: type) -> Iterator[str]:
    """What is wrong with an author's `Options`."""
    from mm_plugin.items import Modality
    from mm_plugin.processor.arguments import Arguments
    from mm_plugin.processor.options import BaseOptions, option_scopes

    declared = getattr(cls, "Options", None)
    if not (isinstance(declared, type) and issubclass(declared, BaseOptions)):
        yield "must have Options, a struct that subclasses BaseOptions"
        return
    try:
        scopes = option_scopes(declared)
    except Exception as error:  # annotations are code
        yield f"must have Options whose annotations can be read, got {type(error).__name__}: {error}"
        return
    taken = sorted(set(declared.__struct_fields__) & {*Arguments.__struct_fields__, *_TAKEN})
    if taken:
        yield f"must have Options of other names than the arguments of the calls that take them, got {', '.join(taken)}"
    known = {modality.name.lower() for modality in Modality}
    for name, scope in scopes.items():
        for wrong in sorted(set(scope.modalities) - known):
            yield f"must have Options about {', '.join(sorted(known))} alone; {name} is about {wrong!r}"
    yield from _bound_faults("Options.read_settings", declared, "read_settings", Call(2), on_class=True)


def _method_faults(cls: type) -> Iterator[str]:
    """Methods that are something else, or cannot be called as the abstract ones that they override."""
    for name, declared in _declared_methods(cls).items():
        if name in getattr(cls, "__abstractmethods__", ()):
            continue
        on_class = isinstance(declared, classmethod)
        function = declared.__func__ if isinstance(declared, classmethod) else declared
        parameters = list(inspect.signature(function).parameters.values())[1:]
        names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
        yield from _bound_faults(name, cls, name, Call(len(parameters) - len(names), names), on_class=on_class)


def _declared_methods(cls: type) -> dict[str, Any]:
    """The abstract methods that the classes of this package declare, by name."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        if base.__module__.partition(".")[0] == "mm_plugin"
        for name, value in vars(base).items()
        if getattr(value, "__isabstractmethod__", False)
    }


def _bound_faults(label: str, cls: type, name: str, call: Call, *, on_class: bool) -> Iterator[str]:
    """What is wrong with a method of a class, called on the class or on an object of it."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, classmethod | staticmethod) or on_class:
        found = getattr(cls, name)
    elif inspect.isfunction(found):
        # The object itself takes the first place.
        call = Call(call.places + 1, call.names)
    if not callable(found):
        yield f"must define {label} as a method, got a {type(found).__name__}"
        return
    yield from _call_faults(label, found, call)


def _call_faults(label: str, found: Callable[..., Any], call: Call) -> Iterator[str]:
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        yield f"must not be asynchronous: {label} is called in a thread"
        return
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C, and says nothing
        return
    try:
        signature.bind(*[None] * call.places, **dict.fromkeys(call.names))
    except TypeError as error:
        asked = ", ".join([_counted(call.places), *(f"{name}=" for name in call.names)])
        yield f"must take {asked}, as {label}{signature} does not ({error})"


def _counted(places: int) -> str:
    return f"{places} argument{'' if places == 1 else 's'} by place"
