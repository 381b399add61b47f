"""HellaSwag's contexts and endings as rows of tokens, and these as batches of one shape."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

ROW = 384  # tokens in a row: about two examples, one long and one short
PARTS = 5  # of one context: itself and its four endings
PADDING = -1  # the part of a token that fills a row up


@dataclass
class Row:
    """One row of a batch: contexts, each with some of its endings behind it, side by side.

    What a causal model computes for a token depends on that token and on those before it, never on
    later ones. So it computes the same for a context whichever ending follows, and once is enough
    for all four. Two things let each ending follow its context directly, as if the others were not
    there: its positions go on from the context's last one, and the attention mask hides the other
    endings. The context `a b c` with the endings `d e` and `f g h`:

        tokens   a b c d f g
        pos      0 1 2 3 3 4
        part     0 0 0 1 2 2      0: the context; 1 to 4: an ending

        a sees   a
        b sees   a b
        c sees   a b c            and predicts d, and f
        d sees   a b c d          and predicts e
        f sees   a b c   f        and predicts g
        g sees   a b c   f g      and predicts h

    The last token of an ending predicts nothing, so the row does not contain it. `targets` has
    (column, token, slot) for each token of the endings: the column that predicts it, the token, and
    the number of its ending, counted over the endings of all examples.

    The next context begins behind that, in the same row: its positions begin at 0, its parts at 5,
    those of a third at 10, and none of its tokens sees one of the first's.
    """

    tokens: list[int]
    pos: list[int]
    part: list[int]
    targets: list[tuple[int, int, int]]


def lay_out(context: list[int], endings: list[list[int]], slot: int, width: int) -> list[Row]:
    """One example as few rows of at most `width` tokens; with width 0, one ending a row.

    slot: the number of the first ending; the others' follow. The drawing in `Row`, with 1 to 8 for
    a to h:

    >>> [row] = lay_out(context=[1, 2, 3], endings=[[4, 5], [6, 7, 8]], slot=0, width=16)
    >>> row.tokens, row.pos, row.part
    ([1, 2, 3, 4, 6, 7], [0, 1, 2, 3, 3, 4], [0, 0, 0, 1, 2, 2])
    >>> row.targets
    [(2, 4, 0), (3, 5, 0), (2, 6, 1), (4, 7, 1), (5, 8, 1)]
    """
    rows: list[Row] = []
    first = len(context)  # the position of an ending's first token
    for i, ending in enumerate(endings):
        inputs = ending[:-1]
        if not rows or len(rows[-1].tokens) + len(inputs) > width:
            rows.append(Row(list(context), pos=list(range(first)), part=[0] * first, targets=[]))
        row = rows[-1]
        start = len(row.tokens)
        row.tokens += inputs
        row.pos += range(first, first + len(inputs))
        row.part += [i + 1] * len(inputs)
        # the context's last token predicts the ending's first; each of its own tokens the next
        columns = [first - 1, *range(start, start + len(inputs))]
        for column, token in zip(columns, ending, strict=True):
            row.targets.append((column, token, slot + i))
    return rows


def join(rows: list[Row], width: int) -> list[Row]:
    """Puts rows behind one another, into fewer rows of at most `width` tokens.

    The longest come first, and each goes where the least room is left that still holds it. (Best
    fit decreasing, from bin packing: 1% of HellaSwag's rows stays empty.)
    """
    joined: list[Row] = []
    with_room: dict[int, list[Row]] = defaultdict(list)  # {tokens that still fit: rows}
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        length = len(row.tokens)
        room = next((room for room in range(length, width) if with_room[room]), width)
        if room == width:
            joined.append(Row([], [], [], []))
            with_room[width] = [joined[-1]]
        host = with_room[room].pop()
        append(host, row)
        with_room[room - length].append(host)
    return joined


def append(host: Row, row: Row) -> None:
    """Puts a row with one context behind what another one holds."""
    start = len(host.tokens)
    contexts = host.part[-1] // PARTS + 1 if host.part else 0
    host.tokens += row.tokens
    host.pos += row.pos
    host.part += [PARTS * contexts + part for part in row.part]
    host.targets += [(start + column, token, slot) for column, token, slot in row.targets]


class Batch(NamedTuple):
    """B rows of T columns, and the P tokens that they predict, row after row; all int64."""

    tokens: torch.Tensor  # (B, T)
    pos: torch.Tensor  # (B, T)
    part: torch.Tensor  # (B, T)
    predicted_at: torch.Tensor  # (P, 2): row and column
    targets: torch.Tensor  # (P,)
    slots: torch.Tensor  # (P,)


def make_batch(rows: list[Row], B: int, T: int) -> Batch:
    """Rows as a batch, filled up with padding to B rows of T columns."""
    missing = B - len(rows)
    rows = [*rows, *[Row([], [], [], [])] * missing]
    targets = []
    for b, row in enumerate(rows):
        targets += [(b, column, token, slot) for column, token, slot in row.targets]
    b, column, token, slot = torch.tensor(targets).T
    return Batch(
        tokens=torch.tensor([fill_up(row.tokens, T, 0) for row in rows]),
        pos=torch.tensor([fill_up(row.pos, T, 0) for row in rows]),
        part=torch.tensor([fill_up(row.part, T, PADDING) for row in rows]),
        predicted_at=torch.stack([b, column], 1),
        targets=token,
        slots=slot,
    )


def fill_up(numbers: list[int], length: int, value: int) -> list[int]:
    return numbers + [value] * (length - len(numbers))


def make_batches(rows: list[Row], budget: int, width: int) -> list[Batch]:
    """Rows of similar length together, at most `budget` tokens with the padding, if not one row.

    width: of all batches, which then have equally many rows, too; 0: of each the longest row's.
    """
    rows = sorted(rows, key=lambda row: -len(row.tokens))
    most = max(1, budget // len(rows[0].tokens))  # rows in a batch
    count = math.ceil(len(rows) / most)
    B = math.ceil(len(rows) / count)
    batches = []
    for start in range(0, len(rows), B):
        some = rows[start : start + B]
        if width:
            batches.append(make_batch(some, B, width))
        else:
            batches.append(make_batch(some, len(some), len(some[0].tokens)))
    return batches
