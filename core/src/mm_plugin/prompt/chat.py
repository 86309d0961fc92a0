"""Chat messages -> the text that a checkpoint's chat template writes of them, each in the form that it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from mm_plugin.errors import LimitError, RequestError, UsageError
from mm_plugin.foreign import is_interruption, words
from mm_plugin.prompt.forms import ContentForm, TemplateForms, find_form, find_forms, traced_message
from mm_plugin.prompt.template import ChatTemplate, RenderingTooLong
from mm_plugin.prompt.traced import END, OWN, TextTooLong, TracedText, as_clients
from mm_plugin.settings import Settings

# Names under which templates read what a model thought before it answered, in the order in which transformers looks.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Transformers writes it after an answer that is continued, so templates see the same text here.
_END_OF_ANSWER = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat template reads beside the messages.

    Attributes:
        tools: descriptions of the tools that the model may call, as in the OpenAI API; None for none.
        documents: texts that the model may refer to; None for none.
        chat_template: name of the template, for checkpoints that have several; None for the default.
        continue_final_message: whether the last message is an answer that the model continues; None continues an assistant's.
    """

    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None


class ChatRenderer:
    """Renders chat messages. Final; safe to use from several threads.

    Args:
        tokenizer: as transformers opens it; templates read its special tokens.
        templates: the chat templates of the checkpoint by name, the one without a name as `default`; or why they cannot be read.
        settings: limits of a rendering.

    Example:
        >>> from types import SimpleNamespace
        >>> from mm_plugin import Settings
        >>> templates = {"default": "{% for message in messages %}[{{ message.role + '] ' + message.content }}{% endfor %}"}
        >>> chat = ChatRenderer(SimpleNamespace(special_tokens_map={}), templates, Settings())
        >>> parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        >>> str(chat.render([{"role": "user", "content": parts}], ChatArguments()))
        '[user] ab'
    """

    def __init__(self, tokenizer: Any, templates: Mapping[str, str] | UsageError, settings: Settings) -> None:
        self._settings = settings
        self._unreadable = templates if isinstance(templates, UsageError) else None
        self._names = {
            name: TracedText.of(str(token), OWN)
            for name, token in getattr(tokenizer, "special_tokens_map", {}).items()
            if isinstance(token, str)
        }
        self._templates: dict[str, ChatTemplate] = {}
        self._forms: dict[str, TemplateForms] = {}
        self._faults: dict[str, str] = {}
        for name, source in {}.items() if isinstance(templates, UsageError) else templates.items():
            try:
                self._templates[name] = ChatTemplate(source)
                self._forms[name] = find_forms(self._templates[name], self._names)
            except (jinja2.TemplateSyntaxError, RecursionError, TypeError) as error:
                self._faults[name] = f"{type(error).__name__}: {error}"

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: ChatArguments) -> TracedText:
        """The text that the template writes, and who wrote which character of it.

        Args:
            messages: as `plain_message` returns them.
            arguments: what the template reads beside them.

        Raises:
            RequestError: the template raises, or does not read such messages.
            LimitError: the text is too long, or the template takes too long.
            UsageError: the checkpoint has no such template, or a broken one.
        """
        name = self._chosen(arguments)
        found = {message["role"]: self._form(name, message["role"], bool(arguments.tools)) for message in messages}
        shaped = [_shaped(message, index, found, self._forms[name]) for index, message in enumerate(messages)]
        continued = _is_continued(messages, arguments)
        traced = [_with_reasoning(traced_message(message)) for message in shaped]
        given = {
            **self._names,
            "messages": _ended(traced) if continued else traced,
            "tools": as_clients(arguments.tools),
            "documents": as_clients(arguments.documents),
            "add_generation_prompt": not continued,
        }
        text = self._rendered(self._templates[name], given)
        return _before_end(text) if continued else text

    def _form(self, name: str, role: str, with_tools: bool) -> ContentForm:
        """How a template reads a role, found for this request if it is one that few models have."""
        known = self._forms[name].contents.get((role, with_tools))
        return known or find_form(self._templates[name], self._names, role, with_tools)

    def _rendered(self, template: ChatTemplate, names: Mapping[str, Any]) -> TracedText:
        limits = self._settings
        try:
            return template.render(names, max_chars=limits.max_rendered_chars, seconds=limits.render_seconds)
        except TextTooLong as error:
            raise LimitError.exceeded(
                "characters of rendered messages",
                path="messages",
                setting="max_rendered_chars",
                limit=limits.max_rendered_chars,
                value=None,
            ) from error
        except RenderingTooLong as error:
            raise LimitError.exceeded(
                "seconds in the chat template",
                path="messages",
                setting="render_seconds",
                limit=limits.render_seconds,
                value=None,
            ) from error
        except BaseException as error:
            if is_interruption(error):
                raise
            # The template is the checkpoint's, the messages are the client's; a template rejects messages by raising.
            said = words(error).replace(TracedText.__name__, "str")
            raise RequestError(f"messages: the chat template rejected them ({said})", path="messages") from error

    def _chosen(self, arguments: ChatArguments) -> str:
        """The name of the template, as transformers chooses it.

        Raises:
            UsageError: there is no such template, or it is broken.
        """
        if self._unreadable is not None:
            raise UsageError(self._unreadable.message, argument="checkpoint")
        known = sorted({*self._templates, *self._faults})
        name = arguments.chat_template
        if name is not None and name not in known:
            raise UsageError(
                f"chat_template={name!r} is not a chat template of the checkpoint, which has {', '.join(known) or 'none'}",
                argument="chat_template",
            )
        if name is None:
            name = "tool_use" if arguments.tools is not None and "tool_use" in known else "default"
        if name in self._faults:
            raise UsageError(
                f"checkpoint: its chat template {name!r} cannot be read ({self._faults[name]}); correct it, or send the prompt "
                "as text or ids",
                argument="checkpoint",
            )
        if name not in known:
            fix = f"choose one with chat_template: {', '.join(known)}" if known else "send the prompt as text or ids"
            have = "no default among several" if known else "none"
            raise UsageError(
                f"checkpoint: expected a chat template, found {have}; {fix}",
                argument="chat_template" if known else "checkpoint",
            )
        return name


# ---------------------------------------------------------------- the form that a template reads


def _shaped(
    message: Mapping[str, Any], index: int, found: Mapping[str, ContentForm], forms: TemplateForms
) -> dict[str, Any]:
    """A message with content and tool calls in the form that the template reads."""
    shaped = {**message}
    if "content" in message:
        shaped["content"] = _shaped_content(message, index, found[message["role"]])
    if isinstance(message.get("tool_calls"), list):
        shaped["tool_calls"] = [_shaped_call(call, forms) for call in message["tool_calls"]]
    return shaped


def _shaped_content(message: Mapping[str, Any], index: int, form: ContentForm) -> Any:
    content, role = message["content"], message["role"]
    if not form.seen:
        return content  # the template raises, and says itself what it rejects
    if isinstance(content, str):
        if form.text or not form.parts:
            return _readable(content, form.text, index, role)
        return [{"type": "text", "text": content}]
    if form.parts or not (form.text or any(part["type"] == "text" for part in content)):
        return content
    if all(part["type"] == "text" for part in content):
        return _readable("".join(part["text"] for part in content), form.text, index, role)
    raise RequestError(
        f"messages[{index}].content: the checkpoint's chat template reads messages of role {role[:32]!r} as text alone, so it "
        "cannot place media inputs in them; send the prompt as text with placeholders",
        path=f"messages[{index}].content",
    )


def _readable(content: str, is_read: bool, index: int, role: str) -> str:
    if not is_read and content:
        raise RequestError(
            f"messages[{index}]: the checkpoint's chat template does not write the content of messages of role {role[:32]!r}, so "
            "the model would not see it; send it in a message of another role",
            path=f"messages[{index}]",
        )
    return content


def _shaped_call(call: Any, forms: TemplateForms) -> Any:
    """A tool call whose arguments are an object, or JSON text for templates that read text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if forms.arguments == "text":
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object that a JSON text describes; the text itself where it describes none."""
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _with_reasoning(message: dict[Any, Any]) -> dict[Any, Any]:
    """The message with what was thought under each name that templates read it by."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


# ---------------------------------------------------------------- an answer that is continued


def _is_continued(messages: Sequence[Mapping[str, Any]], arguments: ChatArguments) -> bool:
    last = messages[-1]
    content = last.get("content")
    text = isinstance(content, str) or any(part["type"] == "text" for part in content or ())
    if arguments.continue_final_message is None:
        return last["role"] == "assistant" and text and not last.get("tool_calls")
    if arguments.continue_final_message and not text:
        raise RequestError(
            f"messages[{len(messages) - 1}]: expected a message with text, which the model continues", path="messages"
        )
    return arguments.continue_final_message


def _ended(messages: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The messages with a mark after the last text."""
    last = dict(messages[-1])
    end = TracedText.of(_END_OF_ANSWER, END)
    if isinstance(last["content"], str):
        last["content"] = last["content"] + end
    else:
        parts = [dict(part) for part in last["content"]]
        part = next(part for part in reversed(parts) if "text" in part)
        part["text"] = part["text"] + end
        last["content"] = parts
    return [*messages[:-1], last]


def _before_end(text: TracedText) -> TracedText:
    """What the template wrote up to the end of the answer."""
    place = text.origins.rfind(END)
    start = text.plain.rfind(_END_OF_ANSWER.strip(), 0, place + 1)
    if place < 0 or start < 0 or text.origins[start : start + 1] != END:
        raise RequestError(
            "messages: the chat template does not write the last message to its end, so the model cannot continue it; pass "
            "continue_final_message=False",
            path="messages",
        )
    whole = text.origins.count(END, start) == len(_END_OF_ANSWER)
    return text[:start] if whole else text[:start].rstrip()
