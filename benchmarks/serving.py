"""Many streams at once: kvkeep's server, mlx-lm's server, and the bound, in one run.

    python benchmarks/serving.py [--requests 8] [--prompt-tokens 1500] [--out PATH]

The same prompts go, all at once and through OpenAI's client, to `kvkeep serve` (which evicts
them) and to `mlx_lm.server` (which keeps every row), each a process of its own. The bound is
mlx-lm's batch generator in this process, without a server, over prompts that have only as
many tokens as kvkeep keeps rows. Rates are those of decoding, all requests together, while
every one of them decodes: reading the prompts is left out. The three run interleaved; the
first round, in which the servers read the prompts, does not count.

PATH.json gets every figure, PATH.md the table.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from rich.console import Console
from server_processes import Server, kvkeep_server, stock_server

from kvkeep.bench import interleaved, load_average
from kvkeep.bench.timing import rounds_told

EVICTED, EXACT, BOUND = "kvkeep serve, evicted", "mlx_lm.server, exact", "bound"
TARGET = results.Target("at least", 0.9)


@dataclass(frozen=True)
class Stream:
    """One answer as it came.

    Attributes:
        arrivals: when a piece of it came, in seconds of one clock, ascending.
        tokens: how many it has, as the server counted them.
        rows: kept of its prompt, where the server says so.
    """

    arrivals: tuple[float, ...]
    tokens: int
    rows: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and show them; 1 where the target was missed, else 0."""
    options = parse(arguments)
    import mlx_lm

    from kvkeep.demo_model import resolve_model

    # The servers must end with this process, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if not console.is_terminal:
        console.width = 160
    load = load_average()
    place = str(resolve_model(options.model))
    model, tokenizer = mlx_lm.load(place)[:2]
    prompts = prompts_of(tokenizer, options.requests, options.prompt_tokens)
    with ExitStack() as stack:
        flags = ["--kv-eviction", options.policy, "--kv-budget", options.budget]
        evicting, exact = (
            stack.enter_context(clients_of(stack.enter_context(server), options.requests))
            for server in (kvkeep_server(place, flags), stock_server(place))
        )
        ask = functools.partial(asked, prompts=prompts, max_tokens=options.max_tokens)
        rows = [stream.rows for stream in ask(evicting)]
        pairs = zip(prompts, rows, strict=True)
        texts = [tokenizer.encode(prompt)[:kept] for prompt, kept in pairs]
        contenders = {
            EVICTED: lambda: rate(ask(evicting)),
            EXACT: lambda: rate(ask(exact)),
            BOUND: lambda: rate(generated(model, texts, options.max_tokens)),
        }

        def told(words: str) -> None:
            console.print(f"{words}; load {load_average():.1f}", highlight=False)

        report = rounds_told(told, "decoding")
        found = interleaved(contenders, options.rounds, seed=options.seed, report=report)
    case = (
        f"{options.requests} streams of {options.max_tokens} tokens, prompts of about"
        f" {options.prompt_tokens:,} tokens, {options.policy} {options.budget}"
        f" ({round(sum(rows) / len(rows)):,} rows each)"
    )
    return show(console, judged(case, found), options.out, load)


def judged(case: str, rates: dict[str, list[float]]) -> list[results.Result]:
    """Evicted against the bound and against the exact server."""
    return [
        results.Result(
            case,
            EVICTED,
            rates[EVICTED],
            "tok/s",
            baseline,
            rates[baseline],
            ratio="subject / baseline",
            target=target,
        )
        for baseline, target in ((BOUND, TARGET), (EXACT, None))
    ]


def show(console: Console, found: list[results.Result], out: Path | None, load: float) -> int:
    """Print and write; 1 where the target was missed."""
    machine = results.machine()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    console.print(*results.tables(found), sep="\n")
    if out is not None:
        loads = [load, load_average()]
        figures = [result.as_json() for result in found]
        report = {"machine": machine, "load": loads, "results": figures}
        title = f"Streams at once (load of the machine {loads[0]:.1f} before, {loads[1]:.1f} after)"
        written = results.write_all(out, report, [results.markdown(title, found)])
        console.print(f"Wrote {written[0]} and {written[1]}.")
    return int(any(result.met is False for result in found))


# -- who answers -------------------------------------------------------------------------


@contextmanager
def clients_of(server: Server, count: int) -> Iterator[list[Any]]:
    """OpenAI's clients of a server, ready to ask: to make one takes longer than some answers."""
    import openai

    with ExitStack() as stack:
        yield [
            stack.enter_context(
                openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600)
            )
            for _ in range(count)
        ]


def asked(clients: Sequence[Any], prompts: Sequence[str], max_tokens: int) -> list[Stream]:
    """The streams of prompts that are sent all at once, each by a client of its own."""
    ready = threading.Barrier(len(prompts))

    def ask(client: Any, prompt: str) -> Stream:
        ready.wait()
        return streamed(client, prompt, max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, clients, prompts))


def streamed(client: Any, prompt: str, max_tokens: int) -> Stream:
    """One greedy answer."""
    arrivals: list[float] = []
    usage: Any = None
    events = client.completions.create(
        model="default_model",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in events:
        if event.choices and event.choices[0].text:
            arrivals.append(time.perf_counter())
        usage = event.usage or usage
    report = getattr(usage, "kv", None) or {}
    return Stream(tuple(arrivals), usage.completion_tokens, report.get("retained_tokens", 0))


def generated(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    """The same from mlx-lm's batch generator alone, over prompts of token ids."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=max_tokens, prefill_batch_size=len(prompts))
    arrivals: dict[int, list[float]] = {
        uid: [] for uid in generator.insert([list(prompt) for prompt in prompts])
    }
    while any(len(times) < max_tokens for times in arrivals.values()):
        responses = generator.next_generated()
        now = time.perf_counter()
        for response in responses:
            arrivals[response.uid].append(now)
    generator.close()
    return [Stream(tuple(times), len(times)) for times in arrivals.values()]


def rate(streams: Sequence[Stream]) -> float:
    """Tokens per second of all streams together, from the last one's first piece to the first
    one's last: while all of them decode.

    A piece may hold several tokens (a server sends text): each counts for the stream's mean.

    Raises:
        SystemExit: they never decoded together.
    """
    start = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    if end <= start:
        sys.exit("The streams never decoded together: raise --max-tokens.")
    tokens = 0.0
    for stream in streams:
        inside = sum(start < arrival <= end for arrival in stream.arrivals)
        tokens += inside * stream.tokens / len(stream.arrivals)
    return tokens / (end - start)


def prompts_of(tokenizer: Any, count: int, length: int) -> list[str]:
    """Pieces of prose of about `length` tokens, no two the same."""
    from kvkeep.bench.workloads import prose_tokens

    return [tokenizer.decode(prose_tokens(tokenizer, length, seed)) for seed in range(count)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command's flags."""
    parser = argparse.ArgumentParser(description="Decode many streams at once, served and not.")
    parser.add_argument("--model", default="demo", help="folder, repository or demo")
    for flag, default, text in (
        ("requests", 8, "streams at once"),
        ("prompt-tokens", 1500, "of each prompt, about"),
        ("max-tokens", 96, "of each answer"),
        ("rounds", 5, "that count"),
        ("seed", 0, "of the order in a round"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--policy", default="span", help="kvkeep's (span)")
    parser.add_argument("--budget", default="25%", help="kvkeep's (25%%)")
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.md")
    options = parser.parse_args(arguments)
    for name in ("requests", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.max_tokens < 3:
        parser.error("--max-tokens must be at least 3: rates are taken between tokens")
    return options


if __name__ == "__main__":
    sys.exit(main())
