"""Chunks of one geometry are read with another, and compared with slices of the logical cache from
which both are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from offload.errors import NamespaceError
from offload.geometry.mooncake_source import board_of
from offload.geometry.translate import (
    GroupTranslation,
    Incompatibility,
    apply,
    obstacles,
    translation_of,
)
from offload.namespaces.geometry import (
    COPIES,
    HEADS,
    OWN,
    Geometry,
    GroupGeometry,
    LayerGeometry,
)

ROWS, TILES, LATENT, STATE = "rows", "tiles", "latent", "state"


@dataclass(frozen=True)
class Logical:
    """One layer's part of a chunk, of which each rank holds a part: ``content[head, unit in token
    order, byte]``. ``unit_tokens`` is 1 for rows, else the tokens of a kernel block."""

    name: str
    kind: str
    unit_tokens: int
    content: np.ndarray


@dataclass(frozen=True)
class Cut:
    """How one side divides a chunk: blocks, kernel blocks of a block, tokens of a kernel block."""

    chunk_blocks: int
    kernel_blocks: int
    kernel_tokens: int


def layer_of(logical: Logical, cut: Cut, ranks: int, order: str) -> LayerGeometry:
    heads, _, unit = logical.content.shape
    if logical.kind == STATE:
        page = logical.content.shape[1] // cut.chunk_blocks * unit
        return LayerGeometry(logical.name, OWN, "mamba", 1, cut.kernel_tokens, 1, 1, page, order)
    return LayerGeometry(
        logical.name,
        COPIES if logical.kind == LATENT else HEADS,
        logical.kind,
        cut.kernel_blocks,
        cut.kernel_tokens,
        max(1, heads // ranks),
        cut.kernel_tokens // logical.unit_tokens,
        unit,
        order,
    )


def geometry_of(
    layers: list[Logical], cut: Cut, ranks: int, rank: int, orders: list[str]
) -> Geometry:
    pages = tuple(layer_of(x, cut, ranks, o) for x, o in zip(layers, orders, strict=True))
    block_tokens = cut.kernel_blocks * cut.kernel_tokens
    group = GroupGeometry(0, "full", "full_attention", block_tokens, cut.chunk_blocks, pages)
    return Geometry(bytes(16), rank, ranks, "any", (group,))


def record_of(layers: list[Logical], cut: Cut, ranks: int, rank: int, orders: list[str]) -> bytes:
    """The expected record of this rank, cut from the logical cache without any strides."""
    found = b""
    for block in range(cut.chunk_blocks):
        for logical, order in zip(layers, orders, strict=True):
            found += page_of(logical, cut, ranks, rank, order, block)
    return found


def page_of(logical: Logical, cut: Cut, ranks: int, rank: int, order: str, block: int) -> bytes:
    content = logical.content
    total = content.shape[0]
    if logical.kind == STATE:
        units = content.shape[1] // cut.chunk_blocks
        return (content[0, block * units : (block + 1) * units] ^ rank).tobytes()
    if logical.kind == LATENT or total < ranks:
        mine = content[rank * total // ranks : rank * total // ranks + 1]
    else:
        mine = content[rank * (total // ranks) : (rank + 1) * (total // ranks)]
    per_kernel_block = cut.kernel_tokens // logical.unit_tokens
    parts = mine.reshape(len(mine), cut.chunk_blocks, cut.kernel_blocks, per_kernel_block, -1)
    page = parts[:, block]  # heads, kernel blocks, tokens, bytes
    axes = ["hbt".index(axis) for axis in order]
    return page.transpose(*axes, 3).tobytes()


@dataclass(frozen=True)
class Case:
    """A logical cache and two ways of storing it."""

    layers: list[Logical]
    cuts: tuple[Cut, Cut]
    ranks: tuple[int, int]
    rank: int
    orders: tuple[list[str], list[str]]

    def geometry(self, side: int, rank: int) -> Geometry:
        return geometry_of(self.layers, self.cuts[side], self.ranks[side], rank, self.orders[side])

    def record(self, side: int, rank: int) -> np.ndarray:
        args = (self.layers, self.cuts[side], self.ranks[side], rank, self.orders[side])
        return np.frombuffer(record_of(*args), np.uint8)

    def is_exact(
        self,
        fault: Callable[[GroupTranslation], GroupTranslation] = lambda translation: translation,
    ) -> bool:
        """Write with the first geometry, read with the second, and compare."""
        stored, now = self.geometry(0, 0), self.geometry(1, self.rank)
        translation = fault(translation_of(stored, now, 0))
        into = np.full(translation.chunk_bytes, 0xEE, np.uint8)
        apply(translation, [self.record(0, rank) for rank in translation.ranks], into)
        return bool((into == self.record(1, self.rank)).all())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pair that must be translatable."""
    pick = lambda items: draw(st.sampled_from(items))  # noqa: E731  # used ten times below
    kinds = draw(st.lists(st.sampled_from([ROWS, TILES, LATENT, STATE]), min_size=1, max_size=4))
    heads = pick([1, 2, 3, 4, 6, 8])
    counts = [r for r in (1, 2, 3, 4, 6, 8, 16) if r % heads == 0 or heads % r == 0]
    stored = pick(counts)
    # The ranks of both sides hold each head equally often; 2 and 3 ranks for one head are refused.
    places = max(stored, heads)
    fits = [r for r in counts if not max(r, places) % min(max(r, heads), places)]
    ranks = (stored, pick(fits))
    tokens = pick([4, 12, 16, 24])
    kernel = pick(divisors(tokens))
    kernels = (kernel, kernel if {TILES, LATENT} & set(kinds) else pick(divisors(tokens)))
    cuts = []
    for size in kernels:
        parts = pick(divisors(tokens // size))
        cuts.append(Cut(tokens // size // parts, parts, size))
    if STATE in kinds:
        cuts, ranks = [cuts[0], cuts[0]], (ranks[0], ranks[0])
    seed = draw(st.integers(0, 1 << 30))
    note(f"seed of the bytes: {seed}")
    random = np.random.default_rng(seed)
    layers = []
    for number, kind in enumerate(kinds):
        unit_tokens = {ROWS: 1, STATE: 1}.get(kind, kernel)
        count = heads if kind in (ROWS, TILES) else 1
        shape = (count, tokens // unit_tokens, pick([1, 2, 6]))
        layers.append(
            Logical(f"layer.{number}", kind, unit_tokens, random.integers(0, 255, shape, np.uint8))
        )
    orders = tuple([pick(["bht", "bth", "hbt", "thb"]) for _ in layers] for _side in range(2))
    return Case(layers, (cuts[0], cuts[1]), ranks, pick(range(ranks[1])), orders)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_any_geometry_is_read_exactly_with_any_other(case: Case) -> None:
    assert obstacles(case.geometry(0, 0), case.geometry(1, case.rank)) == []
    assert case.is_exact()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_a_geometry_is_read_back_from_its_document(case: Case) -> None:
    geometry = case.geometry(1, case.rank)
    document = geometry.dump()
    assert Geometry.load(document, "here") == geometry
    with pytest.raises(NamespaceError, match="here"):
        Geometry.load(document.replace(b'"full"', b'"fuII"'), "here")


def example(
    kind: str = ROWS,
    heads: int = 4,
    ranks: tuple[int, int] = (2, 1),
    rank: int = 0,
    cuts: tuple[Cut, Cut] = (Cut(1, 2, 4), Cut(1, 2, 4)),
) -> Case:
    """One layer with two bytes for each unit: K and V."""
    tokens = cuts[0].chunk_blocks * cuts[0].kernel_blocks * cuts[0].kernel_tokens
    unit = 1 if kind == ROWS else cuts[0].kernel_tokens
    random = np.random.default_rng(7)
    content = random.permutation(heads * tokens // unit * 2).astype(np.uint8)
    layer = Logical("layer.0", kind, unit, content.reshape(heads, -1, 2))
    return Case([layer], cuts, ranks, rank, (["bht"], ["bth"]))


def swapped_heads(translation: GroupTranslation) -> GroupTranslation:
    """Every second record is replaced by its neighbour."""
    return replace(translation, ranks=translation.ranks[::-1])


def swapped_halves(translation: GroupTranslation) -> GroupTranslation:
    """K in the place of V."""
    halves = []
    for copy in translation.copies:
        half = copy.unit_bytes // 2
        for to, came in ((0, half), (half, 0)):
            halves.append(
                replace(
                    copy,
                    unit_bytes=half,
                    from_offset=copy.from_offset + came,
                    to_offset=copy.to_offset + to,
                )
            )
    return replace(translation, copies=tuple(halves))


@pytest.mark.parametrize("fault", [swapped_heads, swapped_halves])
def test_the_comparison_detects_planted_faults(
    fault: Callable[[GroupTranslation], GroupTranslation],
) -> None:
    assert example().is_exact()
    assert not example().is_exact(fault)


def test_the_comparison_detects_a_wrong_ratio() -> None:
    """The reader's own ratio is used in place of the writer's, as before pull request 42097."""
    case = example(ranks=(1, 1), cuts=(Cut(1, 4, 2), Cut(1, 2, 4)))
    assert case.is_exact()
    stored, now = case.geometry(0, 0), case.geometry(1, 0)
    group = stored.groups[0]
    wrong = replace(
        stored,
        groups=(
            replace(
                group,
                layers=(replace(group.layers[0], kernel_blocks=2, kernel_tokens=4, tokens=4),),
            ),
        ),
    )
    translation = translation_of(wrong, now, 0)
    into = np.zeros(translation.chunk_bytes, np.uint8)
    apply(translation, [case.record(0, rank) for rank in translation.ranks], into)
    assert not (into == case.record(1, 0)).all()


@pytest.mark.parametrize("kernel_tokens", [(4, 6), (6, 4), (2, 3), (8, 12), (12, 8)])
@pytest.mark.parametrize("chunk_blocks", [(1, 1), (1, 2), (2, 1)])
def test_kernel_blocks_that_overlap_partly(
    chunk_blocks: tuple[int, int], kernel_tokens: tuple[int, int]
) -> None:
    """Neither size divides the other: a copy ends where a kernel block of either side ends."""
    there, here = (
        Cut(blocks, 48 // blocks // tokens, tokens)
        for blocks, tokens in zip(chunk_blocks, kernel_tokens, strict=True)
    )
    case = example(heads=4, ranks=(1, 2), rank=1, cuts=(there, here))
    assert obstacles(case.geometry(0, 0), case.geometry(1, 1)) == []
    assert case.is_exact()


@pytest.mark.parametrize("turned", [False, True])
def test_seed_case_4_ratios_34_and_66_are_expanded_with_the_writers(turned: bool) -> None:
    """Chunks of 33 blocks of 34 kernel blocks, and of 17 blocks of 66: the same 1,122."""
    cuts = (Cut(33, 34, 1), Cut(17, 66, 1))
    cuts = cuts[::-1] if turned else cuts
    case = example(LATENT, heads=1, ranks=(4, 2), rank=1, cuts=cuts)
    assert obstacles(case.geometry(0, 0), case.geometry(1, 1)) == []
    assert case.is_exact()
    translation = translation_of(case.geometry(0, 0), case.geometry(1, 1), 0)
    assert sum(int(np.prod(copy.shape)) for copy in translation.copies) == 34 * 33


def test_seed_case_4_ratios_34_and_66_of_single_blocks_are_refused() -> None:
    sides = [
        example(LATENT, heads=1, ranks=(1, 1), cuts=(cut, cut)).geometry(0, 0)
        for cut in (Cut(1, 34, 16), Cut(1, 66, 16))
    ]
    assert [str(found) for found in obstacles(*sides)] == [
        "groups[0].chunk_tokens was 544 (1 blocks of 544) when stored and is 1056 (1 "
        "blocks of 1056) now: "
        "chunks end at other tokens"
    ]


@pytest.mark.parametrize("ends", [((3, 34), (2, 66)), ((2, 66), (3, 34))])
def test_seed_case_4_ends_that_would_have_to_be_trimmed_are_refused(
    ends: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """100 tokens, rounded up to whole blocks: 102 kernel blocks on one side, 132 on the other."""
    (there, here), sides = ends, []
    for blocks, ratio in ends:
        cut = Cut(blocks, ratio, 1)
        sides.append(example(LATENT, heads=1, ranks=(1, 1), cuts=(cut, cut)).geometry(0, 0))
    [found] = obstacles(*sides)
    assert str(found) == (
        f"groups[0].chunk_tokens was {there[0] * there[1]} ({there[0]} blocks of {there[1]})"
        f" when stored and is {here[0] * here[1]} ({here[0]} blocks of {here[1]}) now"
        ": chunks end at other tokens"
    )
    assert found.flags == f'--block-size {there[1]} and "chunk_blocks": {there[0]}'


def test_states_are_never_split() -> None:
    one, two = (example(STATE, heads=1, ranks=(n, n)).geometry(0, 0) for n in (1, 2))
    assert obstacles(two, two) == []
    assert [str(found) for found in obstacles(two, one)] == [
        "parallel.tensor was 2 when stored and is 1 now: layer layer.0 (mamba) cannot be "
        "split over other ranks"
    ]


def test_any_ranks_latent_is_complete() -> None:
    for ranks, rank in (((2, 1), 0), ((1, 2), 1), ((4, 2), 1)):
        case = example(LATENT, heads=1, ranks=ranks, rank=rank)
        assert case.is_exact()
        assert len(translation_of(case.geometry(0, 0), case.geometry(1, rank), 0).ranks) == 1


def test_heads_on_several_ranks() -> None:
    """Two heads on eight ranks are on four each; every way to and from them is exact."""
    for stored in (1, 2, 4, 8):
        for now in (1, 2, 4, 8):
            for rank in range(now):
                assert example(heads=2, ranks=(stored, now), rank=rank).is_exact(), (stored, now)


Change = Callable[[Geometry], Geometry]


def in_layer(**changes: object) -> Change:
    def change(geometry: Geometry) -> Geometry:
        group = geometry.groups[0]
        layers = tuple(replace(layer, **changes) for layer in group.layers)  # type: ignore[arg-type]  # fields of a layer
        return replace(geometry, groups=(replace(group, layers=layers),))

    return change


REFUSED: dict[str, tuple[Case, Change, str]] = {
    "heads": (
        example(),
        in_layer(heads=3),
        "groups[0].heads was 2 on each of 2 ranks when stored and is 3 on each of 1 now",
    ),
    "replicas of more than one head": (
        example(ranks=(1, 2)),
        in_layer(heads=4),
        "groups[0].heads was 4 on each of 1 ranks when stored and is 4 on each of 2 now",
    ),
    "head size": (
        example(),
        in_layer(unit_bytes=4),
        "groups[0].head_bytes was 2 when stored and is 4 now",
    ),
    "replicas of an odd number of ranks": (
        example(heads=2, ranks=(2, 2)),
        lambda geometry: replace(geometry, ranks=3),
        "groups[0].heads was 1 on each of 2 ranks when stored and is 1 on each of 3 now",
    ),
    "state of another size": (
        example(STATE, heads=1, ranks=(1, 1)),
        in_layer(unit_bytes=5),
        "groups[0].page_bytes was 4 when stored and is 5 now",
    ),
    "state of other tokens": (
        example(STATE, heads=1, ranks=(1, 1)),
        lambda geometry: replace(
            geometry, groups=(replace(geometry.groups[0], block_tokens=4, chunk_blocks=2),)
        ),
        "groups[0].block_size was 8 when stored and is 4 now",
    ),
    "kernel": (
        example(),
        in_layer(form="other"),
        "groups[0].form was rows when stored and is other now",
    ),
    "split": (
        example(),
        in_layer(split=COPIES),
        "groups[0].split was heads when stored and is copies now",
    ),
    "names": (
        example(),
        in_layer(layer="layer.9"),
        "groups[0].layers was 1 when stored and is 1 now: only one side has ['layer.0', 'layer.9']",
    ),
    "kernel block": (
        example(TILES, ranks=(1, 1)),
        in_layer(kernel_tokens=8, kernel_blocks=1),
        "groups[0].kernel_block_size was 4 when stored and is 8 now: the order of tokens "
        "in a kernel block of tiles is unknown",
    ),
    "groups": (
        example(),
        lambda geometry: replace(geometry, groups=()),
        "groups was [0] when stored and is [] now",
    ),
    "spec": (
        example(),
        lambda geometry: replace(
            geometry, groups=(replace(geometry.groups[0], spec="sliding_window"),)
        ),
        "groups[0].spec was full_attention when stored and is sliding_window now",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unprovable_translations_are_refused(name: str) -> None:
    case, change, text = REFUSED[name]
    stored, now = case.geometry(0, 0), case.geometry(1, 0)
    assert obstacles(stored, now) == []
    found: list[Incompatibility] = obstacles(stored, change(now))
    assert len(found) == 1
    assert str(found[0]).startswith(text), str(found[0])


def test_the_name_of_a_board_does_not_depend_on_geometry() -> None:
    one = {"model": {"name": "m"}, "geometry": {"chunk_blocks": 1}, "parallel": {"tensor": 1}}
    two = one | {"geometry": {"chunk_blocks": 2}, "parallel": {"tensor": 2}}
    other = one | {"model": {"name": "n"}}
    assert board_of(one, 1) == board_of(two, 1)
    assert len({board_of(*args) for args in ((one, 1), (one, 0), (other, 1))}) == 3
