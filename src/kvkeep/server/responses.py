"""mlx-lm's response generator, which knows what each request asks of its cache."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    ModelDescription,
    ModelProvider,
    ResponseGenerator,
)

from kvkeep.attention import batch_fault
from kvkeep.caches import allocated_nbytes, leaves_of
from kvkeep.evictable import require_room
from kvkeep.footprint import measure_footprint
from kvkeep.generation import refuse_unevictable
from kvkeep.server import current
from kvkeep.server.admission import Admission
from kvkeep.server.counting import counted, noted
from kvkeep.server.current import Plan
from kvkeep.server.faults import ClientGone, RequestError
from kvkeep.server.governor import Estimate, MemoryGovernor
from kvkeep.server.logs import log_requests
from kvkeep.server.metrics import Metrics
from kvkeep.server.models import canonical
from kvkeep.server.monitor import Monitor
from kvkeep.server.prompt_cache import ServerPromptCache
from kvkeep.server.settings import KvRequest, ServerSettings
from kvkeep.spec import EvictionConfig

_POLL = 0.25  # seconds between two looks at whether a client is there
_SYSTEM_ROLES = ("system", "developer")


@dataclass
class PlannedRequest(CompletionRequest):
    """mlx-lm's request, and what it asks of its cache."""

    kv: KvRequest = field(default_factory=KvRequest)


@dataclass
class PlannedArguments(GenerationArguments):
    """mlx-lm's arguments, and what the request asks of its cache.

    Attributes:
        ready: the tokenized request and its plan, where they were made ahead of its turn.
    """

    kv: KvRequest = field(default_factory=KvRequest)
    ready: tuple[tuple[Any, ...], Plan] | None = None


class _Asking(threading.local):
    """What an HTTP thread is asking for."""

    kv: KvRequest
    started = False


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
        self.governor = MemoryGovernor(
            settings.kv_memory,
            prompt_cache,
            shrink=settings.kv_memory_shrink,
            max_store_nbytes=prompt_cache.max_nbytes,
        )
        self.admission = Admission(
            self.governor, self._taken, self._plan_ahead, settings.kv_queue_seconds
        )
        self._measured: tuple[Any, Estimate] | None = None
        self._asking = _Asking()
        super().__init__(model_provider, prompt_cache)  # type: ignore[arg-type]

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Queue a request; see mlx-lm.

        Raises:
            ClientGone: nobody waits for it any more.
        """
        kv = request.kv if isinstance(request, PlannedRequest) else KvRequest()
        args = PlannedArguments(**vars(generation_args), kv=kv)
        args.model = canonical(args.model, self.cli_args, self.settings)
        kv.entry.queued()
        self._asking.kv, self._asking.started = kv, False
        context, answer = super().generate(request, args, noted(kv, progress_callback))
        self._asking.started = True
        if kv.ended:
            context.stop()
            raise ClientGone
        return context, counted(kv, answer)

    def _await_response(self, response_queue: Queue[Any]) -> Any:
        """The next response, for as long as the client is there.

        Before a request is taken up nothing can stop it but its own mark, so that its
        context is waited for; afterwards mlx-lm stops it when this raises.
        """
        kv: KvRequest = self._asking.kv
        while True:
            with contextlib.suppress(Empty):
                response = response_queue.get(timeout=_POLL)
                self._look(kv)
                return response
            if not self.generation_available():
                raise RuntimeError("generation thread died")
            self._look(kv)

    def _look(self, kv: KvRequest) -> None:
        """Note a client that has gone; not at every token."""
        now = time.monotonic()
        if now - kv.seen < _POLL:
            return
        kv.seen = now
        if not kv.ended and not kv.is_there():
            kv.ended = True
        if kv.ended and self._asking.started:
            raise ClientGone

    def _next_request(self, timeout: float | None = None) -> Any:
        if self._is_distributed:
            return super()._next_request(timeout)
        return self.admission.next(timeout)

    def _taken(self, timeout: float | None) -> Any:
        return super()._next_request(timeout)

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()  # a thread's streams left behind abort the process when it ends

    def _is_batchable(self, args: PlannedArguments) -> bool:
        return super()._is_batchable(args) and (
            args.kv.config is None or (args.kv.sees_all_from_replay and self._can_replay())
        )

    def _serve_single(self, request: Any, stream: mx.Stream) -> None:
        try:
            super()._serve_single(request, stream)
        finally:
            if (plan := current.take()) is not None:
                self.governor.release(plan)
            self.governor.note(0, 0)

    def _can_replay(self) -> bool:
        """Whether every layer gives back the window's rows (see `replay_queries`), and
        evicted requests can share a batch."""
        model: Any = self.model_provider.model
        leaves = leaves_of(make_prompt_cache(model))
        return batch_fault(model) is None and all(type(leaf) is KVCache for leaf in leaves)

    def _tokenize(
        self, tokenizer: Any, request: CompletionRequest, args: PlannedArguments
    ) -> tuple[Any, ...]:
        """Tokenize, and leave the request's plan for this thread's next steps.

        Raises:
            RequestError, KvkeepError: what the prompt and the tokenizer show to be wrong.
            ClientGone: nobody waits for it any more.
        """
        current.put(None)
        if args.kv.ended:
            raise ClientGone
        made, plan = args.ready or self._made(tokenizer, request, args)
        args.ready = None
        if not args.kv.admitted and self.governor.limit is not None:
            # Its model was loaded just now: nothing else is live, so that waiting is no use.
            if not self.governor.admit(plan, self._estimate()):
                raise self.governor.busy(0.0)
            args.kv.admitted = True
        current.put(plan)
        return made

    def _made(
        self, tokenizer: Any, request: CompletionRequest, args: PlannedArguments
    ) -> tuple[tuple[Any, ...], Plan]:
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
        alone = vision is not None or not self._is_batchable(args)
        plan = self._plan(args, made, alone)
        plan.stop = frozenset(tokenizer.eos_token_ids)
        return made, plan

    def _plan_ahead(
        self, request: CompletionRequest, args: PlannedArguments
    ) -> tuple[Plan, Estimate] | None:
        """Plan a request before its turn, where its model is the one that is loaded."""
        if not self._is_loaded(args.model):
            return None
        if args.ready is None:
            args.ready = self._made(self.model_provider.tokenizer, request, args)
        plan = args.ready[1]
        if args.ready[0][-1] is None:  # images have cache keys of their own
            key = self.model_provider.model_key
            plan.expected = self.prompt_cache.look_up(key, plan.prompt, plan)
        return plan, self._estimate()

    def _is_loaded(self, asked: ModelDescription) -> bool:
        provider: Any = self.model_provider
        key = (
            provider._model_map.get(asked.model, asked.model),
            provider._adapter_map.get(asked.model, asked.adapter),
            provider._draft_model_map.get(asked.draft, asked.draft),
        )
        return provider.model_key == key

    def _estimate(self) -> Estimate:
        """What the loaded model's caches cost; measured once."""
        provider: Any = self.model_provider
        if self._measured is None or self._measured[0] != provider.model_key:
            draft = provider.draft_model
            estimate = Estimate(
                measure_footprint(provider.model),
                self.cli_args.prefill_step_size,
                None if draft is None else measure_footprint(draft),
            )
            self._measured = (provider.model_key, estimate)
        return self._measured[1]

    def _plan(self, args: PlannedArguments, made: tuple[Any, ...], alone: bool) -> Plan:
        """How the prompt cache may serve a tokenized request, and what it keeps of it.

        In a batch the window is read a second time; alone the prefill itself is observed, so
        all tokens that a policy must see have to be left to it.
        """
        prompt, segments, roles = made[:3]
        kv = args.kv
        plan = Plan(kv, prompt, args.max_tokens, checkpoint=len(prompt), governor=self.governor)
        if alone and kv.config is not None:
            plan.unread = kv.observed_tokens if kv.sees_all_from_replay else len(prompt)
            plan.compact_unread = len(prompt) if kv.reads_again else kv.observed_tokens
        if kv.config is None:
            return plan
        plan.keep_compact = self.prompt_cache.keep_compact
        if plan.keep_compact:
            plan.checkpoint = len(segments[0]) if roles[0] == "system" else 0
        elif alone and kv.sees_all_from_replay:
            plan.keep = self._keep_exact(prompt[:-1])
        return plan

    def _keep_exact(self, tokens: list[int]) -> Callable[[list[Any]], None]:
        model_key = self.model_provider.model_key

        def keep(layers: list[Any]) -> None:
            if self.governor.has_room_for(allocated_nbytes(layers)):
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
