"""Parts of a model that some policies need: a layer's rotation, its output weights."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from kvkeep.attention.observe import model_name
from kvkeep.attention.rotary import Rotary
from kvkeep.attention.rotated import unrotated_layers
from kvkeep.caches import leaves_of
from kvkeep.errors import UnsupportedModelError
from kvkeep.spec import OutputWeights

_ROPE_NAMES = ("rope", "_rope", "rotary_emb")
_OUTPUT_NAMES = ("o_proj", "out_proj", "wo", "dense", "c_proj", "attn_out")
# Folders of a layer that hold linear maps of those names and are no attention.
_NOT_ATTENTION = ("mlp", "ffn", "feed_forward", "expert", "moe", "router")
# Attention that rotates a part of its channels apart from the rest, whatever comes first.
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")


@dataclass(frozen=True)
class LayerParts:
    """What was found of one layer; None for what was not asked for.

    Attributes:
        rope: its rotation.
        output: (query heads H_q, D_v) -> its output weights by query head.
    """

    rope: Rotary | None = None
    output: Callable[[int, int], OutputWeights] | None = None


def find_parts(
    model: Any, cache: list[Any], layers: list[int], needs: Set[str], policy: str
) -> dict[int, LayerParts]:
    """What a policy needs of these layers' modules; nothing where it needs none.

    Args:
        cache: mlx-lm's cache list, one entry per layer.
        layers: indices among its leaves.
        needs: of the policy: "rope" and "output_weights" count here.
        policy: named in refusals.

    Raises:
        UnsupportedModelError: the model has no such part in the place where mlx-lm's models
            have it, several, or a rotation that is none.
    """
    if not {"rope", "output_weights"} & needs:
        return {}
    blocks = _layers_of(model)
    if len(blocks) != len(cache):
        _refuse(model, policy, f"it has {len(blocks)} layers and {len(cache)} caches")
    places = [place for place, layer in enumerate(cache) for _ in leaves_of([layer])]
    found = {}
    for index in layers:
        block = blocks[places[index]]

        def refuse(reason: str, index: int = index) -> NoReturn:
            _refuse(model, policy, reason, f"layer {places[index]} of model {model_name(model)!r}")

        rope = _rope_of(block, refuse) if "rope" in needs else None
        output = _output_of(block, refuse) if "output_weights" in needs else None
        found[index] = LayerParts(rope, output)
    turning = [i for i, part in found.items() if part.rope is not None and not part.rope.idle]
    if turning and (others := unrotated_layers(model, turning)):
        _refuse(
            model,
            policy,
            f"queries that are no plain rotation in {len(others)} of {len(layers)} layers",
        )
    return found


def _layers_of(model: Any) -> list[Any]:
    inner = getattr(model, "language_model", None)
    for owner in (model, getattr(model, "model", None), inner, getattr(inner, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, list | tuple) and layers:
            return list(layers)
    return []


def _rope_of(block: nn.Module, refuse: Callable[[str], NoReturn]) -> Rotary:
    named = {
        path: module
        for path, module in block.named_modules()
        if path.rpartition(".")[2] in _ROPE_NAMES
    }
    if len({id(module) for module in named.values()}) != 1:
        refuse(f"{len(named) or 'no'} modules named {' or '.join(_ROPE_NAMES)}")
    path, rope = next(iter(named.items()))
    owner = dict(block.named_modules())[path.rpartition(".")[0]]
    if any(hasattr(owner, name) for name in _LATENT):
        refuse("it rotates a part of its channels apart from the rest")
    return Rotary(rope, refuse)


def _output_of(
    block: nn.Module, refuse: Callable[[str], NoReturn]
) -> Callable[[int, int], OutputWeights]:
    found = []
    for path, module in block.named_modules():
        folder, _, name = path.rpartition(".")
        if name in _OUTPUT_NAMES and not any(other in folder for other in _NOT_ATTENTION):
            found.append(module)
    if len(found) != 1:
        refuse(f"{len(found) or 'no'} output projections named {', '.join(_OUTPUT_NAMES)}")
    return lambda heads, dim: _by_head(found[0], heads, dim, refuse)


def _by_head(module: Any, heads: int, dim: int, refuse: Callable[[str], NoReturn]) -> OutputWeights:
    width = heads * dim
    if isinstance(module, nn.Linear):
        if module.weight.shape[1] != width:
            refuse(f"an output projection of {module.weight.shape[1]} channels, not {width}")
        weight = module.weight
        return lambda head: weight[:, head * dim : (head + 1) * dim].T.astype(mx.float32)
    if isinstance(module, nn.QuantizedLinear):
        if module.weight.shape[1] * 32 // module.bits != width:
            refuse(f"a quantised output projection of other than {width} channels")
        return lambda head: _dequantised(module, head * dim, (head + 1) * dim).T
    return lambda head: _applied(module, head, heads, dim, refuse)


def _dequantised(module: nn.QuantizedLinear, start: int, stop: int) -> mx.array:
    """Columns [start, stop) of a quantised weight: [hidden, stop - start] float32."""
    size, bits = module.group_size, module.bits
    first, last = start // size, -(-stop // size)
    biases = module.get("biases")
    columns = mx.dequantize(
        module.weight[:, first * size * bits // 32 : last * size * bits // 32],
        scales=module.scales[:, first:last],
        biases=None if biases is None else biases[:, first:last],
        group_size=size,
        bits=bits,
        mode=getattr(module, "mode", "affine"),
    )
    return columns[:, start - first * size : stop - first * size].astype(mx.float32)


def _applied(
    module: Any, head: int, heads: int, dim: int, refuse: Callable[[str], NoReturn]
) -> mx.array:
    """What a linear map of any kind makes of one head's channels, less its bias."""
    axes = mx.pad(mx.eye(dim), [(0, 1), (head * dim, (heads - 1 - head) * dim)])
    try:
        out = module(axes[None])[0].astype(mx.float32)
    except ValueError as error:
        refuse(f"an output projection that does not take {heads * dim} channels ({error})")
    return out[:-1] - out[-1:]


def _refuse(model: Any, policy: str, reason: str, where: str | None = None) -> NoReturn:
    raise UnsupportedModelError(
        f"policy {policy!r} cannot find what it needs in {where or f'model {model_name(model)!r}'}",
        expected="a rotary embedding or output projection as mlx-lm's llama has it",
        received=reason,
        remedy="Use a policy that needs neither (`kvkeep policies` says what each needs).",
    )
