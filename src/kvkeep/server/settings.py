"""What the server was started with, and what one request asks of its cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvkeep.allocation import ALLOCATION_OPTIONS, allocation_of
from kvkeep.choosing import require_compatible
from kvkeep.errors import ConfigError
from kvkeep.evictable import sees_all_from_replay
from kvkeep.generation import SERVED
from kvkeep.policies import POLICY_OPTIONS, policy_of
from kvkeep.server.faults import RequestError
from kvkeep.server.monitor import Entry
from kvkeep.spec import EvictionConfig

EVICTION_OFF = "none"
PROTECT_SYSTEM = "system"
_POLICY_NAMES = ("eviction", "policy")
# A file of the server's machine is for its owner to name.
_OWNERS = frozenset({"head_profile"})
# Sizes of windows, kernels and loops: a client must not order work without bound.
_MOST = 65536
_BOUNDED = frozenset(
    {"window", "pool_kernel", "chunk_size", "lag", "n_future", "beta", "max_groups"}
    | {"score_chunk_size"}
)


@dataclass(frozen=True)
class ServerSettings:
    """What the server adds to mlx_lm.server's flags.

    Attributes:
        config: what a request's `kv` object changes.
        evicting: whether requests without one are evicted.
        protect_system: whether `config` protects the system prompt and tool schemas.
        model: --model as the user spelled it; mlx-lm is given the folder that it means.
        allow_model_paths: whether requests may name other models and adapters.
        api_key: what clients must send, or None.
        max_body_bytes: longest request body.
        keep_compact: whether the prompt cache keeps compact caches, too.
        kv_memory: bytes that live caches and prompt cache may take together, or None.
        kv_memory_shrink: lower an evicted request's budget before it is refused.
        kv_queue_seconds: how long a request waits for memory.
        drain_seconds: how long live requests may go on after SIGTERM.
        log_json: whether log lines are JSON.
    """

    config: EvictionConfig = SERVED
    evicting: bool = False
    protect_system: bool = False
    model: str | None = None
    allow_model_paths: bool = False
    api_key: str | None = None
    max_body_bytes: int = 64 * 2**20
    keep_compact: bool = False
    kv_memory: int | None = None
    kv_memory_shrink: bool = False
    kv_queue_seconds: float = 30.0
    drain_seconds: float = 30.0
    log_json: bool = False


@dataclass
class KvRequest:
    """What a request asks of its cache, and what became of it.

    The generation thread fills in `report` or `failure` before the first token is sent.

    Attributes:
        config: what to evict; None is exact.
        protect_system: also protect the system prompt and tool schemas.
        reported: whether the answer has a `usage.kv`.
        report: `usage.kv`.
        failure: why it cannot be answered.
        shrunk_from: the budget that was asked, where memory allowed a lower one only.
        admitted: there is memory for it.
        ended: nobody waits for its answer any more.
        is_there: whether the client still is.
        seen: when it was looked at last, monotonic seconds.
        entry: its numbers in the monitor.
    """

    config: EvictionConfig | None = None
    protect_system: bool = False
    reported: bool = False
    report: dict[str, Any] | None = None
    failure: Exception | None = None
    shrunk_from: str | None = None
    admitted: bool = False
    ended: bool = False
    is_there: Callable[[], bool] = field(default=lambda: True, compare=False)
    seen: float = 0.0
    entry: Entry = field(default_factory=Entry, compare=False)

    @property
    def observed_tokens(self) -> int:
        """Tokens at the prompt's end that a compacting prefill must run itself: W and one."""
        if self.config is None:
            return 1
        window = policy_of(self.config).observation_window
        return 1 + max(window, allocation_of(self.config).window)

    @property
    def reads_again(self) -> bool:
        """Whether the policy reads all tokens a second time, which compact rows do not allow."""
        return self.config is not None and "replay" in policy_of(self.config).needs

    @property
    def sees_all_from_replay(self) -> bool:
        """Whether the cache can be compacted after an unobserved prefill."""
        return self.config is None or sees_all_from_replay(policy_of(self.config))


def parse_kv(value: object, settings: ServerSettings) -> KvRequest:
    """Read a body's `kv` object over the server's defaults.

    `eviction` (or `policy`) names the policy, and "none" switches eviction off; the other
    fields are those of `EvictionConfig`. A field set on a server that does not evict
    switches eviction on for the request. Options of the server's policy (or allocation) are
    not those of another that the request names.

    Raises:
        RequestError: a field is unknown or out of range; `param` names it.
    """
    if value is None:
        on = settings.evicting
        config = settings.config if on else None
        return KvRequest(config, on and settings.protect_system, reported=on)
    if not isinstance(value, Mapping):
        raise RequestError(
            "bad value for kv", param="kv", expected="an object", received=type(value).__name__
        )
    fields = {name: v for name, v in value.items() if v is not None}
    named = [name for name in _POLICY_NAMES if name in fields]
    if len(named) > 1:
        raise RequestError("eviction and policy mean the same", param="kv.policy")
    where = f"kv.{(named or ['policy'])[0]}"
    policy = fields.pop(named[0]) if named else None
    system = settings.protect_system
    if "protect" in fields:
        system = fields["protect"] == PROTECT_SYSTEM
        if system:
            fields["protect"] = ()
    config = settings.config
    if policy not in (None, config.policy):
        config = replace(config, **dict.fromkeys(POLICY_OPTIONS))
    if fields.get("allocation") not in (None, config.allocation):
        config = replace(config, **dict.fromkeys(ALLOCATION_OPTIONS))
    for name, setting in fields.items():
        config = _changed(config, name, setting)
    if policy == EVICTION_OFF or (policy is None and not fields and not settings.evicting):
        return KvRequest(reported=True)
    if policy is not None:
        config = _changed(config, named[0], policy)
    scorer = _checked(where, lambda: policy_of(config))
    allocation = _checked("kv.allocation", lambda: allocation_of(config))
    _checked("kv", lambda: require_compatible(config, scorer, allocation))
    return KvRequest(config, system, reported=True)


def _changed(config: EvictionConfig, name: str, value: Any) -> EvictionConfig:
    where, spelled = f"kv.{name}", name.replace("-", "_")
    if spelled in _OWNERS:
        raise RequestError(f"{name} is set by the server's flags only", param=where, status=403)
    huge = spelled in _BOUNDED and isinstance(value, int) and value > _MOST
    if huge:
        raise RequestError(
            f"bad value for {name}", param=where, expected=f"at most {_MOST}", received=value
        )
    if name in _POLICY_NAMES:
        spelled = "policy"
    return _checked(where, lambda: EvictionConfig.parse({spelled: value}, config))


def _checked(where: str, make: Any) -> Any:
    try:
        return make()
    except ConfigError as error:
        raise RequestError(
            error.problem,
            param=where,
            expected=error.expected,
            received=error.received,
            remedy=error.remedy,
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"bad value for {where}", param=where, received=str(error)) from error
