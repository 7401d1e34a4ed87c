"""The laws that a loss is checked for, and the variants of a batch that show whether it keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MICROBATCHES = "microbatches"
PADDING = "padding"
RANKS = "ranks"
ORDER = "order"
DRAWS = "draws"
# Descriptions of the laws, for the help text.
LAWS: Mapping[str, str] = MappingProxyType(
    {
        MICROBATCHES: "microbatches give the loss and gradient of the batch in one piece",
        PADDING: "so does any amount of padding, whatever is in it, and any mix of lengths",
        RANKS: "so do two ranks with unequal parts of the batch",
        ORDER: "so do the samples, and documents in a pack, in another order",
        DRAWS: "so do other random numbers, dropout apart",
    }
)


@dataclass(frozen=True)
class Variant:
    """A way to compute the loss of the batch.

    Args:
        name: name of its run, in messages and files.
        law: the law that the loss equals the loss of `reference`.
        title: title of its row in the report.
        batch: change to the batch: "whole" (none), "reversed", "short", "padded", "other padding",
            "documents".
        microbatch_size: number of samples in a microbatch; None for the batch in a single piece.
        reference: the variant that it is compared with; "" for a reference itself.
        num_ranks: number of ranks that share the batch.
        other_draws: whether to change the random numbers.
    """

    name: str
    law: str
    title: str
    batch: str = "whole"
    microbatch_size: int | None = None
    reference: str = "whole"
    num_ranks: int = 1
    other_draws: bool = False


WHOLE = Variant("whole", "", "one piece", reference="")
SHORT = Variant("short", PADDING, "unequal lengths, one piece", batch="short", reference="")
OTHER_DRAWS = Variant("draws", DRAWS, "other random numbers", other_draws=True)
DOCUMENTS = Variant("documents", ORDER, "documents in reversed order", batch="documents")
# In the order of their rows.
COMPARED = (
    Variant("microbatch-1", MICROBATCHES, "microbatches of 1", microbatch_size=1),
    Variant("microbatch-3", MICROBATCHES, "microbatches of 3", microbatch_size=3),
    Variant(
        "lengths",
        PADDING,
        "unequal lengths in microbatches",
        batch="short",
        microbatch_size=1,
        reference="short",
    ),
    Variant("padded", PADDING, "more padding", batch="padded", reference="short"),
    Variant(
        "content",
        PADDING,
        "other tokens in the padding",
        batch="other padding",
        reference="short",
    ),
    Variant("ranks", RANKS, "two ranks", num_ranks=2),
    Variant("reversed", ORDER, "reversed order", batch="reversed"),
)
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {variant.name: variant for variant in (WHOLE, SHORT, DOCUMENTS, OTHER_DRAWS, *COMPARED)}
)
