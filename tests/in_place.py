"""The check that a compiled program updates the arena in place, for programs of any platform."""

from jax import stages

MEBIBYTE = 1 << 20


def assert_in_place(compiled: stages.Compiled, arena_bytes: int, temp_bytes: int) -> None:
    """Fails unless the program gives back the arena's own bytes and holds few others.

    Args:
      compiled: the program, compiled with the arena donated.
      arena_bytes: what must be aliased at least.
      temp_bytes: the most it may hold beside arguments and results; well below `arena_bytes`, or
        a copy of the arena would pass.
    """
    assert 2 * temp_bytes < arena_bytes, "the arena is too small to tell a copy from a temporary"
    memory = compiled.memory_analysis()
    assert memory is not None, "this platform does not analyse memory"
    assert memory.alias_size_in_bytes >= arena_bytes, (
        f"only {memory.alias_size_in_bytes} of {arena_bytes} bytes of the arena are aliased: "
        f"it is not donated, or not what the program returns"
    )
    assert memory.temp_size_in_bytes <= temp_bytes, (
        f"temporaries take {memory.temp_size_in_bytes / MEBIBYTE:.3f} MiB of at most "
        f"{temp_bytes / MEBIBYTE:.3f} MiB: the arena, or a part of it, is copied"
    )
