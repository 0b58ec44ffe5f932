"""Chat templates: a conversation to the text of a prompt, in Jinja's sandbox.

A template comes with a checkpoint and is not trusted: it runs without access to attributes of Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flintc.checkpoint.tokenizer_config import find_template, special_tokens
from flintc.errors import TokenizerError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template.

    source: Jinja text. origin: where it comes from, for error messages. special_tokens: names the template may use,
    such as ``bos_token``. TokenizerError where the text is not a template.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.origin = origin
        self._special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"{origin}: not a chat template: {error}") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> str:
        """The prompt that asks for the assistant's answer to ``messages``.

        messages: dicts with ``role`` and ``content``. tools: JSON schemas of functions the model may call. options:
        further variables of the template (``enable_thinking=False``, say). TokenizerError where the template fails.
        """
        variables = {**self._special_tokens, "add_generation_prompt": True, **options}
        try:
            return self._template.render(messages=list(messages), tools=list(tools) or None, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise TokenizerError(f"{self.origin}: the chat template refuses this conversation: {error}") from error


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint folder, ``config`` being its tokenizer_config.json; None where it has none."""
    found = find_template(folder, config)
    if found is None:
        return None
    source, file = found
    return ChatTemplate(source, str(file), special_tokens(config))


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
