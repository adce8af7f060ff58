"""mlx-lm's response generator, which knows what each request asks of its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.server import CompletionRequest, GenerationArguments, ModelProvider, ResponseGenerator

from kvkeep.compaction import require_room
from kvkeep.generation import refuse_unevictable
from kvkeep.server import current
from kvkeep.server.counting import counted, noted
from kvkeep.server.current import Plan
from kvkeep.server.faults import RequestError
from kvkeep.server.logs import log_requests
from kvkeep.server.metrics import Metrics
from kvkeep.server.models import canonical
from kvkeep.server.monitor import Monitor
from kvkeep.server.prompt_cache import ServerPromptCache
from kvkeep.server.settings import KvRequest, ServerSettings
from kvkeep.spec import EvictionConfig

_SYSTEM_ROLES = ("system", "developer")


@dataclass
class PlannedRequest(CompletionRequest):
    """mlx-lm's request, and what it asks of its cache."""

    kv: KvRequest = field(default_factory=KvRequest)


@dataclass
class PlannedArguments(GenerationArguments):
    """mlx-lm's arguments, and what the request asks of its cache."""

    kv: KvRequest = field(default_factory=KvRequest)


class EvictingResponses(ResponseGenerator):
    """A `ResponseGenerator` that plans each request before mlx-lm's loop starts it."""

    prompt_cache: ServerPromptCache  # type: ignore[assignment]  # mlx-lm names its own class

    def __init__(
        self,
        model_provider: ModelProvider,
        prompt_cache: ServerPromptCache,
        settings: ServerSettings,
    ) -> None:
        self.settings = settings  # before mlx-lm starts its thread
        self.monitor = Monitor()
        self.metrics = Metrics(self.monitor)
        log_requests(self.monitor)
        self._alone = False  # whether the request in hand is served outside the batch
        super().__init__(model_provider, prompt_cache)  # type: ignore[arg-type]

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Queue a request; see mlx-lm."""
        kv = request.kv if isinstance(request, PlannedRequest) else KvRequest()
        args = PlannedArguments(**vars(generation_args), kv=kv)
        args.model = canonical(args.model, self.cli_args, self.settings)
        kv.entry.queued()
        context, answer = super().generate(request, args, noted(kv, progress_callback))
        return context, counted(kv, answer)

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()  # a thread's streams left behind abort the process when it ends

    def _is_batchable(self, args: PlannedArguments) -> bool:
        return super()._is_batchable(args) and (
            args.kv.config is None or (args.kv.sees_all_from_replay and self._can_replay())
        )

    def _serve_single(self, request: Any, stream: mx.Stream) -> None:
        self._alone = True
        try:
            super()._serve_single(request, stream)
        finally:
            self._alone = False
            current.put(None)

    def _can_replay(self) -> bool:
        """Whether every layer gives back the window's rows (see `replay_queries`)."""
        model: Any = self.model_provider.model
        return all(type(layer) is KVCache for layer in make_prompt_cache(model))

    def _tokenize(
        self, tokenizer: Any, request: CompletionRequest, args: PlannedArguments
    ) -> tuple[Any, ...]:
        """Tokenize, and leave the request's plan for this thread's next steps.

        Raises:
            RequestError, KvkeepError: what the prompt and the tokenizer show to be wrong.
        """
        current.put(None)
        try:
            made = super()._tokenize(tokenizer, request, args)
        except Exception as error:  # whatever the template or the tokenizer object to
            detail = str(error) or type(error).__name__
            raise RequestError(f"the prompt cannot be put together: {detail}") from error
        prompt, vision = made[0], made[-1]
        _check(prompt, tokenizer, args)
        kv = args.kv
        if kv.config is not None:
            if vision is not None:
                raise RequestError(
                    "prompts with images cannot be evicted",
                    param="kv",
                    remedy='Send {"kv": {"eviction": "none"}}.',
                )
            kv.config = self._for_prompt(kv, tokenizer, request, args, prompt)
        current.put(self._plan(kv, prompt, made[1], made[2]))
        return made

    def _plan(
        self, kv: KvRequest, prompt: list[int], segments: list[list[int]], roles: list[str]
    ) -> Plan:
        """How the prompt cache may serve a tokenized request, and what it keeps of it.

        In a batch the window is read a second time; alone the prefill itself is observed, so
        all tokens that a policy must see have to be left to it.
        """
        plan = Plan(kv, prompt, checkpoint=len(prompt))
        if self._alone and kv.config is not None:
            plan.unread = kv.observed_tokens if kv.sees_all_from_replay else len(prompt)
            plan.compact_unread = len(prompt) if kv.reads_again else kv.observed_tokens
        if kv.config is None:
            return plan
        if self.prompt_cache.keep_compact:
            plan.checkpoint = len(segments[0]) if roles[0] == "system" else 0
        elif self._alone and kv.sees_all_from_replay:
            plan.keep = self._keep_exact(prompt[:-1])
        return plan

    def _keep_exact(self, tokens: list[int]) -> Callable[[list[Any]], None]:
        model_key = self.model_provider.model_key

        def keep(layers: list[Any]) -> None:
            self.prompt_cache.insert(model_key, tokens, layers, role="user")

        return keep

    def _for_prompt(
        self,
        kv: KvRequest,
        tokenizer: Any,
        request: CompletionRequest,
        args: PlannedArguments,
        prompt: list[int],
    ) -> EvictionConfig:
        """The request's config with the system prompt's range; refused where it cannot be."""
        config = kv.config
        assert config is not None
        if self._is_distributed:
            raise RequestError("eviction does not run under mlx.launch", param="kv")
        refuse_unevictable(config, {"kv_bits": self.cli_args.kv_bits})
        if kv.protect_system:
            stop = self._system_stop(tokenizer, request, args, prompt)
            if stop:
                config = replace(config, protect=((0, stop), *config.protect))
        held = len(prompt) - 1
        if held > config.min_tokens:
            require_room(config, held)
        return config

    def _system_stop(
        self,
        tokenizer: Any,
        request: CompletionRequest,
        args: PlannedArguments,
        prompt: list[int],
    ) -> int:
        """Tokens before the first message that is no system message: those, and tool schemas.

        It is where the prompt parts from two others that differ in the first user's words.
        """
        if request.request_type != "chat":
            return 0
        head = []
        for message in request.messages:
            if message.get("role") not in _SYSTEM_ROLES:
                break
            head.append(message)
        if not head and not request.tools:
            return 0
        prompts = [prompt]
        for words in ("a", "b"):
            user = {"role": "user", "content": words}
            other = replace(request, messages=[*copy.deepcopy(head), user])
            prompts.append(super()._tokenize(tokenizer, other, args)[0])
        columns = zip(*prompts, strict=False)
        return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _check(prompt: list[int], tokenizer: Any, args: GenerationArguments) -> None:
    """Refuse what would end mlx-lm's generation thread, and every request with it."""
    if not prompt:
        raise RequestError("empty prompt", param="prompt", expected="at least one token")
    size = tokenizer.vocab_size
    if args.sampling.temperature > 0 and args.sampling.top_k >= size:
        raise RequestError("bad value for top_k", param="top_k", expected=f"less than {size}")
    for token in args.logits.logit_bias or ():
        if not 0 <= token < max(size, len(tokenizer)):
            raise RequestError(
                "bad value for logit_bias",
                param="logit_bias",
                expected=f"token ids from 0 to {size - 1}",
                received=token,
            )
