"""In which form a chat template reads contents and tool calls, seen by rendering probe messages. Reads no source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from mm_plugin.prompt.template import ChatTemplate
from mm_plugin.prompt.traced import OWN, TracedText, as_clients

ROLES = ("user", "assistant", "system", "tool", "developer")
Messages = Sequence[Mapping[str, Any]]
ArgumentsForm = Literal["object", "text"]
Render = Callable[[Messages, bool], TracedText]

_MAX_CHARS, _SECONDS = 1 << 20, 1.0  # of one probe
_PROBES = ("quokka", "wombat")  # words that no template writes by itself
_CALL_ID = "abcdef123"  # nine letters and digits, as some templates demand
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}},
                "required": ["place"],
            },
        },
    },
)


class ContentForm(msgspec.Struct, frozen=True):
    """How a template reads the content of one role.

    Attributes:
        text: it writes a content that is a text, once.
        parts: it writes each text of a content that is a list of parts, once.
        seen: it accepts a message of this role at all; where it raises, a request shows what it says.
    """

    text: bool
    parts: bool
    seen: bool = True


class TemplateForms(msgspec.Struct, frozen=True):
    """What a template reads.

    Attributes:
        contents: by role and by whether the request has tools.
        arguments: whether it reads the arguments of tool calls as objects or as JSON text.
    """

    contents: Mapping[tuple[str, bool], ContentForm]
    arguments: ArgumentsForm


def find_forms(template: ChatTemplate, names: Mapping[str, Any]) -> TemplateForms:
    """The forms that a template reads.

    Args:
        template: the template.
        names: what it reads beside messages and tools, such as the special tokens.
    """
    render = _renderer(template, names)
    arguments = _arguments_form(render)
    contents = {
        (role, tools): _content_form(render, role, tools, arguments) for role in ROLES for tools in (False, True)
    }
    return TemplateForms(contents, arguments)


def find_form(template: ChatTemplate, names: Mapping[str, Any], role: str, with_tools: bool) -> ContentForm:
    """The form in which a template reads the contents of one role.

    Args:
        template: the template.
        names: what it reads beside messages and tools.
        role: any role, also one that no other model has.
        with_tools: whether the request has tools.
    """
    return _content_form(_renderer(template, names), role, with_tools, "object")


def _renderer(template: ChatTemplate, names: Mapping[str, Any]) -> Render:
    def render(messages: Messages, with_tools: bool) -> TracedText:
        given = {
            "messages": [traced_message(message) for message in messages],
            "tools": as_clients(list(_TOOLS)) if with_tools else None,
            "documents": None,
            "add_generation_prompt": messages[-1]["role"] != "assistant",
        }
        return template.render({**names, **given}, max_chars=_MAX_CHARS, seconds=_SECONDS)

    return render


# A role is a word of the protocol: a client chooses among these, and writes none of them.
_ROLE_WORDS = frozenset((*ROLES, "function", "model", "ipython", "observation"))


def traced_message(message: Mapping[str, Any]) -> dict[Any, Any]:
    """A message as a template gets it: whatever a client wrote in it is a client's text.

    Args:
        message: as `plain_message` returns it.
    """
    traced: dict[Any, Any] = as_clients(message)
    role = message.get("role")
    if role in _ROLE_WORDS:
        traced["role"] = TracedText.of(role, OWN)
    if isinstance(message.get("content"), list):
        for part, given in zip(traced["content"], message["content"], strict=True):
            part["type"] = TracedText.of(given["type"], OWN)
    return traced


# ---------------------------------------------------------------- contents


def _as_text(first: str, second: str) -> str:
    return f"{first} {second}"


def _as_parts(first: str, second: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": f"{first} "}, {"type": "text", "text": second}]


def _content_form(render: Render, role: str, with_tools: bool, arguments: ArgumentsForm) -> ContentForm:
    """The forms that are good wherever any is, among conversations of several shapes."""
    seen = False
    wins: list[list[bool]] = []
    for form in (_as_text, _as_parts):
        content = form(*_PROBES)
        wins.append([])
        for shape in _shapes(role, content, _call({"place": "Oslo"}, arguments)):
            outcome = _outcome(render, shape, with_tools)
            if not outcome:  # a template may read the other messages as parts alone
                again = _outcome(render, [_filled(part) for part in shape], with_tools)
                outcome = outcome if again is None else again
            wins[-1].append(bool(outcome))
            seen = seen or outcome is not None
    text, parts = wins
    live = [index for index, pair in enumerate(zip(text, parts, strict=True)) if any(pair)]
    by_text, by_parts = sum(text), sum(parts)
    if not live:
        return ContentForm(False, False, seen)
    return ContentForm(by_text == len(live) or by_text >= by_parts, by_parts == len(live) or by_parts > by_text)


def _shapes(role: str, content: Any, tool_call: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Conversations that a message of this role may stand in, the shortest first."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    message = {"role": role, "content": content}
    if role == "user":
        yield [message]
        yield [user, answer, message]
        yield [message, answer, user]
        yield [{"role": "system", "content": "be kind"}, message]
    elif role == "assistant":
        yield [user, message]
        yield [user, message, user]
    elif role == "tool":
        call = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
        result = message | {"tool_call_id": _CALL_ID, "name": "lookup"}
        yield [user, call, result]
        yield [user, call, result, answer, user]
    elif role in ROLES:
        yield [message, user]
        yield [message, user, answer, user]
    else:
        yield [message, user]
        yield [user, message]
        yield [message]


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    """A message that is not probed, as parts."""
    content = message["content"]
    if isinstance(content, list) or _PROBES[0] in content:
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def _outcome(render: Render, messages: Messages, with_tools: bool) -> bool | None:
    """Whether each text is written once and as it is; None if the template raises."""
    try:
        written = render(messages, with_tools)
    except Exception:  # a template rejects messages by raising anything
        return None
    if any(written.count(probe) != 1 for probe in _PROBES):
        return False
    first, second = (written.find(probe) for probe in _PROBES)
    between = written.plain[first + len(_PROBES[0]) : second]
    return between.isspace() or between == ""


# ---------------------------------------------------------------- tool calls


def _arguments_form(render: Render) -> ArgumentsForm:
    """Objects, unless the template raises at them or prints them as Python does, and reads JSON text."""
    values = {"place": _PROBES[0], "near": True}
    if _writes_arguments(render, _call(values, "object")):
        return "object"
    return "text" if _writes_arguments(render, _call(values, "text")) else "object"


def _call(arguments: Mapping[str, Any], form: ArgumentsForm) -> dict[str, Any]:
    given = arguments if form == "object" else json.dumps(arguments)
    return {"type": "function", "id": _CALL_ID, "function": {"name": "lookup", "arguments": given}}


def _writes_arguments(render: Render, call: Mapping[str, Any]) -> bool:
    user = {"role": "user", "content": "hi"}
    result = {"role": "tool", "content": "fine", "tool_call_id": _CALL_ID, "name": "lookup"}
    for shape in ([], [result], [result, {"role": "assistant", "content": "yes"}, user]):
        for content in ({"content": ""}, {}):
            for with_tools in (True, False):
                messages: list[dict[str, Any]] = [user, {"role": "assistant", "tool_calls": [call]} | content, *shape]
                try:
                    written = render(messages, with_tools).plain
                except Exception:  # noqa: S112 - a template rejects messages by raising anything
                    continue
                if _PROBES[0] in written:
                    return f"{{'place': '{_PROBES[0]}'" not in written and f'\\"{_PROBES[0]}' not in written
    return False
