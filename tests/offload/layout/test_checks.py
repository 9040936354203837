"""The start-up checks: what is refused, with which text, and that hints work."""

import pytest

from offload.errors import AlignmentError, LayoutError, UnsupportedSpecError
from offload.layout.checks import (
    GroupInput,
    LayoutInput,
    build_layout,
    find_misfits,
    helping_hints,
)
from offload.layout.groups import FULL, STATE, WINDOW
from tests.texts import same_text


def make_group(group: int = 0, kind: str = FULL, block: int = 16, **more) -> GroupInput:
    spec = {FULL: "full_attention", WINDOW: "sliding_window", STATE: "mamba"}.get(kind, "unknown")
    more = {"spec": spec, "layers": (f"model.layers.{group}",), "block_bytes": 512, **more}
    return GroupInput(group=group, kind=kind, block_tokens=block, **more)


def make_input(*groups: GroupInput, **more) -> LayoutInput:
    values = {"num_blocks": 64, "hash_tokens": 16, "scheduler_tokens": 16, **more}
    return LayoutInput(groups=groups, **values)


def message_of(given: LayoutInput, kind: type[LayoutError]) -> str:
    with pytest.raises(kind) as caught:
        build_layout(given)
    return str(caught.value)


def test_a_single_full_group():
    layout = build_layout(make_input(make_group(), chunk_blocks=4))
    (group,) = layout.groups
    assert (group.chunk_tokens, group.chunk_bytes) == (64, 2048)
    assert (layout.alignment_tokens, layout.num_blocks, layout.token_bytes) == (64, 64, 32.0)


def test_alignment_is_a_common_multiple_of_all_chunks():
    groups = (make_group(0, FULL, 32), make_group(1, WINDOW, 64, window_tokens=100))
    layout = build_layout(make_input(*groups, hash_tokens=32, scheduler_tokens=64, chunk_blocks=3))
    assert layout.alignment_tokens == 192


def test_a_states_chunk_is_one_block_whatever_the_option():
    """Hits can therefore end at every state; vLLM may keep only the last one of a prompt."""
    groups = (make_group(0, FULL, 544), make_group(1, STATE, 544, draft=True))
    given = make_input(*groups, hash_tokens=544, scheduler_tokens=544, chunk_blocks=2)
    layout = build_layout(given)
    full, state = layout.groups
    assert (full.chunk_tokens, state.chunk_tokens, layout.alignment_tokens) == (544, 544, 544)
    assert not state.draft, "draft models have no states"


def test_chunks_beside_states_divide_the_states_blocks():
    groups = (make_group(0, FULL, 32), make_group(1, STATE, 128))
    given = make_input(*groups, hash_tokens=32, scheduler_tokens=128, chunk_blocks=8)
    layout = build_layout(given)
    assert [group.chunk_tokens for group in layout.groups] == [128, 128]
    assert layout.alignment_tokens == 128


@pytest.mark.parametrize(
    ("window", "blocks"), [(4095, 8), (255, 8), (254, 4), (127, 4), (90, 2), (20, 1), (0, 1)]
)
def test_a_windows_chunk_is_not_larger_than_its_window(window, blocks):
    """The first blocks of a larger chunk would be freed before its last block is full, so the chunk
    would never be stored."""
    groups = (make_group(0, FULL, 32), make_group(1, WINDOW, 32, window_tokens=window))
    layout = build_layout(make_input(*groups, hash_tokens=32, scheduler_tokens=32, chunk_blocks=8))
    assert [group.chunk_blocks for group in layout.groups] == [8, blocks]
    assert layout.alignment_tokens == 256


@pytest.mark.parametrize(("span", "blocks"), [(8192, 2), (96, 3), (64, 2), (160, 1), (32, 1)])
def test_a_chunk_does_not_cross_the_spans_of_chunked_local_attention(span, blocks):
    groups = (make_group(0, FULL, 32), make_group(1, WINDOW, 32, span_tokens=span))
    layout = build_layout(make_input(*groups, hash_tokens=32, scheduler_tokens=32, chunk_blocks=6))
    assert layout.groups[1].chunk_blocks == blocks


def test_scratch_groups_are_skipped_and_named():
    """A group that takes no part is not checked: its block of 5 would not fit anything."""
    scratch = make_group(1, FULL, 5, skipped="scratch memory of one request")
    layout = build_layout(make_input(make_group(), scratch, scheduler_tokens=80))
    assert [group.group for group in layout.groups] == [0]
    assert layout.skipped == (
        "group 1 (full_attention; 1 layer: model.layers.1): scratch memory of one request",
    )


def test_all_misfits_are_in_one_error():
    groups = [
        make_group(0, "", 16, spec="cross_attention", refused="encoder-decoder models cannot"),
        make_group(1, STATE, 4096, unaligned_state=True),
        make_group(2, FULL, 24),
        make_group(3, FULL, 16, per_token_scales=True),
        make_group(4, "", 16),
    ]
    given = make_input(*groups, scheduler_tokens=4096, context_parallel=2)
    same_text("layout_all_offenders", message_of(given, UnsupportedSpecError))


def test_a_hash_block_that_does_not_divide_is_refused():
    given = make_input(make_group(0, FULL, 24), make_group(1, WINDOW, 48), scheduler_tokens=48)
    text = message_of(given, AlignmentError)
    same_text("layout_hash_block", text)
    assert "--prefix-match-unit 24" in text


def test_unaligned_states_with_prefix_caching_off_are_refused():
    groups = (make_group(0, FULL, 16), make_group(1, STATE, 10240, unaligned_state=True))
    given = make_input(*groups, hash_tokens=10240, scheduler_tokens=10240, prefix_caching=False)
    text = message_of(given, UnsupportedSpecError)
    same_text("layout_unaligned_state", text)
    assert "--enable-prefix-caching --mamba-cache-mode align" in text


def test_a_hint_that_does_not_help_is_not_printed():
    """A scheduler block that does not fit stays wrong whatever the states do."""
    groups = (
        make_group(0, "", 16, spec="cross_attention", refused="cannot be offloaded"),
        make_group(1, STATE, 10240, unaligned_state=True),
    )
    given = make_input(*groups, hash_tokens=16, scheduler_tokens=10240, prefix_caching=False)
    assert helping_hints(given) == []
    assert "To fix it" not in message_of(given, UnsupportedSpecError)


def test_two_hints_that_help_only_together_are_printed_together():
    groups = (make_group(0, FULL, 16, per_token_scales=True), make_group(1, FULL, 16))
    given = make_input(*groups, context_parallel=2)
    same_text("layout_two_hints", message_of(given, UnsupportedSpecError))


def test_prefix_longer_than_the_context_is_refused():
    given = make_input(
        make_group(0, FULL, 544),
        hash_tokens=544,
        scheduler_tokens=544,
        chunk_blocks=8,
        max_tokens=2048,
    )
    text = message_of(given, AlignmentError)
    same_text("layout_longer_than_context", text)
    assert 'set "chunk_blocks" to 3' in text


def test_nothing_to_offload_is_an_error():
    same_text("layout_nothing", message_of(make_input(make_group(skipped="scratch")), LayoutError))


def test_context_parallelism_with_one_group_is_accepted():
    assert build_layout(make_input(make_group(), context_parallel=4)).alignment_tokens == 16


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_no_blocks_is_refused(chunk):
    assert "chunk_blocks" in message_of(make_input(make_group(), chunk_blocks=chunk), LayoutError)


@pytest.mark.parametrize(
    ("given", "hints"),
    [
        (make_input(make_group(0, FULL, 24), scheduler_tokens=48), 1),
        (make_input(make_group(0, FULL, 16), make_group(1, FULL, 16), context_parallel=2), 1),
        (make_input(make_group(), pipeline_parallel=2), 1),
        (make_input(make_group(0, FULL, 16, per_token_scales=True)), 2),
        (make_input(make_group(), max_tokens=64, chunk_blocks=9), 1),
        (make_input(make_group(0, FULL, 16), make_group(1, STATE, 160, unaligned_state=True)), 1),
    ],
)
def test_the_checks_pass_with_the_changes_of_a_hint(given, hints):
    """vLLM decides what its flags change; the doctor's tests check that with vLLM."""
    assert find_misfits(given)
    found = helping_hints(given)
    assert len(found) == hints
    for hint in found:
        assert hint.changed != given
        assert find_misfits(hint.changed) == []
        assert build_layout(hint.changed)
