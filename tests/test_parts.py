"""Finding a layer's rotation and output weights, and refusing by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from bare_models import PartlySeenModel, tiny_model
from kvkeep.attention import LayerParts, find_parts
from kvkeep.attention.rotated import unrotated_layers
from kvkeep.errors import UnsupportedModelError
from tiny_models import tiny_bare_model, tiny_llama

ROPE, OUTPUT = frozenset({"rope", "keys"}), frozenset({"output_weights"})


def parts_of(model: Any, needs: frozenset[str], layers: int = 2) -> dict[int, LayerParts]:
    return find_parts(model, make_prompt_cache(model), list(range(layers)), needs, "asker")


def outputs_of(model: Any, layer: int, heads: int, dim: int) -> np.ndarray:
    """[H_q, D_v, hidden]."""
    output = parts_of(model, OUTPUT)[layer].output
    assert output is not None
    weights = output(heads, dim)
    return np.stack([np.asarray(weights(head)) for head in range(heads)])


def by_head(weight: Any, heads: int) -> np.ndarray:
    """A weight [hidden, H_q * D_v] as [H_q, D_v, hidden]."""
    return np.asarray(weight).T.reshape(heads, -1, weight.shape[0])


def test_nothing_is_looked_for_where_nothing_is_needed() -> None:
    assert find_parts(object(), [], [0], frozenset({"queries", "keys", "values"}), "asker") == {}


@pytest.mark.parametrize("make", [tiny_llama, tiny_bare_model])
def test_each_layer_gives_its_own_modules(make: Any) -> None:
    model = make()
    owners = [getattr(layer, "self_attn", layer) for layer in model.layers]
    for layer, part in parts_of(model, ROPE | OUTPUT).items():
        assert part.rope is not None
        rows = mx.random.normal((2, 9, 16))
        right = owners[layer].rope(rows[None], offset=3)[0]
        np.testing.assert_array_equal(part.rope.rotate(rows, np.arange(3, 12)), right)
        found = outputs_of(model, layer, 4, 16)
        np.testing.assert_array_equal(found, by_head(owners[layer].o_proj.weight, 4))
    assert [part.output for part in parts_of(model, ROPE).values()] == [None, None]
    assert [part.rope for part in parts_of(model, OUTPUT).values()] == [None, None]


@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (2, 32), (1, 64), (8, 8)])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_quantised_weights_are_dequantised(
    heads: int, dim: int, bits: int, group_size: int
) -> None:
    """Also where a head is a part of a quantisation group."""
    model: Any = tiny_llama(heads=4, kv_heads=2, head_dim=16)
    module = model.layers[1].self_attn.o_proj.to_quantized(group_size, bits)
    model.layers[1].self_attn.o_proj = module
    whole = mx.dequantize(module.weight, module.scales, module.biases, group_size, bits)
    np.testing.assert_array_equal(outputs_of(model, 1, heads, dim), by_head(whole, heads))


def test_other_linear_maps_are_tried_out() -> None:
    model: Any = tiny_llama()
    plain = model.layers[0].self_attn.o_proj
    plain.bias = mx.random.normal((32,))
    lora = LoRALinear.from_base(plain, r=4)
    lora.lora_b = mx.random.normal(lora.lora_b.shape)
    model.layers[0].self_attn.o_proj = lora
    weight = plain.weight + lora.scale * (lora.lora_a @ lora.lora_b).T
    np.testing.assert_allclose(outputs_of(model, 0, 4, 16), by_head(weight, 4), atol=1e-4)


def test_a_language_model_inside_another_is_found() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = tiny_llama()

        def make_cache(self) -> list[Any]:
            return make_prompt_cache(self.language_model)

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return self.language_model(inputs, cache=cache)

    outer = Outer()
    cache = make_prompt_cache(outer)
    assert find_parts(outer, cache, [0, 1], ROPE, "asker")[1].rope is not None


def without(name: str) -> Any:
    model: Any = tiny_bare_model()
    model.model_type = "strange"
    module = getattr(model.layers[1], name)
    delattr(model.layers[1], name)
    model.layers[1].other = module
    return model


def twice() -> Any:
    model: Any = tiny_bare_model()
    model.layers[1].inner = nn.Module()
    model.layers[1].inner.wo = nn.Linear(64, 32)
    return model


class _Turned(nn.Module):
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return -x


def odd_rotation() -> Any:
    model: Any = tiny_bare_model()
    model.layers[0].rope = _Turned()
    return model


def after_the_rotation(seen: bool, factor: float = 1.5) -> Any:
    """Models of which one layer rotates and then multiplies the queries."""

    class Normed(nn.RoPE):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            return super().__call__(x, offset) * factor

    model: Any = PartlySeenModel(seen=[True, seen], sliding=[False, False])
    model.layers[1].rope = Normed(16)
    return model


@pytest.mark.parametrize(
    ("make", "needs", "reason"),
    [
        (lambda: without("rope"), ROPE, r"layer 1 of model 'strange'.*got no modules named rope"),
        (lambda: without("o_proj"), OUTPUT, "layer 1.*got no output projections named o_proj"),
        (twice, OUTPUT, "got 2 output projections"),
        (odd_rotation, ROPE, "layer 0.*got its rotation turns position 0"),
        (lambda: after_the_rotation(True), ROPE, "no plain rotation in 1 of 2 layers"),
        (lambda: tiny_model("deepseek_v3"), ROPE, "'deepseek_v3'.*apart from the rest"),
        (nn.Module, ROPE, "it has 0 layers and 1 caches"),
    ],
)
def test_refusals_name_the_model_and_the_reason(
    make: Any, needs: frozenset[str], reason: str
) -> None:
    model = make()
    cache = make_prompt_cache(model) if hasattr(model, "layers") else [None]
    with pytest.raises(UnsupportedModelError, match=f"policy 'asker' .*{reason}.*kvkeep policies"):
        part = find_parts(model, cache, list(range(len(cache))), needs, "asker")[0]
        assert part.rope is not None
        part.rope.rotate(mx.zeros((1, 1, 16)), np.arange(1))


def test_a_layer_that_says_it_rotates_nothing_is_fine() -> None:
    class Idle(nn.Module):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            return x

    model: Any = PartlySeenModel(seen=[True, True], sliding=[False, False])
    model.layers[1].rope = Idle()
    rows = mx.random.normal((2, 3, 16))
    turned = []
    for part in parts_of(model, ROPE).values():
        assert part.rope is not None
        turned.append(not np.allclose(part.rope.unrotate(rows, np.arange(3)), rows))
        assert part.rope.idle != turned[-1]
    assert turned == [True, False]


def test_whether_rows_are_rotated_is_seen_without_computing_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rope = mx.fast.rope
    assert unrotated_layers(tiny_llama(), [0, 1]) == []
    assert unrotated_layers(after_the_rotation(True), [0, 1]) == [1]
    assert unrotated_layers(after_the_rotation(True, 1.0), [0, 1]) == []
    assert unrotated_layers(after_the_rotation(False), [0, 1]) == []  # nobody can tell

    def failing(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("no")

    model: Any = tiny_llama()
    model.layers[1].self_attn.rope = failing
    with pytest.raises(RuntimeError):
        unrotated_layers(model, [0, 1])
    assert mx.fast.rope is rope
    model = tiny_llama()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", failing)
        assert unrotated_layers(model, [0]) == []


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_of_another_width_are_refused(quantised: bool) -> None:
    model: Any = tiny_llama()
    if quantised:
        attention = model.layers[0].self_attn
        attention.o_proj = attention.o_proj.to_quantized(32, 4)
    with pytest.raises(UnsupportedModelError, match=r"projection of .*48"):
        outputs_of(model, 0, 3, 16)
