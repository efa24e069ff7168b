"""`python -m bench NAME ...`: runs one measurement; without a name, lists them."""

import importlib
import sys

COMMANDS = {
    "allocator": ("bench.allocator", "microseconds that the host spends on memory decisions"),
    "decode": (
        "bench.decode",
        "tokens/s of the decode loop, packed entries beside one array per layer; or Transformers",
    ),
    "kernels": ("bench.kernels", "time of every kernel at the shapes of its cases"),
    "simulate": ("bench.simulate", "requests at once in one arena, a split and equal blocks"),
    "prefix": ("bench.prefix", "what keeping prefixes costs the host, and what it saves"),
    "train-embedded": ("bench.train_embedded", "trains the embedded model from public text"),
}


def main(arguments: list[str]) -> int:
    """Runs the named command; returns its exit status."""
    if not arguments or arguments[0] not in COMMANDS:
        for name, (_, what) in COMMANDS.items():
            print(f"python -m bench {name:16} {what}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[arguments[0]]
    return importlib.import_module(module).main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
