"""`kvkeep generate`: mlx_lm.generate with eviction, and with both caches compared."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL, setup_arg_parser
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from rich.console import Console

from kvkeep.caches import CompactCache, PositionPreservingQuantizedKVCache
from kvkeep.cli.flags import EVICTION_OFF, add_eviction_flags, eviction_config, refuse_together
from kvkeep.cli.loading import LoadedModel, load_model, mention_demo
from kvkeep.cli.progress import prompt_progress
from kvkeep.cli.prompting import Prompt, build_prompt, template_options
from kvkeep.cli.report import Run, comparison_table, print_table, run_table
from kvkeep.cli.sampling import adapt_prefill_step, check_numbers, prefill_step, sampler_of
from kvkeep.compaction import cache_nbytes
from kvkeep.comparing import compare
from kvkeep.demo_model import resolve_model
from kvkeep.errors import ConfigError
from kvkeep.generation import GenerationResponse, stream_generate
from kvkeep.reuse import load_prompt_cache
from kvkeep.spec import EvictionConfig

_OFF = f"Pass --kv-eviction {EVICTION_OFF} with it."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate`: mlx-lm's own flags, the eviction flags and --compare."""
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt over a compact cache",
        description="Answer one prompt. The flags of mlx_lm.generate mean what they mean there.",
        parents=[setup_arg_parser()],
        add_help=False,  # comes with the parent
    )
    add_eviction_flags(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer over the exact and over the evicted cache of one prefill, side by side",
    )
    adapt_prefill_step(parser)
    mention_demo(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt; exit status 0.

    Raises:
        KvkeepError: a flag, the model or the prompt is at fault.
    """
    config = eviction_config(args)
    _check_flags(args, config)
    if args.seed is not None:
        mx.random.seed(args.seed)
    cache, saved = _saved_cache(args, config)
    loaded = load_model(
        _model_name(args, saved),
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config=json.loads(saved.get("tokenizer_config", "{}")),
        model_config={"quantize_activations": args.quantize_activations},
    )
    _add_eos_tokens(loaded, args.extra_eos_token)
    prompt = build_prompt(args, loaded, is_suffix=cache is not None)
    options: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "sampler": sampler_of(args, loaded.tokenizer),
        "prefill_step_size": prefill_step(args.prefill_step_size),
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
    }
    if args.compare and config is not None:
        _compare(args, loaded, prompt, cache, config, options)
    else:
        _answer(args, loaded, prompt, cache, config, options)
    return 0


def _answer(
    args: argparse.Namespace,
    loaded: LoadedModel,
    prompt: Prompt,
    cache: list[Any] | None,
    config: EvictionConfig | None,
    options: dict[str, Any],
) -> None:
    """Stream one answer to stdout; with --verbose, its figures after it."""
    model = loaded.model
    layers = make_prompt_cache(model, args.max_kv_size) if cache is None else cache
    cached = _positions(layers)
    if args.draft_model is not None:
        options["draft_model"] = draft = _draft_model(args, loaded)
        options["num_draft_tokens"] = args.num_draft_tokens
        if config is None:  # mlx-lm looks for the draft's caches behind the model's
            layers = layers + make_prompt_cache(draft)
    last: GenerationResponse | None = None
    with prompt_progress(shown=args.verbose) as progress:
        for last in stream_generate(
            model,
            loaded.tokenizer,
            prompt.tokens,
            config=config,
            prompt_cache=layers,
            prompt_progress_callback=progress,
            input_embeddings=prompt.embeddings,
            **options,
        ):
            print(last.text, end="", flush=True)
    print()
    if not args.verbose or last is None:
        return
    prefill = last.prompt_tokens / last.prompt_tps if last.kv is None else last.kv.times.prefill
    figures = Run(
        prompt_tokens=len(prompt.tokens),
        cached_tokens=cached,
        prefill_seconds=prefill,
        generated=last.generation_tokens,
        decode_tps=last.generation_tps,
        peak_memory=last.peak_memory * 1e9,
        kv_nbytes=cache_nbytes(layers[: len(model.layers)]),
        kv=last.kv,
    )
    print()
    print_table(run_table(figures))


def _compare(
    args: argparse.Namespace,
    loaded: LoadedModel,
    prompt: Prompt,
    cache: list[Any] | None,
    config: EvictionConfig,
    options: dict[str, Any],
) -> None:
    """Answer twice over one prefill and print both answers in a table."""
    seed = args.seed if args.seed is not None else random.randrange(2**31)
    console = Console(stderr=True, quiet=not args.verbose)
    with prompt_progress(shown=args.verbose) as progress:
        comparison = compare(
            loaded.model,
            loaded.tokenizer,
            prompt.tokens,
            config=config,
            seed=seed,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            on_answer=lambda name: console.print(f"answering: {name}", style="dim"),
            **options,
        )
    print_table(comparison_table(comparison, config))


def _check_flags(args: argparse.Namespace, config: EvictionConfig | None) -> None:
    """Refuse what cannot be combined, before a model is loaded."""
    check_numbers(args)
    template_options(args)
    if config is not None:
        policy = f"--kv-eviction {config.policy}"
        if args.image:
            refuse_together("--image", policy, _OFF)
        if args.max_kv_size is not None:
            refuse_together("--max-kv-size", policy, f"Use --kv-budget instead. {_OFF}")
    if not args.compare:
        return
    if config is None:
        refuse_together("--compare", f"--kv-eviction {EVICTION_OFF}", "Name a policy.")
    if args.draft_model is not None:
        refuse_together("--compare", "--draft-model", "Leave one out.")


def _saved_cache(
    args: argparse.Namespace, config: EvictionConfig | None
) -> tuple[list[Any] | None, dict[str, str]]:
    """The caches and metadata of --prompt-cache-file, if it is given."""
    if args.prompt_cache_file is None:
        return None, {}
    cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    file = f"--prompt-cache-file {args.prompt_cache_file}"
    first = next((layer for layer in cache if isinstance(layer, _QUANTIZED)), None)
    if first is not None:
        held, given = (first.bits, first.group_size), (args.kv_bits, args.kv_group_size)
        if args.kv_bits is not None and given != held:
            raise ConfigError(
                f"--kv-bits and --kv-group-size do not match {file}",
                expected=f"{held[0]} and {held[1]}",
                received=f"{given[0]} and {given[1]}",
            )
        if config is not None:
            refuse_together(f"{file} (quantised)", f"--kv-eviction {config.policy}", _OFF)
    if args.compare and any(isinstance(layer, CompactCache) for layer in cache):
        refuse_together("--compare", f"{file} (compact)", "Only an exact cache can be compared.")
    return cache, metadata or {}


_QUANTIZED = (QuantizedKVCache, PositionPreservingQuantizedKVCache)


def _model_name(args: argparse.Namespace, saved: dict[str, str]) -> str:
    """The model that --model or the saved cache names."""
    made_with = saved.get("model")
    if args.model is None:
        return made_with or DEFAULT_MODEL
    if made_with in (None, args.model) or resolve_model(made_with) == resolve_model(args.model):
        return args.model
    raise ConfigError(
        "--model is not the model that --prompt-cache-file was made with",
        expected=made_with,
        received=args.model,
    )


def _add_eos_tokens(loaded: LoadedModel, tokens: list[str]) -> None:
    for token in tokens:
        try:
            loaded.tokenizer.add_eos_token(token)
        except ValueError as error:
            raise ConfigError("bad value for --extra-eos-token", received=str(error)) from error


def _draft_model(args: argparse.Namespace, loaded: LoadedModel) -> Any:
    draft = load_model(args.draft_model, flag="--draft-model")
    sizes = [model.tokenizer.vocab_size for model in (loaded, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "--draft-model has another tokenizer than --model",
            expected=f"{sizes[0]} tokens",
            received=f"{sizes[1]} tokens",
        )
    return draft.model


def _positions(cache: list[Any]) -> int:
    """Tokens that a cache has read."""
    return max((int(getattr(layer, "offset", 0)) for layer in cache), default=0)
