"""`unimem simulate`: a load, a published model's sizes, an arena and a layout; what would run.

It reads the load, lets the scheduler and the allocator serve it without bytes, and gives figures.
It prints nothing and writes no file.

    load      a trace, with its arrival times or all at once; or requests of one length, of which
              all are there at once or `concurrency` at a time
    layout    unified           one arena for all kinds of state
              split             pools of fixed size at SGLang's default ratios
              split:RATIO       the same at another ratio: bytes of request state for a byte of
                                token state; without request state, window tokens for a token of
                                whole context
              blocks            equal blocks, as vLLM's

Limits are those of the published comparisons: 8,192 tokens a step, chunks as long as that, and as
many requests as memory holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unimem_jax.allocator import UNIFIED, Split
from unimem_jax.blocks import block_plan
from unimem_jax.errors import UsageError, require_positive
from unimem_jax.geometries import geometry
from unimem_jax.picture import Moment, observe
from unimem_jax.plan import Plan, plan, size_text
from unimem_jax.queue import FIRST_COME
from unimem_jax.schedule import Limits
from unimem_jax.simulate import Simulated, Simulation
from unimem_jax.splits import default_split
from unimem_jax.step_time import StateBytes, StepTime
from unimem_jax.trace import Traced, even_load, read_trace
from unimem_jax.weights import weights

BUDGET_TOKENS = 8192  # of one step
MOST_MOMENTS = 4096  # kept for a picture
LAYOUTS = "unified, split, split:RATIO or blocks"
ARRIVALS = ("trace", "at-once")


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives: a trace file, or requests of one length.

    Attributes:
      trace, limit, arrivals: a file, how many of its requests, and whether its times count.
      input_tokens, output_tokens, requests: of requests of one length.
      concurrency: of these, most in the system at once; all by default.
    """

    trace: str | None = None
    limit: int | None = None
    arrivals: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    concurrency: int | None = None

    def read(self) -> list[Traced]:
        """The requests, in order of arrival.

        Raises:
          UsageError: options that contradict each other or are missing, sizes that are not
            positive, or a trace that cannot be read (file and line).
        """
        even = {"input": self.input_tokens, "output": self.output_tokens, "requests": self.requests}
        if self.trace is None:
            missing = [name for name, value in even.items() if value is None]
            if missing:
                raise UsageError(
                    f"a load is --trace FILE, or --input, --output and --requests; there is no "
                    f"--{missing[0]}"
                )
            if self.limit is not None or self.arrivals is not None:
                raise UsageError("--limit and --arrivals go with --trace")
            require_positive(**even)
            if self.concurrency is not None:
                require_positive(concurrency=self.concurrency)
            return even_load(*(int(value or 0) for value in even.values()))
        given = [name for name, value in {**even, "concurrency": self.concurrency}.items()
                 if value is not None]  # fmt: skip
        if given:
            raise UsageError(f"--{given[0]} goes with requests of one length, not with --trace")
        found = read_trace(self.trace, self.limit)
        if self.arrivals not in (None, *ARRIVALS):
            raise UsageError(f"arrivals are {' or '.join(ARRIVALS)}, not {self.arrivals!r}")
        if self.arrivals == "at-once":
            return [replace(one, arrival_s=0.0) for one in found]
        return found


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
      inputs: what was asked, as plain values.
      requests: how many there were.
      plan, moments, at_s: for a picture: the arena at some times, in seconds.
    """

    inputs: dict[str, Any]
    requests: int
    simulated: Simulated
    plan: Plan
    moments: tuple[Moment, ...]
    at_s: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Inputs and figures, flat."""
        found = asdict(self.simulated)
        timing = found.pop("timing")
        return {
            **self.inputs,
            **found,
            **timing,
            "retractions_per_1000": self.simulated.retractions / self.requests * 1000,
            "prefix_hit_tokens": 0,  # every prompt is computed whole
        }

    def table(self) -> str:
        """The figures as lines of text."""
        found, timing = self.simulated, self.simulated.timing
        assert timing is not None
        per_1000 = found.retractions / self.requests * 1000
        lines = [
            ("model, arena", f"{self.inputs['model']}, {size_text(self.inputs['arena_bytes'])}"),
            ("layout, policy", f"{self.inputs['layout']}, {self.inputs['policy']}"),
            ("requests", f"{self.requests:,}"),
            ("running, mean and most", f"{found.running_mean:.1f} and {found.running_max:,}"),
            ("steps", f"{found.steps:,}"),
            ("retractions per 1,000", f"{per_1000:,.0f}"),
            ("prefix tokens found", "0 (prompts are computed whole)"),
            ("moved", size_text(found.moved_bytes)),
            ("unused while some wait for it", f"{found.waste_fraction:.1%}"),
            ("tokens per second, modelled", f"{timing.tokens_per_s:,.0f}"),
            (
                "first token, p50 and p99",
                f"{timing.ttft_p50_s:.3g} s and {timing.ttft_p99_s:.3g} s",
            ),
            ("host per request and step", f"{found.host_us_per_request_step:.2f} us"),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def replay(
    model: str, arena_bytes: int, load: Load, requests: Sequence[Traced], *,
    layout: str = UNIFIED, policy: str = FIRST_COME, page_tokens: int = 16,
    on_ended: Callable[[int], object] = lambda count: None, is_drawn: bool = False,
) -> Replayed:  # fmt: skip
    """Serves a load in simulation.

    Args:
      model: a name of `geometry_names()`.
      requests: what `load.read` gave.
      layout, policy: see above.
      on_ended: told after steps how many requests ended in them.
      is_drawn: whether to keep moments for a picture.
    Raises:
      UsageError: an unknown model, layout or policy; what `plan` refuses; a request that can never
        fit.
    """
    parts = geometry(model)
    made, split = arranged(model, arena_bytes, layout, page_tokens)
    state = StateBytes.of(parts)
    simulation = Simulation(
        requests, made, Limits(len(requests), BUDGET_TOKENS, BUDGET_TOKENS, len(requests)), split,
        policy=policy, clock=StepTime(weights(model), state), concurrency=load.concurrency,
        state=state,
    )  # fmt: skip
    watched = Watched(simulation) if is_drawn else None
    ended = 0
    while not simulation.is_over:
        simulation.step()
        if watched:
            watched.look()
        if simulation.ended > ended:
            on_ended(simulation.ended - ended)
            ended = simulation.ended
    simulated = simulation.found()
    if layout == "blocks":
        simulated = replace(simulated, moved_bytes=0)
    inputs = {
        "model": model, "arena_bytes": arena_bytes, "layout": layout, "policy": policy,
        "page_tokens": page_tokens, **asdict(load), "requests": len(requests),
        "arrivals": (load.arrivals or ARRIVALS[0]) if load.trace else None,
    }  # fmt: skip
    moments = tuple(watched.moments) if watched else ()
    at_s = tuple(watched.at_s) if watched else ()
    return Replayed(inputs, len(requests), simulated, made, moments, at_s)


def arranged(
    model: str, arena_bytes: int, layout: str, page_tokens: int
) -> tuple[Plan, str | Split]:
    """The plan and the allocator's layout of a named layout of a model's state.

    Raises:
      UsageError: an unknown model or layout, a ratio that is no positive number, a model that has
        nothing to split, or an arena too small.
    """
    parts = geometry(model)
    name, _, text = layout.partition(":")
    if name not in (UNIFIED, "split", "blocks") or (":" in layout and name != "split"):
        raise UsageError(f"a layout is {LAYOUTS}, not {layout!r}")
    if name == "blocks":
        return block_plan(parts, arena_bytes, page_tokens), UNIFIED
    made = plan(parts, arena_bytes, page_tokens)
    if name == UNIFIED:
        return made, UNIFIED
    if len(made.sub_pools) == 1:
        raise UsageError(f"{model} keeps one kind of state; there is nothing to split")
    if ":" not in layout:
        return made, default_split(made)
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise UsageError(f"the ratio of a split is a positive number, not {text!r}")
    which = "state_per_token" if made.slot_pools else "window_per_context"
    return made, default_split(made, **{which: ratio})


class Watched:
    """Moments of a simulation, as evenly apart as may be, and no more than a picture can show."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.moments: list[Moment] = []
        self.at_s: list[float] = []
        self._apart = 1

    def look(self) -> None:
        """Notes the arena after this step, if it is its turn."""
        simulation = self.simulation
        if simulation.steps % self._apart:
            return
        queue = simulation.queue
        self.moments.append(observe(simulation.memory, len(queue.running), len(queue.waiting)))
        self.at_s.append(simulation.now_s)
        if len(self.moments) > MOST_MOMENTS:  # every second one goes
            del self.moments[::2], self.at_s[::2]
            self._apart *= 2
