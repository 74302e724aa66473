"""The signature of Trainer with all keys, for `help(Trainer)` and for completion in notebooks and editors."""

from __future__ import annotations

import inspect
from typing import Any

from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.leaves import all_leaves

OVERRIDES = "overrides"
TAG = "name"  # of the algorithm; as a keyword it would not say of what


class KeySignature:
    """A class attribute: the signature of `__init__`, with a keyword for every key before `**overrides`. It is made
    when it is first asked for. A subclass with arguments of its own has no such attribute.

    Keys are leaf names, of all choices together, and the names of the choices themselves (`algorithm="grpo"`).
    """

    def __init__(self) -> None:
        self._made: inspect.Signature | None = None

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        kinds = inspect.Parameter
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        if OVERRIDES not in (parameter.name for parameter in parameters):
            raise AttributeError("__signature__")
        if self._made is None:
            own = [parameter for parameter in parameters if parameter.kind is not kinds.VAR_KEYWORD]
            rest = [parameter for parameter in parameters if parameter not in own]  # keys by their paths
            taken = {parameter.name for parameter in own} | {TAG}
            keys = {section: (choice.default, str) for section, choice in CHOICES.items() if choice.tag}
            keys |= {leaf.key.name: (leaf.key.default, leaf.key.type) for leaf in all_leaves()}
            more = [
                kinds(name, kinds.KEYWORD_ONLY, default=default, annotation=kind)
                for name, (default, kind) in sorted(keys.items())
                if name not in taken
            ]
            self._made = inspect.Signature([*own, *more, *rest])
        return self._made
