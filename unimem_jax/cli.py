"""The command line: `unimem generate`, `plan`, `demo`, `simulate`, `fetch`.

Results go to standard output, progress (on a terminal) and errors to standard error. A mistake of
the caller is one line and exit code 2, a failure while running is one line and exit code 1, Ctrl-C
is exit code 130 with what was generated so far. Files are refused before work starts.

Only here is the environment read, and only here does JAX get a folder for compiled programs.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from unimem_jax.errors import OutOfMemory, PeerError, UsageError
from unimem_jax.options import SIMULATE_TEXT, add_simulate, size
from unimem_jax.output import replacing
from unimem_jax.sampling import Sampling

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes
DEMO_PICTURE = "out/arena.png"
SHOWN_COMPLETIONS = (0, 3, 8)  # of the demonstration: a short prompt, a long one, another short one


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other mistake: in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(error, USAGE_ERROR)
    except (OutOfMemory, PeerError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):  # the reader left; there is nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILURE
        return _fail(error, FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("unimem", description="Hybrid language models in one arena of memory.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("generate", _generate, "continue prompts"),
        ("plan", _plan, "show how a model's state lies in an arena"),
        ("demo", _demo, "32 prompts at once, a table and a picture of the arena"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--json", metavar="FILE", help="also write the results as JSON")
        if name == "demo":
            command.add_argument("--picture", metavar="FILE", default=DEMO_PICTURE)
        else:
            either = _add_model(command)
        if name == "plan":
            either.add_argument(
                "--geometry", metavar="NAME", help="a published model's sizes, such as gpt-oss-20b"
            )
        else:
            command.add_argument(
                "--no-cache", action="store_true", help="keep no compiled programs"
            )
        if name == "generate":
            _add_generate(command)
    simulating = commands.add_parser("simulate", help=SIMULATE_TEXT, description=SIMULATE_TEXT)
    simulating.set_defaults(run=_simulate)
    add_simulate(simulating)
    text = "get the weights of a model that ships none"
    fetching = commands.add_parser("fetch", help=text, description=text)
    fetching.set_defaults(run=_fetch)
    fetching.add_argument("name", metavar="NAME", help="such as smollm2")
    return parser


def _add_model(command: argparse.ArgumentParser) -> Any:
    """Adds what names a model and its arena; returns the group of ways to name one."""
    either = command.add_mutually_exclusive_group()
    either.add_argument("--model", default="embedded", metavar="NAME|DIR|FILE")
    command.add_argument("--arena", default="64MiB", metavar="SIZE", help="bytes for all state")
    command.add_argument(
        "--page", "--page-size", type=int, default=16, metavar="TOKENS", help="tokens per page"
    )
    return either


def _add_generate(command: argparse.ArgumentParser) -> None:
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="one prompt per line; - for stdin")
    prompts.add_argument("--chat", action="append", metavar="TEXT", help="a question; as --prompt")
    prompts.add_argument("--ids", action="append", metavar="1,2,3", help="may be repeated")
    command.add_argument("--system", metavar="TEXT", help="with --chat: what comes before it")
    command.add_argument("--max-tokens", type=int, default=Sampling().max_tokens, metavar="N")
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--stop", action="append", default=[], metavar="TEXT")
    command.add_argument("--rows", type=int, default=64, help="most requests at once")
    command.add_argument("--chunk", type=int, default=64, help="prompt tokens per step")


def _generate(options: argparse.Namespace) -> int:
    sampling = Sampling(
        options.max_tokens, options.temperature, options.top_k, options.top_p, options.min_p,
        options.seed, tuple(options.stop),
    )  # fmt: skip
    shown = _prompts(options)
    arena_bytes = size(options.arena)
    with _json_file(options) as write_json:
        from unimem_jax.serving import joined

        engine = _engine(options, arena_bytes)
        prompts = [_conversation(options, engine, one) for one in shown] if options.chat else shown
        counts = [len(engine.intake.encode(prompt)) for prompt in prompts]
        pieces: list[list[Any]] = [[] for _ in prompts]
        is_single = len(prompts) == 1 and options.ids is None
        stream = engine.stream(prompts, sampling)
        code = 0
        try:
            with _progress(len(prompts) * sampling.max_tokens, is_quiet=is_single) as advance:
                for piece in stream:
                    pieces[piece.index].append(piece)
                    advance(len(piece.token_ids))
                    if is_single:
                        print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
            code = INTERRUPTED
        found = [joined(some, count) for some, count in zip(pieces, counts, strict=True)]
        print("" if is_single else _listing(shown, found, "\n" if options.chat else ""))
        write_json(
            {
                "model": options.model,
                "arena_bytes": engine.plan.arena_bytes,
                "statistics": asdict(engine.statistics()),
                "completions": _completions(shown, found),
            }
        )
    return _fail("interrupted", code) if code else 0


def _plan(options: argparse.Namespace) -> int:
    arena_bytes = size(options.arena)
    with _json_file(options) as write_json:
        from unimem_jax.geometries import geometry
        from unimem_jax.outside import outside
        from unimem_jax.plan import plan
        from unimem_jax.price import Prices

        model = None
        if options.geometry is None:
            from unimem_jax.load import load

            with _loading() as on_tensor:
                model, _, _ = load(options.model, on_tensor)
        parts = geometry(options.geometry) if model is None else model.parts()
        found = plan(parts, arena_bytes, options.page)
        print(found)
        context = getattr(model, "context_tokens", None)
        if context:
            prices = Prices(found)
            print(f"a request of {context:,} tokens holds {prices.itemise(prices.held(context))}")
        beside = outside(
            found, vocab=getattr(model, "vocab_size", 0), context_tokens=context or 4096
        )
        print(beside)
        write_json({**found.to_json(), "outside": beside.to_json()})
    return 0


def _demo(options: argparse.Namespace) -> int:
    if options.picture == DEMO_PICTURE:
        Path(DEMO_PICTURE).parent.mkdir(exist_ok=True)
    with _json_file(options) as write_json, replacing(options.picture) as picture:
        from unimem_jax.demo import ARENA_BYTES, ROWS, demo_prompts, demonstrate
        from unimem_jax.engine import Engine
        from unimem_jax.load import load
        from unimem_jax.picture import draw_arena

        model, params, tokenizer = load()
        engine = Engine(
            model, params, arena_bytes=ARENA_BYTES, rows=ROWS, tokenizer=tokenizer,
            program_folder=_program_folder(options, model),
        )  # fmt: skip
        with _progress(len(engine.shapes()), unit="program") as advance:
            engine.warm_up(advance)
        with _progress(sum(sampling.max_tokens for _, sampling in demo_prompts())) as advance:
            found = demonstrate(engine, advance)
        shown = [found.prompts[at] for at in SHOWN_COMPLETIONS]
        print(_listing(shown, [found.completions[at] for at in SHOWN_COMPLETIONS]))
        print(f"\n{found.table()}")
        draw_arena(engine.plan, found.moments, picture)
        write_json(found.to_json())
    print(f"{'picture of the arena':<26}  {options.picture}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    arena_bytes = size(options.arena)
    with ExitStack() as opened:
        plot = opened.enter_context(replacing(options.plot)) if options.plot else None
        write_json = opened.enter_context(_json_file(options))
        from unimem_jax.picture import draw_arena
        from unimem_jax.replay import Load, replay

        load = Load(*(getattr(options, one.name) for one in fields(Load)))
        requests = load.read()
        with _progress(len(requests), unit="request") as advance:
            found = replay(
                options.model, arena_bytes, load, requests, layout=options.layout, on_ended=advance,
                policy=options.policy, page_tokens=options.page, is_drawn=plot is not None,
            )  # fmt: skip
        print(found.table())
        if plot:
            draw_arena(found.plan, found.moments, plot, found.at_s)
        write_json(found.to_json())
    return 0


def _prompts(options: argparse.Namespace) -> list[Any]:
    if options.system is not None and options.chat is None:
        raise UsageError("--system goes with --chat; a --prompt is taken as it is")
    if options.prompt or options.chat:
        return options.prompt or options.chat
    if options.ids is not None:
        return [_token_ids(text) for text in options.ids]
    try:
        is_piped = options.prompts == "-"
        text = (sys.stdin.buffer.read() if is_piped else Path(options.prompts).read_bytes()).decode(
            "utf-8-sig"
        )
    except OSError as error:
        raise UsageError(f"cannot read {options.prompts}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{options.prompts} is not UTF-8: byte {error.start} is {error.object[error.start]}"
        ) from error
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{options.prompts} has no prompt: one line is one prompt")
    return lines


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise UsageError(f"token ids are numbers such as 1,2,3; not {text!r:.60}") from error


def _conversation(options: argparse.Namespace, engine: Any, text: str) -> list[int]:
    """The tokens of one question."""
    encode = getattr(engine.intake.tokenizer, "encode_chat", None)
    if encode is None:
        raise UsageError(f"{options.model} has no chat template; use --prompt")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return encode([*system, {"role": "user", "content": text}])


def _fetch(options: argparse.Namespace) -> int:
    from unimem_jax.load import fetch

    fetch(options.name, lambda text: print(text, flush=True))
    return 0


def _engine(options: argparse.Namespace, arena_bytes: int) -> Any:
    from unimem_jax.engine import Engine
    from unimem_jax.load import load
    from unimem_jax.text import ByteText

    with _loading() as on_tensor:
        model, params, tokenizer = load(options.model, on_tensor)
    if tokenizer is None and options.ids is None:
        tokenizer = ByteText(getattr(model, "start_token", None))
        if getattr(model, "text", None) != "bytes":
            print(
                f"unimem: {options.model} has no tokenizer, so text goes in as bytes; "
                "--ids gives token ids",
                file=sys.stderr,
            )
    return Engine(
        model, params, arena_bytes=arena_bytes, page_tokens=options.page, rows=options.rows,
        chunk_tokens=options.chunk, tokenizer=tokenizer,
        program_folder=_program_folder(options, model),
    )  # fmt: skip


def _listing(prompts: Sequence[Any], found: Sequence[Any], between: str = "") -> str:
    """Prompts with what became of them; token ids where the prompt was token ids."""
    blocks = []
    for at, (prompt, one) in enumerate(zip(prompts, found, strict=True), 1):
        if isinstance(prompt, str):
            body = f"{prompt}{between}{one.text}"
        else:
            body = ",".join(map(str, one.token_ids))
        counts = f"{one.prompt_tokens} + {len(one.token_ids)} tokens, {one.finish_reason}"
        blocks.append(f"--- {at} of {len(found)}: {counts}\n{body}")
    return "\n".join(blocks)


def _completions(prompts: Sequence[Any], found: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, **asdict(one)} for prompt, one in zip(prompts, found, strict=True)]


@contextmanager
def _json_file(options: argparse.Namespace) -> Iterator[Callable[[Any], object]]:
    """Opens the JSON file, if one is asked for, and gives a function that writes a value to it."""
    if options.json is None:
        yield lambda value: None
        return
    with replacing(options.json) as file:
        yield lambda value: file.write(json.dumps(value, indent=1).encode() + b"\n")


@contextmanager
def _progress(
    total: int, is_quiet: bool = False, unit: str = "token"
) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, if that is a terminal and nothing else is written meanwhile."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, unit=unit, leave=False, file=sys.stderr) as bar:
        yield bar.update


@contextmanager
def _loading() -> Iterator[Callable[[str, int, int], object]]:
    """A bar of the bytes that are read, as `_progress`; gives what a loader calls `on_tensor`."""
    if not sys.stderr.isatty():
        yield lambda name, read, total: None
        return
    from tqdm import tqdm

    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def advance(name: str, read: int, total: int) -> None:
            bar.total = total
            bar.update(read - bar.n)

        yield advance


def _program_folder(options: argparse.Namespace, model: Any) -> Path | None:
    """Where the engine keeps compiled programs, so that the next start is warm.

    None where JAX keeps them: as the user asked, or since the model is not of this package.
    """
    if options.no_cache:
        return None
    import jax

    from unimem_jax.program_files import has_name

    is_asked = "JAX_COMPILATION_CACHE_DIR" in os.environ
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not is_asked and has_name(model):
        return caches / "unimem-jax" / "programs"
    if not is_asked:
        jax.config.update("jax_compilation_cache_dir", str(caches / "unimem-jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None


def _fail(error: object, code: int) -> int:
    """Says what went wrong in one line."""
    sys.stdout.flush()
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    print(f"unimem: {first}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
