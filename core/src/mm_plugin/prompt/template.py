"""A chat template, compiled so that its rendering says who wrote which character. Knows no tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from mm_plugin.prompt.traced import (
    CLIENT,
    OWN,
    TEXT_LIMIT,
    SafeText,
    TextTooLong,
    TracedText,
    as_written,
    check_length,
    escaped,
    join_traced,
)

# When the rendering of this context must end, by the monotonic clock, seconds.
_DEADLINE: ContextVar[float] = ContextVar("_DEADLINE", default=float("inf"))
_MAX_EXPONENT = 4096


class RenderingTooLong(Exception):
    """A rendering took longer than it may."""


class ChatTemplate:
    r"""One chat template. Final; safe to use from several threads.

    It sees what transformers gives a template: the same environment, filters, functions and names.

    Args:
        source: the template's text.

    Raises:
        jinja2.TemplateSyntaxError: the text is not a template.

    Example:
        >>> from mm_plugin.prompt.template import ChatTemplate
        >>> from mm_plugin.prompt.traced import as_clients
        >>> template = ChatTemplate("<|{{ messages[0].role }}|>")
        >>> text = template.render({"messages": as_clients([{"role": "user"}])}, max_chars=100, seconds=1.0)
        >>> text, text.origins
        ('<|user|>', b'\x01\x01\x00\x00\x00\x00\x01\x01')
    """

    def __init__(self, source: str) -> None:
        environment = _Environment()
        tree = environment.parse(source)
        _Tracing(environment).visit(tree)
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None), None)

    def render(self, names: Mapping[str, Any], *, max_chars: int, seconds: float) -> TracedText:
        """The text that the template writes.

        Args:
            names: what the template reads, with `TracedText` in place of strings.
            max_chars: longest text that it may build, characters.
            seconds: time limit, checked in every step of a loop.

        Raises:
            TextTooLong: it builds a longer text.
            RenderingTooLong: it takes longer.
            Exception: whatever else the template raises.
        """
        limit, deadline = TEXT_LIMIT.set(max_chars), _DEADLINE.set(time.monotonic() + seconds)
        try:
            parts, length = [], 0
            for part in self._template.root_render_func(self._template.new_context(dict(names))):
                parts.append(part)
                length += len(part)
                check_length(length)
            return join_traced(parts)
        finally:
            TEXT_LIMIT.reset(limit)
            _DEADLINE.reset(deadline)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates. Every text in it is a `TracedText`."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=as_written,
        )
        self.filters.update(tojson=_tojson, join=_join, string=as_written, indent=_indent, trim=_trim, replace=_replace)
        self.filters.update(safe=SafeText, escape=escaped, e=escaped)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )

    concat = staticmethod(join_traced)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
            raise TextTooLong(f"the chat template computes a power with exponent {right}")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sequence) and isinstance(other, int):
                    check_length(len(one) * other)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        text = getattr(value, "__self__", None)
        if isinstance(text, TracedText) and getattr(value, "__name__", "") == "format":
            return lambda *args, **kwargs: _format(jinja2.sandbox.SandboxedFormatter(self), text, args, kwargs)
        return super().wrap_str_format(value)

    @staticmethod
    def tick() -> None:
        """Called in every step of a loop and every call of a macro."""
        if time.monotonic() > _DEADLINE.get():
            raise RenderingTooLong("the chat template loops for too long")

    @staticmethod
    def concat_written(*parts: Any) -> TracedText:
        """The operator `~`."""
        return join_traced(map(as_written, parts))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which shows what an assistant said and changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Tracing(jinja2.visitor.NodeTransformer):
    """Makes the texts of a template `TracedText` of the template's own, and loops and macros call `tick`."""

    def __init__(self, environment: _Environment) -> None:
        self._environment, self._count = environment, 0

    def _literal(self, text: str) -> jinja2.nodes.EnvironmentAttribute:
        name = f"text_{self._count}"
        self._count += 1
        setattr(self._environment, name, TracedText.of(text, OWN))
        return jinja2.nodes.EnvironmentAttribute(name)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
        return self._literal(node.data)

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
        return self._literal(node.value) if isinstance(node.value, str) else node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, jinja2.nodes.Const):  # a name is looked up, and written nowhere
            node.arg = self.visit(node.arg)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("concat_written", node.nodes)

    def visit_For(self, node: jinja2.nodes.For) -> Any:
        return self._counted(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> Any:
        return self._counted(node)

    def visit_FilterBlock(self, node: jinja2.nodes.FilterBlock) -> Any:
        # A filter block writes what the filter returns, as it is; assigned to a name first, it is written like any value.
        self.generic_visit(node)
        name = f"filtered_{self._count}"
        self._count += 1
        nodes = jinja2.nodes
        return [
            nodes.AssignBlock(nodes.Name(name, "store"), node.filter, node.body),
            nodes.Output([nodes.Name(name, "load")]),
        ]

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(self._call("tick", [])))
        return node

    @staticmethod
    def _call(name: str, arguments: list[Any]) -> jinja2.nodes.Call:
        nodes = jinja2.nodes
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _Dict:
    """`dict` as a template sees it, without the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` as a template sees it: it holds no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace holds no name that begins with an underscore, such as {name}"
        )


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(layout: str) -> TracedText:
    return TracedText.of(datetime.now().strftime(layout), OWN)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> TracedText:
    written = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    check_length(len(written))
    origins = bytearray(CLIENT * len(written))
    at = 0
    for text in _texts_of(value, sort_keys):
        quoted = json.dumps(text, ensure_ascii=ensure_ascii)
        at = written.index(quoted, at)
        if isinstance(text, TracedText) and text.origins == OWN * len(text):
            origins[at : at + len(quoted)] = OWN * len(quoted)
        at += len(quoted)
    return TracedText(written, bytes(origins))


def _texts_of(value: Any, sort_keys: bool) -> Iterator[str]:
    """Texts of a JSON value in the order in which they are written; other keys are written as texts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in sorted(value.items()) if sort_keys else value.items():
            yield name if isinstance(name, str) else next(iter(json.loads(json.dumps({name: 0}))))
            yield from _texts_of(part, sort_keys)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_of(part, sort_keys)


def _format(formatter: Any, text: TracedText, args: Any, kwargs: Any) -> TracedText:
    """`str.format`: the pieces of the text as they came, the fields as they are written."""
    origin = min((text.origins[index : index + 1] for index in range(len(text))), default=OWN)
    parts: list[TracedText] = []
    number = 0
    for literal, field, layout, conversion in formatter.parse(text.plain):
        parts.append(TracedText.of(literal, origin))
        if field is None:
            continue
        if layout or conversion:
            return TracedText(formatter.vformat(text.plain, args, kwargs))
        name = field
        if field[:1] in ("", ".", "["):
            name, number = f"{number}{field}", number + 1
        value, _ = formatter.get_field(name, args, kwargs)
        parts.append(as_written(value))
    return join_traced(parts)


def _trim(value: Any, chars: str | None = None) -> TracedText:
    return as_written(value).strip(chars)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> TracedText:
    return as_written(value).replace(as_written(old), as_written(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> TracedText:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return as_written(d).join(map(as_written, value))


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> TracedText:
    """Jinja's filter over text with origins."""
    text = as_written(s)
    by = width if isinstance(width, str) else TracedText.of(" " * width, OWN)
    end = TracedText.of("\n", OWN)
    lines = (text + end).splitlines()
    if not blank:
        lines = [line if index == 0 or not line else join_traced((by, line)) for index, line in enumerate(lines)]
        found = end.join(lines)
    else:
        found = (end + by).join(lines)
    return join_traced((by, found)) if first else found
