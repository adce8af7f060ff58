"""From an example to text in the chat template, and to the tokens of each part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from kvkeep.errors import ConfigError
from kvkeep.evaluation.examples import GAP, Example
from kvkeep.evaluation.tasks import Task, example_of
from kvkeep.haystack import Haystack

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # in no document: where a part ends
_SLACK = 64  # tokens to begin with for the template and the question


@dataclass(frozen=True)
class Rendered:
    """An example's text, part by part; put together they are what a model reads.

    Attributes:
        context: the template's head, instruction and document.
        asks: per turn, all from the end of what was read to where the answer begins: of
            the first turn the question, the template's tail and the answer's prefix; of a later
            one also the right answer to the turn before.
        templated: whether a chat template wrote it, special tokens included.
    """

    context: str
    asks: tuple[str, ...]
    templated: bool

    @property
    def prompt(self) -> str:
        """What is read before the first answer."""
        return self.context + self.asks[0]


@dataclass(frozen=True)
class Tokens:
    """An example's token ids.

    Attributes:
        prompts: per turn, all that stands before its answer; at least 2 tokens.
        context: how many of them the document takes (what agnostic settings compress).
        ends: per turn, how many tokens a cache may hold when the turn is read: all that the
            next turn begins with as well, and at most all but the last.
    """

    prompts: tuple[tuple[int, ...], ...]
    context: int
    ends: tuple[int, ...]


def render(tokenizer: Any, example: Example) -> Rendered:
    """Write an example in the tokenizer's chat template, or as plain text if it has none.

    Later turns see the right answers to earlier ones, so that every setting is asked the
    same text and one wrong answer does not spoil the next turn.

    Raises:
        ConfigError: the template refuses the messages or leaves parts of them out.
    """
    templated = bool(getattr(tokenizer, "has_chat_template", False))
    first = example.turns[0]
    question = GAP + first.question if first.question else ""
    messages = [{"role": "user", "content": f"{example.context}{_MARK}{question}"}]
    context, tail = _written(tokenizer, messages, templated)
    asks = [tail + first.answer_prefix]
    for before, turn in pairwise(example.turns):
        # Only what follows the answer matters; what stands before it is written already.
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": turn.question},
        ]
        tail = _written(tokenizer, messages, templated)[1]
        asks.append(f"{before.gold}{tail}{turn.answer_prefix}")
    return Rendered(context, tuple(asks), templated)


def tokenize(tokenizer: Any, rendered: Rendered) -> Tokens:
    """Token ids of each turn's prompt, each encoded as one text.

    Raises:
        ConfigError: the tokenizer does not give a text the tokens of its beginning.
    """
    prompts, text = [], rendered.context
    for ask in rendered.asks:
        text += ask
        prompts.append(tuple(encode(tokenizer, text, rendered.templated)))
    document = encode(tokenizer, rendered.context, rendered.templated)
    # A token that joins the document's end and the question's start is the question's.
    context = same_start(document, prompts[0])
    ends = [
        min(same_start(prompt, later), len(prompt) - 1)
        for prompt, later in zip(prompts, [*prompts[1:], prompts[-1]], strict=True)
    ]
    starts = [1, context, *ends]
    if context < 1 or starts != sorted(starts):
        raise ConfigError(
            "the tokenizer does not keep a prompt's parts apart",
            expected="tokens of the document, then those of each question",
            received=f"parts that end at tokens {starts[1:]}",
        )
    return Tokens(tuple(prompts), context, tuple(ends))


def fitted(
    tokenizer: Any,
    task: Task,
    index: int,
    *,
    length: int,
    seed: int = 0,
    prose: Haystack | None = None,
) -> Example:
    """An example whose rendered first prompt has at most `length` tokens, and hardly fewer.

    Raises:
        ConfigError: `length` has no room for the task.
    """

    def count_tokens(text: str) -> int:
        return len(encode(tokenizer, text, True))

    n_tokens = max(length - _SLACK, 1)
    for _ in range(8):
        example = example_of(
            task,
            index,
            length=length,
            n_tokens=n_tokens,
            count_tokens=count_tokens,
            seed=seed,
            prose=prose,
        )
        rendered = render(tokenizer, example)
        around = len(encode(tokenizer, rendered.prompt, rendered.templated))
        around -= count_tokens(example.document)
        best = length - around
        if best == n_tokens:
            return example
        n_tokens, before = best, n_tokens
        if n_tokens < 1:
            break
        if before <= n_tokens <= before + 2:  # tokens that join or not at the borders
            return example
    raise ConfigError(
        f"{length} tokens are too few for task {task.name!r}",
        expected="room for the template, the question and a document",
        received=f"{length} tokens",
        remedy="Ask for a longer prompt.",
    )


def encode(tokenizer: Any, text: str, templated: bool) -> list[int]:
    """Token ids; special tokens are added only where no template wrote them."""
    return list(tokenizer.encode(text, add_special_tokens=not templated))


def same_start(first: list[int] | tuple[int, ...], second: list[int] | tuple[int, ...]) -> int:
    """How many tokens two texts have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _written(tokenizer: Any, messages: list[dict[str, str]], templated: bool) -> tuple[str, str]:
    """The messages' text before and after the mark, up to where the answer begins."""
    if not templated:
        parts = [f"{message['content']}\n" for message in messages]
        text = "".join(parts)
    else:
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise ConfigError(
                "the chat template refuses the messages", received=str(error)
            ) from error
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise ConfigError(
            "the chat template does not write messages as they are",
            expected="each message once",
            received=f"{text.count(_MARK)} marks",
        )
    return before, after
