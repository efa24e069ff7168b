"""Named shapes of real models, one list for tests, compile checks and benchmarks. Imports no JAX.

Widths follow from the models' published configurations: a page entry holds all layers of one
lifetime, 2 bytes a value; a slot holds all recurrent and convolution state of one request.
"""

from dataclasses import dataclass

ARENA_BYTES = 100 << 30  # of the compile checks: an arena that nearly fills an H200


@dataclass(frozen=True, slots=True)
class UnitCase:
    """What `move_units` moves.

    Attributes:
      row_words, unit_rows: shape of a unit in its sub-pool's view.
      moves: length of the index arrays.
    """

    name: str
    row_words: int
    unit_rows: int
    moves: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        return 4 * self.row_words * self.unit_rows

    def rows(self, arena_bytes: int) -> int:
        """Rows of an arena of about so many bytes, a multiple of 8 and of nothing else."""
        return arena_bytes // (4 * self.row_words) // 8 * 8


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One attention layer over pages: R requests of T new tokens each and C past tokens.

    Attributes:
      row_words: width of an entry of the sub-pool that holds the layer's lanes.
      page_tokens: tokens of a page.
      heads: query heads, key heads, size of a key head, size of a value head.
      window, has_sinks, soft_cap: options of `attend`.
    """

    name: str
    row_words: int
    page_tokens: int
    requests: int
    new: int
    past: int
    heads: tuple[int, int, int, int]
    window: int | None = None
    has_sinks: bool = False
    soft_cap: float | None = None


UNITS = (
    UnitCase("one granule", row_words=32, unit_rows=1, moves=64),
    UnitCase("embedded, pages of 16", row_words=128, unit_rows=16, moves=16),
    UnitCase("embedded, slots of 64 KiB", row_words=128, unit_rows=128, moves=4),
    # GPT-OSS-20B: 12 layers of each lifetime, 8 key heads of 64; 24,576 bytes a token.
    UnitCase("GPT-OSS-20B, pages of 16", row_words=6144, unit_rows=16, moves=64),
    UnitCase("GPT-OSS-20B, pages of 1", row_words=6144, unit_rows=1, moves=512),
    # Kimi-Linear-48B: 7 latents of 512 + 64; 8,064 bytes, 63 granules: rows of 7 granules.
    UnitCase("Kimi-Linear-48B, pages of 3", row_words=2016, unit_rows=3, moves=33),
    UnitCase("Kimi-Linear-48B, pages of 64", row_words=2016, unit_rows=64, moves=64),
    # 67 granules: the boxes of a unit are one granule wide.
    UnitCase("a prime width, pages of 5", row_words=2144, unit_rows=5, moves=9),
    # Gemma-3-27B: 52 window layers of 16 key heads of 128; 425,984 bytes a token.
    UnitCase("Gemma-3-27B, window pages of 16", row_words=106496, unit_rows=16, moves=16),
    # Qwen3.5-4B: 24 gated DeltaNet layers; 51,511,296 bytes a request.
    UnitCase("Qwen3.5-4B, slots", row_words=128, unit_rows=100608, moves=4),
    # Kimi-Linear-48B: 20 KDA layers; 43,417,600 bytes a request.
    UnitCase("Kimi-Linear-48B, slots", row_words=128, unit_rows=84800, moves=4),
)

ATTENTION = (
    AttentionCase("embedded, decode", 128, 16, 16, 1, 1024, (4, 2, 32, 32)),
    AttentionCase("embedded, prefill", 128, 16, 1, 64, 512, (4, 2, 32, 32)),
    AttentionCase(
        "GPT-OSS-20B, full, decode", 6144, 16, 16, 1, 1024, (64, 8, 64, 64), has_sinks=True
    ),
    AttentionCase(
        "GPT-OSS-20B, window, prefill", 6144, 16, 1, 256, 128, (64, 8, 64, 64),
        window=128, has_sinks=True,
    ),
    AttentionCase("Qwen3.5-4B, decode", 8192, 16, 16, 1, 1024, (16, 4, 256, 256)),
    AttentionCase("Gemma-2-2B, decode", 26624, 16, 4, 1, 512, (8, 4, 256, 256), soft_cap=50.0),
    # A latent read as one key head: 512 + 64 wide keys, of which the values are the first 512.
    AttentionCase("Kimi-Linear-48B, latent decode", 2016, 16, 4, 1, 512, (32, 1, 576, 512)),
)  # fmt: skip
